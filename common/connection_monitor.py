"""Monitor of a socket's connection, which detects that the broker rejects it. libzmq reports no error and stops
reconnecting after an authentication failure, so the socket's events are watched and the socket is reconnected.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import parse_monitor_message

OPENING = b"\xff" + bytes(8) + b"\x7f\x03"
"""ZMTP 3 signature and version (RFC 23): enough for an answer, without a mechanism that the peer could reject."""
MECHANISM = slice(12, 32)
"""The bytes of the peer's greeting that name its mechanism, `NULL` or `CURVE`, padded with zeros."""
ANSWER_SECONDS = 2.0


class _MechanismProbe(threading.Thread):
    """Reads the security mechanism of the peer at `endpoint` (tcp://HOST:PORT) once, in a thread of its own, since
    resolving a name may take long.
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__(name="diloco-mechanism", daemon=True)
        self._endpoint = endpoint
        self.answer: str | None = None
        """The peer's mechanism; None while unknown, "" if the peer did not answer."""
        self.start()

    def run(self) -> None:
        self.answer = mechanism_of(self._endpoint)


def mechanism_of(endpoint: str) -> str:
    """`NULL`, `CURVE` or another mechanism of the ZeroMQ peer at tcp://HOST:PORT; "" if no such peer answers."""
    place = urlsplit(endpoint)
    greeting = b""
    try:
        with socket.create_connection((place.hostname or "", place.port or 0), ANSWER_SECONDS) as peer:
            peer.sendall(OPENING)
            while len(greeting) < MECHANISM.stop and (part := peer.recv(64)):
                greeting += part
    except (OSError, UnicodeError):
        return ""
    return greeting[MECHANISM].rstrip(b"\0").decode("ascii", "replace") if len(greeting) >= MECHANISM.stop else ""


AGAIN_SECONDS = 2.0
"""Delay before reconnecting after a rejection: the broker may know the key by then."""
LOOK_SECONDS = 0.05
"""Shortest time between two reads of the events: the caller's loop may turn a thousand times a second."""
BROKEN_OFF = 5
"""Consecutive connections cut in the handshake after which the broker's mechanism is probed. If only one side has a
key, one in three handshakes ends before the reason arrives, and nearly all on a busy machine.
"""
EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
)
NUMBERS = itertools.count(1)


class Refusal(Enum):
    """Why a reachable broker rejects a connection; the value is the predicate of a sentence about it."""

    WANTS_KEY = "wants a key: give --key FILE (see diloco keys new)"
    TAKES_NO_KEYS = "takes no keys: leave --key {file} out, or start the broker with --keys"
    UNKNOWN_KEY = "refuses the key {file} (unknown or revoked)"
    OTHER_BROKER = "is not the one that the key {file} was made for: make a key in its own key directory"
    NO_BROKER = "uses another protocol: no broker of this kind is at that address"

    def sentence(self, broker: str, file: Path | None) -> str:
        """The sentence for the user; `file` is the key's file."""
        return f"the broker at {broker} {self.value.format(file=file)}"


class ConnectionMonitor:
    """Monitor of one socket that will connect to `endpoint`. Used by the socket's own thread only."""

    def __init__(self, context: zmq.Context[Any], socket: zmq.Socket[Any], endpoint: str, *, keyed: bool) -> None:
        self.refusal: Refusal | None = None
        """Why the last handshake was rejected; None if it was not, or no broker is reachable."""
        self.connected = False
        """The last handshake succeeded and the connection is open."""
        self._socket, self._endpoint, self._keyed = socket, endpoint, keyed
        self._broken_off = 0
        self._look_at = 0.0
        self._reconnect_at: float | None = None
        self._probe: _MechanismProbe | None = None
        place = f"inproc://handshakes-{next(NUMBERS)}"
        socket.monitor(place, EVENTS)
        self._events = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, 0)  # a full queue would block libzmq's I/O thread
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.connect(place)

    def look(self) -> None:
        """Read new events, and reconnect where libzmq has given up. Never blocks, and costs little if called often."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        while int(self._events.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
            self._take(int(event["event"]), int(event["value"]))
        if self._probe is not None and self._probe.answer is not None:
            self._answered(self._probe.answer)
        if self._reconnect_at is not None and now >= self._reconnect_at:
            self._reconnect_at = None
            self.reconnect()

    def reconnect(self) -> None:
        """Disconnect and connect again, with the socket's present options."""
        self._socket.disconnect(self._endpoint)
        self._socket.connect(self._endpoint)

    def close(self) -> None:
        """Stop monitoring. Call before the socket itself is closed."""
        if not self._socket.closed:
            self._socket.monitor(None, 0)
        self._events.close()

    def _take(self, event: int, value: int) -> None:
        self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if event == zmq.EVENT_DISCONNECTED:  # also follows a rejection, whose reason is kept
            return
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._broken_off += 1  # libzmq reconnects by itself
            if self._broken_off >= BROKEN_OFF and self._probe is None and self.refusal is None:
                self._probe = _MechanismProbe(self._endpoint)
            return
        self._broken_off, self._probe = 0, None
        if event in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_CLOSED):  # CLOSED: no peer at the endpoint
            self.refusal = None
            return
        self._reconnect_at = time.monotonic() + AGAIN_SECONDS
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refusal = Refusal.UNKNOWN_KEY
        elif value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            self.refusal = Refusal.TAKES_NO_KEYS if self._keyed else Refusal.WANTS_KEY
        elif value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            self.refusal = Refusal.OTHER_BROKER
        else:
            self.refusal = Refusal.NO_BROKER

    def _answered(self, mechanism: str) -> None:
        """Derive the reason from the mechanism of a peer that cuts handshakes; without an answer it is no broker."""
        self._broken_off, self._probe = 0, None
        if mechanism == "CURVE":
            self.refusal = Refusal.OTHER_BROKER if self._keyed else Refusal.WANTS_KEY
        elif mechanism == "NULL" and self._keyed:
            self.refusal = Refusal.TAKES_NO_KEYS
