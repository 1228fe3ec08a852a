"""Who gets in: the answer to each handshake, and the key directory, looked at each second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from ..common.auth_keys import Grant, KeyRing
from ..common.log import get_logger
from ..common.sockets import Context, Socket
from .acl import AccessControl

log = get_logger("broker")

DOMAIN = "diloco"
LOOK_SECONDS = 1.0
HASTY_SECONDS = 0.05
"""For a key that nobody knows the directory is looked at anew, but not again within so long: libzmq does not try again
after it was refused, and the key may have been made just now."""
HANDSHAKE_SECONDS = 10.0
"""Who has not proven a key after so long is cut off: a stranger's connection costs no more than its socket."""


class Authenticator(threading.Thread):
    """Lets the holders of keys in until `stop`, and has everybody reconnect when one of them is to stay outside."""

    def __init__(self, context: Context, ring: KeyRing, on_failure: Callable[[], object]) -> None:
        super().__init__(name="broker-door", daemon=True)
        self.failure: BaseException | None = None
        self._ring, self._on_failure = ring, on_failure
        self._barred: set[str] = set()
        self._gates: list[AccessControl] = []
        self._reconnect: Callable[[], object] = lambda: None
        self._unreadable = ""
        self._looked_at = 0.0
        self._looking = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._known = self._grants()
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=DOMAIN, credentials_provider=self)

    def guard(self, gates: Iterable[AccessControl], reconnect: Callable[[], object]) -> None:
        """Keep `gates` up to date, and call `reconnect` where connections must be cut. Before `start`."""
        self._gates, self._reconnect = list(gates), reconnect

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether who proved the key with this public half comes in. zmq.auth calls it, from a thread of its own."""
        public = key.decode("ascii", "replace")
        if self.grant_of(public) is None and public not in self._barred:
            with self._looking:
                if time.monotonic() - self._looked_at > HASTY_SECONDS:
                    self._look()
        return self.grant_of(public) is not None

    def grant_of(self, public: str) -> Grant | None:
        return None if public in self._barred else self._ring.grant_of(public)

    def lock(self, socket: Socket) -> None:
        """Make a socket take connections only of those who come in here. Before it is bound."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._ring.secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody comes in where nobody is asked
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))

    def bar(self, public: str, why: str) -> None:
        """Shut a key out until this broker ends. Safe from every thread; all connections are cut."""
        with self._looking:
            if public in self._barred:  # the other plane was faster
                return
            log.warning("key_barred", key=str(self._ring.grant_of(public) or "one that was revoked"), why=why)
            self._barred.add(public)
            self._known.pop(public, None)
            self._renew()
            self._reconnect()

    def stop(self) -> None:
        """Let nobody in any more."""
        self._stopping = True
        self._wake.set()
        if self.is_alive():
            self.join()
        self._end_authenticator()

    def _end_authenticator(self) -> None:
        """As its `stop`, which would wait for ever to hand its last word to a thread that has died."""
        pipe, thread = self._authenticator.pipe, self._authenticator.thread
        if pipe is not None:
            with suppress(zmq.Again):  # nobody is there to take it
                pipe.send(b"TERMINATE", zmq.NOBLOCK)
            thread.join()
            pipe.close(0)
            self._authenticator.pipe = None  # type: ignore[assignment]
        self._authenticator.stop()  # closes its socket

    def run(self) -> None:
        try:
            while not self._stopping:
                self._wake.wait(LOOK_SECONDS)
                self._wake.clear()
                with self._looking:
                    self._look()
                if not self._authenticator.is_alive():
                    raise RuntimeError("the thread that answers handshakes has ended")
        except BaseException as failure:  # the broker ends with it: keys that nobody checks are none
            self.failure = failure
            log.exception("door_failed")
            self._on_failure()

    def _look(self) -> None:
        self._looked_at = time.monotonic()
        try:
            if self._ring.changed():
                self._ring.reload()
            self._unreadable = ""
        except OSError as wrong:  # who was in stays in
            if not self._unreadable:
                log.warning("keys_unreadable", directory=str(self._ring.directory), why=wrong.strerror)
            self._unreadable = str(wrong)
        self._compare()

    def _compare(self) -> None:
        before, self._known = self._known, self._grants()
        if before == self._known:
            return
        self._renew()
        for public, grant in self._known.items():
            if public not in before:
                log.info("key_added", key=str(grant))
        gone = [grant for public, grant in before.items() if self._known.get(public) != grant]
        for grant in gone:
            log.info("key_revoked", key=str(grant))
        if gone:
            self._reconnect()

    def _grants(self) -> dict[str, Any]:
        return {grant.public: grant for grant in self._ring.grants if grant.public not in self._barred}

    def _renew(self) -> None:
        for gate in self._gates:
            gate.renew()
