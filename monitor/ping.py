"""`diloco ping`: round trip through the broker on both planes. Serves as a container health check, so it starts quickly
and does not import torch.
"""

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

INTERVAL_SECONDS = 0.1
"""A ping sent before the broker has the subscription is lost, so it is repeated."""
POLL_MS = 20
NUMBERS = random.SystemRandom()


def ping(
    address: str, *, key: Path | None = None, run: str = "", wants_beat: bool = False, timeout_seconds: float = 5.0
) -> str:
    """One line with the round-trip times to the broker at `address`.

    wants_beat: also wait for a Beat of `run`, or of the key's run, or of any run. SettingError for a wrong argument,
    PeerLost if something is missing after `timeout_seconds`; it says what, and why if known.
    """
    if not timeout_seconds > 0:
        raise SettingError(f"--timeout must be greater than 0 seconds, not {timeout_seconds:g}")
    if run:
        check_name("--run", run)
    parsed, held = Address.parse(address), held_key(key)
    run = run_of(held, run, key)
    check_sockets("a ping", 4)
    with zmq.Context[zmq.Socket[bytes]](io_threads=1) as context:
        up = {
            Plane.CONTROL: PublishSocket(context, parsed.control_in, hwm_messages=CONTROL_MESSAGES, key=held),
            Plane.BULK: PublishSocket(context, parsed.bulk_in, hwm_messages=CONTROL_MESSAGES, key=held),
        }
        down = {
            Plane.CONTROL: SubscribeSocket(context, parsed.control_out, hwm_messages=CONTROL_MESSAGES, key=held),
            Plane.BULK: SubscribeSocket(context, parsed.bulk_out, hwm_messages=CONTROL_MESSAGES, key=held),
        }
        name = held.name if held is not None else f"ping-{secrets.token_hex(4)}"
        trip = _RoundTrip(up, down, run or "ping", name)
        try:
            if wants_beat:
                down[Plane.CONTROL].subscribe(beat_topic(run))
            _wait(trip, wants_beat=wants_beat, seconds=timeout_seconds)
        finally:
            context.destroy(linger=0)
    missing = trip.missing(wants_beat=wants_beat)
    if missing:
        endpoints = [*up.values(), *down.values()]
        why = refusal_of(endpoints, address, key) or unresolved_of(endpoints)
        raise PeerLost(f"{why or missing.format(address=address)} (waited {timeout_seconds:g} s)")
    return trip.summary()


def _wait(trip: _RoundTrip, *, wants_beat: bool, seconds: float) -> None:
    until = time.monotonic() + seconds
    while trip.missing(wants_beat=wants_beat) and time.monotonic() < until:
        trip.poll()


class _RoundTrip:
    """Pings on both planes, repeated on each until one has returned."""

    def __init__(self, up: dict[Plane, PublishSocket], down: dict[Plane, SubscribeSocket], run: str, name: str) -> None:
        self.up, self.down, self.run, self.name = up, down, run, name
        self.seconds: dict[Plane, float] = {}
        self.beat: Beat | None = None
        self._sent: dict[tuple[Plane, int], float] = {}
        self._due = dict.fromkeys(Plane, 0.0)
        self._poller = zmq.Poller()
        for endpoint in (*up.values(), *down.values()):
            self._poller.register(endpoint.socket, zmq.POLLIN)
        for downlink in down.values():
            downlink.subscribe(prefix(run, "ping", name))

    def poll(self) -> None:
        """Send the pings that are due and receive for up to POLL_MS."""
        for endpoint in (*self.up.values(), *self.down.values()):
            endpoint.look()
        for plane, uplink in self.up.items():
            now = time.monotonic()
            if plane not in self.seconds and now >= self._due[plane]:
                number = NUMBERS.randrange(1, MAX_COUNT)
                if uplink.send(Ping(run=self.run, name=self.name, nonce=number)):
                    self._due[plane] = now + INTERVAL_SECONDS
                    self._sent[plane, number] = now
        self._poller.poll(POLL_MS)
        for plane, downlink in self.down.items():
            while (message := downlink.receive()) is not None:
                if isinstance(message, Ping) and (plane, message.nonce) in self._sent:
                    self.seconds.setdefault(plane, time.monotonic() - self._sent[plane, message.nonce])
                elif isinstance(message, Beat):
                    self.beat = message

    def missing(self, *, wants_beat: bool) -> str:
        """What has not arrived yet, as a sentence with a placeholder for the address; "" if nothing is missing."""
        if not all(uplink.proven for uplink in self.up.values()) and len(self.seconds) < len(self.up):
            return "no broker answers at {address}; is it running, and is the address right?"
        lost = [plane.name.lower() for plane in self.up if plane not in self.seconds]
        if lost:
            return (
                f"the broker at {{address}} answers, but no ping of {self.name} returned ({' and '.join(lost)} plane)"
            )
        if wants_beat and self.beat is None:
            which = "any run" if self.run == "ping" else f"run {self.run}"
            return f"the broker at {{address}} answers, but no beat of {which} was heard; is the syncer running?"
        return ""

    def summary(self) -> str:
        line = ", ".join(f"{plane.name.lower()} {1000 * self.seconds[plane]:.1f} ms" for plane in self.up)
        return line if self.beat is None else f"{line}, run {self.beat.run} {self.beat.state} at step {self.beat.t}"
