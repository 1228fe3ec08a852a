"""A broker in this process, with clients that send and receive everything."""

from __future__ import annotations

from decoupled_diloco.broker.broker import Broker
from decoupled_diloco.common.sockets import Address, Context, PublishSocket, SubscribeSocket
from decoupled_diloco.common.wire import (
    Beat,
)
from transport import (
    downlink,
    meet,
    next_of,
    uplink,
)
from waiting import wait_for

BEAT = Beat(run="run", epoch=1, state="running", t=1, steps=2, step_seconds=0, syncer=1)


PLANES = ("control", "bulk")


class BrokerClients:
    """A broker in this process with a sender and a receiver of everything on each plane."""

    def __init__(self, broker: Broker, address: Address, made: Context) -> None:
        self.broker, self.address = broker, address
        ends = {"control": (address.control_in, address.control_out), "bulk": (address.bulk_in, address.bulk_out)}
        self.up: dict[str, PublishSocket] = {plane: uplink(made, ends[plane][0]) for plane in PLANES}
        self.down: dict[str, SubscribeSocket] = {plane: downlink(made, ends[plane][1], b"") for plane in PLANES}
        for plane in PLANES:
            meet(self.up[plane], self.down[plane], BEAT)

    def send_raw(self, plane: str, *frames: bytes) -> None:
        self.up[plane].socket.send_multipart(frames)

    def dropped(self, plane: str) -> dict[str, int]:
        rows: dict[str, int] = self.broker.counters()[plane]["dropped"]
        return rows

    def works(self) -> None:
        """Nothing but our own message has arrived, on each plane."""
        for plane in PLANES:
            wait_for(lambda plane=plane: self.up[plane].send(BEAT), "the broker takes a message")  # type: ignore[misc]
            assert isinstance(next_of(self.down[plane], f"a genuine message passes the {plane} plane"), Beat)
            assert self.down[plane].receive() is None
