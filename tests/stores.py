"""What tests of the store share: programs that hold one, and TLS in front of it (the bundled server speaks none)."""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
from pathlib import Path
from typing import Self

# For localhost and 127.0.0.1, self-signed, valid until 2120. It protects nothing: the key is public by being here.
_CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBmDCCAT6gAwIBAgIBATAKBggqhkjOPQQDAjAUMRIwEAYDVQQDDAlsb2NhbGhv
c3QwIBcNMjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMBQxEjAQBgNVBAMM
CWxvY2FsaG9zdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABPOZ/Q2040gJUz3Z
qw0lazIJSICnJdAcFmeH1gejFHDBpgWn+YGYGY1I8o+ZFKKg/l8eCpNlIYOtS9RN
e3mJk6mjfzB9MBoGA1UdEQQTMBGCCWxvY2FsaG9zdIcEfwAAATAPBgNVHRMBAf8E
BTADAQH/MB0GA1UdDgQWBBTlxiAahd26ZXV/41xbzS3efw6NNTAOBgNVHQ8BAf8E
BAMCAoQwHwYDVR0jBBgwFoAU5cYgGoXdumV1f+NcW80t3n8OjTUwCgYIKoZIzj0E
AwIDSAAwRQIgNywv5XochfbdgZATr7r6caF3iM6v1MbnuHIPrhG2F3ACIQDxJNWg
stDiJGTXsc8gDiGJO3rm5mUL+IH1w8IjyK6ZUg==
-----END CERTIFICATE-----
"""
_KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgj7+Ir90W4jXso24Z
i2k9TCmZLwafylVU6plW7loGA4ehRANCAATzmf0NtONICVM92asNJWsyCUiApyXQ
HBZnh9YHoxRwwaYFp/mBmBmNSPKPmRSioP5fHgqTZSGDrUvUTXt5iZOp
-----END PRIVATE KEY-----
"""


class TlsFront:
    """Listens with TLS on a port of its own and passes everything on to a port that speaks none."""

    def __init__(self, directory: Path, behind: int) -> None:
        self.certificate = directory / "certificate.pem"
        self.certificate.write_text(_CERTIFICATE)
        key = directory / "key.pem"
        key.write_text(_KEY)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self.certificate, key)
        self._behind = behind
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._pairs: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()
        for pair in self._pairs:
            pair.join(10)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed under it
            while True:
                plain, _ = self._listener.accept()
                pair = threading.Thread(target=self._pass_on, args=(plain,), daemon=True)
                self._pairs.append(pair)
                pair.start()

    def _pass_on(self, plain: socket.socket) -> None:
        """Until either side ends. A client that does not trust us ends it in the handshake."""
        with contextlib.suppress(OSError), plain:
            plain.settimeout(5)
            with (
                self._context.wrap_socket(plain, server_side=True) as outside,
                socket.create_connection(("127.0.0.1", self._behind), timeout=5) as inside,
                selectors.DefaultSelector() as ready,
            ):
                ready.register(outside, selectors.EVENT_READ, inside)
                ready.register(inside, selectors.EVENT_READ, outside)
                while True:
                    for key, _ in ready.select():
                        source: socket.socket = key.fileobj  # type: ignore[assignment]
                        received = source.recv(2**16)
                        if not received:
                            return
                        key.data.sendall(received)
