"""Detects rejected connections. libzmq reports no error and stops reconnecting after an authentication failure, so the
socket monitor is watched, the socket is reconnected, and the broker is asked which security mechanism it wants.
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
"""Signature and version: enough to be answered, and nothing yet that the peer could dislike."""
MECHANISM = slice(12, 32)
"""Where the answer says `NULL` or `CURVE`, filled up with zeros."""
ANSWER_SECONDS = 2.0


class MechanismProbe(threading.Thread):
    """Asks the peer at `endpoint` (tcp://HOST:PORT) once, in a thread, since looking up a name may take long."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(name="diloco-greeting", daemon=True)
        self._endpoint = endpoint
        self.answer: str | None = None
        """The peer's mechanism, once it is known; "" if none was told."""
        self.start()

    def run(self) -> None:
        self.answer = mechanism_of(self._endpoint)


def mechanism_of(endpoint: str) -> str:
    """`NULL`, `CURVE` or another mechanism of the ZeroMQ peer at tcp://HOST:PORT; "" where none is, or none answers."""
    place = urlsplit(endpoint)
    said = b""
    try:
        with socket.create_connection((place.hostname or "", place.port or 0), ANSWER_SECONDS) as peer:
            peer.sendall(OPENING)
            while len(said) < MECHANISM.stop and (part := peer.recv(64)):
                said += part
    except (OSError, UnicodeError):
        return ""
    return said[MECHANISM].rstrip(b"\0").decode("ascii", "replace") if len(said) >= MECHANISM.stop else ""


AGAIN_SECONDS = 2.0
"""How soon somebody who was refused calls again: his key may be known by then."""
LOOK_SECONDS = 0.05
"""Not oftener is looked: a loop turns a thousand times a second when much arrives."""
BROKEN_OFF = 5
"""Connections in a row, cut in the handshake, after which the broker is asked what it wants. One side with a key and
the other without cut one in three before it is known why, and nearly all on a busy machine.
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
    """Why a broker that is there takes no connection; the value is what it does, in words."""

    WANTS_KEY = "wants a key: give --key FILE (see diloco keys new)"
    TAKES_NO_KEYS = "takes no keys: leave --key {file} out, or start the broker with --keys"
    UNKNOWN_KEY = "refuses the key {file} (unknown or revoked)"
    OTHER_BROKER = "is not the one that the key {file} was made for: make a key where its own keys are"
    NO_BROKER = "speaks another language: no broker of this kind is at that address"

    def told(self, broker: str, file: Path | None) -> str:
        """The sentence for people."""
        return f"the broker at {broker} {self.value.format(file=file)}"


class ConnectionMonitor:
    """Of one socket, that is about to connect to `endpoint`. To be looked at by the socket's own thread."""

    def __init__(self, context: zmq.Context[Any], socket: zmq.Socket[Any], endpoint: str, *, keyed: bool) -> None:
        self.refusal: Refusal | None = None
        """What the last handshake came to; None while nobody is there as well."""
        self.connected = False
        """A broker is there and takes us."""
        self._socket, self._endpoint, self._keyed = socket, endpoint, keyed
        self._broken_off = 0
        self._look_at = 0.0
        self._again_at: float | None = None
        self._question: MechanismProbe | None = None
        place = f"inproc://handshakes-{next(NUMBERS)}"
        socket.monitor(place, EVENTS)
        self._events = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, 0)  # one that is full would stop the thread that serves all sockets
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.connect(place)

    def look(self) -> None:
        """Take what was said since, and call again where libzmq has given up. Never blocks; cheap at any rate."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        while int(self._events.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            told = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
            self._take(int(told["event"]), int(told["value"]))
        if self._question is not None and self._question.answer is not None:
            self._answered(self._question.answer)
        if self._again_at is not None and now >= self._again_at:
            self._again_at = None
            self.reconnect()

    def reconnect(self) -> None:
        """Begin anew, with what the socket's options are now."""
        self._socket.disconnect(self._endpoint)
        self._socket.connect(self._endpoint)

    def close(self) -> None:
        """To be called before the socket itself is closed."""
        if not self._socket.closed:
            self._socket.monitor(None, 0)
        self._events.close()

    def _take(self, event: int, value: int) -> None:
        self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if event == zmq.EVENT_DISCONNECTED:  # after a refusal, too
            return
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._broken_off += 1  # libzmq calls again by itself
            if self._broken_off >= BROKEN_OFF and self._question is None and self.refusal is None:
                self._question = MechanismProbe(self._endpoint)
            return
        self._broken_off, self._question = 0, None
        if event in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_CLOSED):  # or nobody is there at all
            self.refusal = None
            return
        self._again_at = time.monotonic() + AGAIN_SECONDS
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refusal = Refusal.UNKNOWN_KEY
        elif value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            self.refusal = Refusal.TAKES_NO_KEYS if self._keyed else Refusal.WANTS_KEY
        elif value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            self.refusal = Refusal.OTHER_BROKER
        else:
            self.refusal = Refusal.NO_BROKER

    def _answered(self, mechanism: str) -> None:
        """What a peer wants that cuts us off; one that does not even say so is no broker."""
        self._broken_off, self._question = 0, None
        if mechanism == "CURVE":
            self.refusal = Refusal.OTHER_BROKER if self._keyed else Refusal.WANTS_KEY
        elif mechanism == "NULL" and self._keyed:
            self.refusal = Refusal.TAKES_NO_KEYS
