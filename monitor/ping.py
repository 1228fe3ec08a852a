"""`diloco ping`: through the broker and back, on both planes. A container's health check: quick, and without torch."""

from __future__ import annotations

import random
import secrets
import time
from pathlib import Path

import zmq

from ..common.auth_keys import held_key, run_of
from ..common.config import check_name
from ..common.errors import PeerLost, SettingError
from ..common.sockets import (
    CONTROL_MESSAGES,
    Address,
    PublishSocket,
    SubscribeSocket,
    check_sockets,
    refusal_of,
    unresolved_of,
)
from ..common.wire import MAX_COUNT, Beat, Ping, Plane, beat_topic, prefix

EVERY_SECONDS = 0.1
"""A ping that goes out before the broker knows who listens is lost; so another one follows."""
TURN_MS = 20
NUMBERS = random.SystemRandom()


def ping(
    address: str, *, key: Path | None = None, run: str = "", wants_beat: bool = False, timeout_seconds: float = 5.0
) -> str:
    """How many milliseconds a message takes to the broker at `address` and back, in a line for people.

    wants_beat: wait for a beat as well, of `run`, or of the key's run, or of any. SettingError for a wrong argument,
    PeerLost if something is missing after `timeout_seconds`; it says what, and why if the broker does.
    """
    if not timeout_seconds > 0:
        raise SettingError(f"--timeout must be greater than 0 seconds, not {timeout_seconds:g}")
    if run:
        check_name("--run", run)
    place, held = Address.parse(address), held_key(key)
    run = run_of(held, run, key)
    check_sockets("a ping", 4)
    with zmq.Context[zmq.Socket[bytes]](io_threads=1) as context:
        up = {
            Plane.CONTROL: PublishSocket(context, place.control_in, hwm_messages=CONTROL_MESSAGES, key=held),
            Plane.BULK: PublishSocket(context, place.bulk_in, hwm_messages=CONTROL_MESSAGES, key=held),
        }
        down = {
            Plane.CONTROL: SubscribeSocket(context, place.control_out, hwm_messages=CONTROL_MESSAGES, key=held),
            Plane.BULK: SubscribeSocket(context, place.bulk_out, hwm_messages=CONTROL_MESSAGES, key=held),
        }
        name = held.name if held is not None else f"ping-{secrets.token_hex(4)}"
        trip = RoundTrip(up, down, run or "ping", name)
        try:
            if wants_beat:
                down[Plane.CONTROL].subscribe(beat_topic(run))
            _wait(trip, wants_beat=wants_beat, seconds=timeout_seconds)
        finally:
            context.destroy(linger=0)
    missing = trip.missing(wants_beat=wants_beat)
    if missing:
        lines = [*up.values(), *down.values()]
        why = refusal_of(lines, address, key) or unresolved_of(lines)
        raise PeerLost(f"{why or missing.format(address=address)} (waited {timeout_seconds:g} s)")
    return trip.told()


def _wait(trip: RoundTrip, *, wants_beat: bool, seconds: float) -> None:
    until = time.monotonic() + seconds
    while trip.missing(wants_beat=wants_beat) and time.monotonic() < until:
        trip.turn()


class RoundTrip:
    """Pings on both planes, each until the first one is back."""

    def __init__(self, up: dict[Plane, PublishSocket], down: dict[Plane, SubscribeSocket], run: str, name: str) -> None:
        self.up, self.down, self.run, self.name = up, down, run, name
        self.seconds: dict[Plane, float] = {}
        self.beat: Beat | None = None
        self._sent: dict[tuple[Plane, int], float] = {}
        self._due = dict.fromkeys(Plane, 0.0)
        self._poller = zmq.Poller()
        for line in (*up.values(), *down.values()):
            self._poller.register(line.socket, zmq.POLLIN)
        for downlink in down.values():
            downlink.subscribe(prefix(run, "ping", name))

    def turn(self) -> None:
        """Send what is due, and wait a moment for what comes."""
        for line in (*self.up.values(), *self.down.values()):
            line.look()
        for plane, uplink in self.up.items():
            now = time.monotonic()
            if plane not in self.seconds and now >= self._due[plane]:
                number = NUMBERS.randrange(1, MAX_COUNT)
                if uplink.send(Ping(run=self.run, name=self.name, nonce=number)):
                    self._due[plane] = now + EVERY_SECONDS
                    self._sent[plane, number] = now
        self._poller.poll(TURN_MS)
        for plane, downlink in self.down.items():
            while (message := downlink.receive()) is not None:
                if isinstance(message, Ping) and (plane, message.nonce) in self._sent:
                    self.seconds.setdefault(plane, time.monotonic() - self._sent[plane, message.nonce])
                elif isinstance(message, Beat):
                    self.beat = message

    def missing(self, *, wants_beat: bool) -> str:
        """What did not come yet, in a sentence with a gap for the address; "" if nothing is missing."""
        if not all(uplink.proven for uplink in self.up.values()) and len(self.seconds) < len(self.up):
            return "nobody answers at {address}; is the broker running, and is the address right?"
        lost = [plane.name.lower() for plane in self.up if plane not in self.seconds]
        if lost:
            return (
                f"the broker at {{address}} answers, and no ping of {self.name} came back ({' and '.join(lost)} plane)"
            )
        if wants_beat and self.beat is None:
            which = "any run" if self.run == "ping" else f"run {self.run}"
            return f"the broker at {{address}} is there, and no beat of {which} was heard; is the syncer running?"
        return ""

    def told(self) -> str:
        line = ", ".join(f"{plane.name.lower()} {1000 * self.seconds[plane]:.1f} ms" for plane in self.up)
        return line if self.beat is None else f"{line}, run {self.beat.run} {self.beat.state} at step {self.beat.t}"
