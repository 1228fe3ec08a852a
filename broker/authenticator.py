"""Authenticator of connections: answers each CURVE handshake from the key directory, which it rereads each second."""

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
"""For an unknown key the directory is reread at once, but not more often than this: the key may be new, and libzmq does
not retry after a rejected handshake."""
HANDSHAKE_SECONDS = 10.0
"""A connection that has not proven a key by then is closed, so that a stranger costs one socket at most."""


class Authenticator(threading.Thread):
    """Accepts connections of known keys until `stop`. When a key is revoked or barred, all clients must reconnect."""

    def __init__(self, context: Context, ring: KeyRing, on_failure: Callable[[], object]) -> None:
        super().__init__(name="broker-authenticator", daemon=True)
        self.failure: BaseException | None = None
        self._ring, self._on_failure = ring, on_failure
        self._barred: set[str] = set()
        self._controls: list[AccessControl] = []
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

    def guard(self, controls: Iterable[AccessControl], reconnect: Callable[[], object]) -> None:
        """Keep the access control of each plane up to date; `reconnect` cuts all connections. Call before `start`."""
        self._controls, self._reconnect = list(controls), reconnect

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether a client that proved the key with this public half is accepted. Called by zmq.auth in its thread."""
        public = key.decode("ascii", "replace")
        if self.grant_of(public) is None and public not in self._barred:
            with self._looking:
                if time.monotonic() - self._looked_at > HASTY_SECONDS:
                    self._look()
        return self.grant_of(public) is not None

    def grant_of(self, public: str) -> Grant | None:
        return None if public in self._barred else self._ring.grant_of(public)

    def lock(self, socket: Socket) -> None:
        """Require authentication on a socket. Call before it is bound."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._ring.secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator, libzmq rejects
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))

    def bar(self, public: str, why: str) -> None:
        """Reject a key until this broker ends, and cut all connections. Thread-safe."""
        with self._looking:
            if public in self._barred:  # by the other plane
                return
            log.warning("key_barred", key=str(self._ring.grant_of(public) or "a revoked key"), why=why)
            self._barred.add(public)
            self._known.pop(public, None)
            self._renew()
            self._reconnect()

    def stop(self) -> None:
        """Accept no more connections, and end the thread."""
        self._stopping = True
        self._wake.set()
        if self.is_alive():
            self.join()
        self._end_authenticator()

    def _end_authenticator(self) -> None:
        """Replaces the authenticator's own `stop`, which blocks for ever if its thread has died."""
        pipe, thread = self._authenticator.pipe, self._authenticator.thread
        if pipe is not None:
            with suppress(zmq.Again):  # the thread has died
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
        except BaseException as failure:  # the broker ends too: it must not run with unchecked keys
            self.failure = failure
            log.exception("authenticator_failed")
            self._on_failure()

    def _look(self) -> None:
        self._looked_at = time.monotonic()
        try:
            if self._ring.changed():
                self._ring.reload()
            self._unreadable = ""
        except OSError as wrong:  # known keys stay valid
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
        for control in self._controls:
            control.renew()
