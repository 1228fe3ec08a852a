"""Asking a ZeroMQ peer whether it wants keys. Both sides say so in the first bytes (ZMTP 3, RFC 23), and one that does
not like the other's hangs up: then often nothing of what it had said arrives, and nobody knows why.
"""

from __future__ import annotations

import socket
import threading
from urllib.parse import urlsplit

OPENING = b"\xff" + bytes(8) + b"\x7f\x03"
"""Signature and version: enough to be answered, and nothing yet that the peer could dislike."""
MECHANISM = slice(12, 32)
"""Where the answer says `NULL` or `CURVE`, filled up with zeros."""
ANSWER_SECONDS = 2.0


class Question(threading.Thread):
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
