"""The broker: two planes, so that bulk never starves control; each is one pair of sockets and one thread.

Publishers connect to `source` (XSUB), receivers to `sink` (XPUB). The broker itself subscribes to everything, and a
publisher that reads this subscription knows that its path is open. Receivers' subscriptions are not passed on. The
queue for a receiver that does not read is bounded by the high-water mark of `sink`; messages beyond it are dropped, and
the receiver sees the gap in their sequence numbers. With keys, only key holders can connect, and each may send and
receive only what its role needs.
"""

from __future__ import annotations

import socket as network
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from ..common.auth_keys import KeyRing
from ..common.config import CHUNK_BYTES, MESSAGE_BYTES, BrokerConfig
from ..common.errors import SettingError
from ..common.sockets import CONTROL_MESSAGES, Address, Context, Socket, check_sockets, configure
from ..common.wire import Plane
from .acl import AccessControl
from .authenticator import Authenticator
from .authorized_forwarder import AuthorizedForwarder
from .forwarder import Forwarder

SUBSCRIPTION_BYTES = 1024
"""The largest frame a receiver may send: a subscription is one byte and a prefix of a topic. Handshakes need 500."""


class Broker:
    """Four ports and one thread for each plane, from `start` to `stop`.

    `on_failure` is called, from a thread of the broker, when one of its threads fails; the caller then calls `stop`.
    """

    def __init__(self, config: BrokerConfig, on_failure: Callable[[], object] = lambda: None) -> None:
        self.config = config
        self._on_failure = on_failure
        self._planes: list[Forwarder] = []
        self._authenticator: Authenticator | None = None
        self._context: Context | None = None

    def start(self) -> None:
        """Open all four ports and forward. Raises SettingError, with no port open, if a port is taken or a key cannot
        be read.
        """
        address = Address(_numeric(self.config.host), self.config.port)
        ring = None if self.config.keys is None else KeyRing(self.config.keys)
        check_sockets("the broker", 10, io_threads=2, threads=4)
        self._context = zmq.Context(io_threads=2)
        try:
            if ring is not None:
                self._authenticator = Authenticator(self._context, ring, self._on_failure)
            for plane in Plane:
                self._planes.append(self._plane(plane, address))
        except BaseException:
            self._close_all()
            raise
        if self._authenticator is not None:
            controls = [plane.access for plane in self._planes if isinstance(plane, AuthorizedForwarder)]
            self._authenticator.guard(controls, self.reconnect)
            self._authenticator.start()
        for thread in self._planes:
            thread.start()

    def reconnect(self) -> None:
        """Cut all connections and listen again. ZeroMQ has no way to cut a single one."""
        for plane in self._planes:
            plane.reopen()

    def stop(self) -> None:
        """End both planes and free the ports. Messages still queued for receivers are sent during the linger time."""
        for plane in self._planes:
            plane.stop()
        self.join()

    def join(self, timeout_seconds: float | None = None) -> None:
        """Wait until both planes have ended, after `stop` or a failure."""
        for plane in self._planes:
            plane.join(timeout_seconds)
        if self._context is not None and not any(plane.is_alive() for plane in self._planes):
            if self._authenticator is not None:
                self._authenticator.stop()
            self._context.destroy(linger=0)  # closes sockets of a failed thread, too

    def in_use(self) -> bool:
        """Whether a client subscribes to more than its own pings, or did since the last call."""
        used = [plane.in_use() for plane in self._planes]  # no short circuit: each call resets its plane's flag
        return any(used)

    @property
    def failure(self) -> BaseException | None:
        """The error of a thread that failed; None if all run."""
        failures = [plane.failure for plane in self._planes]
        failures += [] if self._authenticator is None else [self._authenticator.failure]
        return next((failure for failure in failures if failure is not None), None)

    def counters(self) -> dict[str, dict[str, Any]]:
        """For each plane: messages and bytes forwarded, messages dropped by reason, distinct subscriptions."""
        return {
            plane.plane.name.lower(): {
                "messages": plane.messages,
                "bytes": plane.bytes,
                "subscriptions": plane.subscriptions,
                "dropped": dict(plane.dropped),
            }
            for plane in self._planes
        }

    def _plane(self, plane: Plane, address: Address) -> Forwarder:
        open_pair = partial(self._open_pair, plane, address)
        if self._authenticator is None:
            return Forwarder(plane, open_pair, self._on_failure)
        access = AccessControl(plane, self._authenticator.grant_of)
        return AuthorizedForwarder(plane, open_pair, self._on_failure, access, self._authenticator.bar)

    def _open_pair(self, plane: Plane, address: Address) -> tuple[Socket, Socket]:
        """Bind `source` and `sink` of a plane. Raises SettingError, with both closed, if a port is taken."""
        made: list[Socket] = []
        bulk = plane is Plane.BULK
        try:
            for kind, endpoint, frame_bytes in (
                (zmq.XSUB, address.bulk_in if bulk else address.control_in, MESSAGE_BYTES),
                (zmq.XPUB, address.bulk_out if bulk else address.control_out, SUBSCRIPTION_BYTES),
            ):
                assert self._context is not None  # noqa: S101 planes are made after it
                made.append(socket := self._context.socket(kind))
                messages = self.config.queue_mib * 2**20 // CHUNK_BYTES if bulk else CONTROL_MESSAGES
                configure(socket, hwm_messages=messages, message_bytes=frame_bytes)
                socket.setsockopt(zmq.AFFINITY, 1 << plane.value)
                if self._authenticator is not None:
                    self._authenticator.lock(socket)
                    if kind == zmq.XPUB:
                        socket.setsockopt(zmq.XPUB_MANUAL, 1)
                _bind(socket, endpoint)
        except BaseException:
            for each in made:
                each.close(0)
            raise
        source, sink = made
        return source, sink

    def _close_all(self) -> None:
        for plane in self._planes:
            plane.close()
        self._planes = []
        if self._authenticator is not None:
            self._authenticator.stop()
        if self._context is not None:
            self._context.destroy(linger=0)  # closes sockets of a failed thread, too


def _numeric(host: str) -> str:
    """`host` as an IP address, since a broker binds to an interface and not to a name; IPv4 is preferred to IPv6."""
    try:
        found = network.getaddrinfo(host, None, type=network.SOCK_STREAM)
    except (OSError, UnicodeError) as cause:
        raise SettingError(f"--host {host} is not an address of this machine: {cause}") from cause
    found.sort(key=lambda entry: entry[0] != network.AF_INET)
    return str(found[0][4][0])


def _bind(socket: Socket, endpoint: str) -> None:
    """Bind `socket` to `endpoint`. Raises SettingError naming the port if that fails."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as cause:
        port = endpoint.rpartition(":")[2]
        if cause.errno == zmq.EADDRINUSE:
            reason = f"port {port} is taken: another broker or program listens at {endpoint}; stop it, or choose --port"
        else:
            reason = f"port {port} cannot be opened at {endpoint}: {cause.strerror}; check --host and --port"
        raise SettingError(reason) from cause
