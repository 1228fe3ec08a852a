"""ZeroMQ sockets of learners and syncer. They connect, and only the broker binds. A socket belongs to one thread.

After an outage ZeroMQ sends subscriptions again only when the program polls the socket. So the network thread polls all
of its sockets continuously, whatever the training thread does.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket as network
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import zmq

from .auth_keys import Key
from .config import DEFAULT_PORT, MESSAGE_BYTES
from .connection_monitor import ConnectionMonitor, Refusal
from .errors import Malformed, SettingError
from .host_lookup import HostWatch
from .system_limits import check_room
from .wire import MAX_COUNT, Message, decode, encode

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

CONTROL_MESSAGES = 10_000
"""High-water mark of every socket of the control plane, in messages."""
LINGER_SECONDS = 2.0
"""Longest time that closing waits for queued messages to reach a connected broker."""
HEARTBEAT_SECONDS = 5.0
SILENCE_SECONDS = 60.0
"""A connection without any traffic for this time, not even a heartbeat, is closed and its queue is freed."""
RESOLVE_SECONDS = 0.5
"""Longest time that a new connection waits for the resolution of its host name before it connects anyway."""
UNNUMBERED = frozenset({"welcome", "keyframe"})
"""Kinds that only a part of the subscribers receives; their `sequence` stays 0."""
SENDERS_REMEMBERED = 65_536
"""Most (sender, kind) pairs whose gaps a receiver counts; the oldest is forgotten, in case names are invented."""
REJECTED_A_CALL = 64
"""Most malformed messages that one call of `SubscribeSocket.receive` skips, so that a flood cannot hold its caller."""
SUBSCRIBE, UNSUBSCRIBE = b"\x01", b"\x00"
LABEL = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST_PATTERN = re.compile(rf"(?=.{{1,253}}\Z){LABEL}(\.{LABEL})*")


# --- addresses -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Address:
    """The broker's address: its host and the first of its four consecutive ports.

    >>> Address.parse("tcp://[::1]:5550").bulk_out
    'tcp://[::1]:5553'
    """

    host: str
    """A name, an IPv4 or an IPv6 address, without brackets."""
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """The address in `tcp://HOST:PORT`; SettingError if `text` has another form."""
        wrong = SettingError(
            f"the broker's address {text[:200]!r} must look like tcp://HOST:{DEFAULT_PORT} (IPv6: tcp://[::1]:{DEFAULT_PORT})"
        )
        try:
            parts = urlsplit(text)
            host, port = parts.hostname or "", parts.port
        except ValueError as cause:
            raise wrong from cause
        if parts.scheme != "tcp" or parts.netloc.rpartition("@")[1] or text != f"{parts.scheme}://{parts.netloc}":
            raise wrong
        if port is None or not (HOST_PATTERN.fullmatch(host) or is_ipv6(host)):
            raise wrong
        if not 1 <= port <= 65_532:
            raise SettingError(
                f"the broker's port must be between 1 and 65532, not {port}: it uses four consecutive ports"
            )
        return cls(host, port)

    @property
    def control_in(self) -> str:
        return self._endpoint(0)

    @property
    def control_out(self) -> str:
        return self._endpoint(1)

    @property
    def bulk_in(self) -> str:
        return self._endpoint(2)

    @property
    def bulk_out(self) -> str:
        return self._endpoint(3)

    def __str__(self) -> str:
        return self._endpoint(0)

    def _endpoint(self, offset: int) -> str:
        return f"tcp://{f'[{self.host}]' if is_ipv6(self.host) else self.host}:{self.port + offset}"


def is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


# --- options ---------------------------------------------------------------------------------------------------------
def configure(socket: Socket, *, hwm_messages: int, message_bytes: int = MESSAGE_BYTES) -> None:
    """Set the options that all sockets share, also the broker's. Call before connect or bind."""
    options = {
        zmq.SNDHWM: hwm_messages,
        zmq.RCVHWM: hwm_messages,
        zmq.LINGER: int(LINGER_SECONDS * 1000),
        zmq.HEARTBEAT_IVL: int(HEARTBEAT_SECONDS * 1000),
        zmq.HEARTBEAT_TIMEOUT: int(SILENCE_SECONDS * 1000),
        zmq.RECONNECT_IVL: 100,
        zmq.RECONNECT_IVL_MAX: 2000,
        zmq.IPV6: 1,
        zmq.MAXMSGSIZE: message_bytes,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)


def _use_key(socket: Socket, key: Key) -> None:
    """Authenticate with `key`, authenticate the broker, and encrypt (CURVE). Call before connect."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())
    socket.setsockopt(zmq.CURVE_SERVERKEY, key.broker.encode())


CONTEXT_FILES, FILES_A_THREAD, FILES_A_SOCKET = 3, 2, 4
"""Files that libzmq opens for a context, for each of its threads, and for a socket with its connection and monitor."""


def check_sockets(who: str, sockets: int, *, io_threads: int = 1, threads: int = 0) -> None:
    """Raise LimitReached unless `who` can open a context with `sockets` sockets, and start `threads` threads."""
    files = CONTEXT_FILES + FILES_A_THREAD * io_threads + FILES_A_SOCKET * sockets
    check_room(who, files=files, threads=1 + io_threads + threads)


class BrokerConnection:
    """Base of publishing and subscribing sockets: a connection to the broker, and the state of that connection.

    It uses IPv4 if the host has such an address, else IPv6. libzmq tries one address only, and with IPv6 enabled that
    is ::1 for `localhost`, where a broker on 127.0.0.1 does not listen. A name that cannot be resolved yet is resolved
    again at each attempt.
    """

    def __init__(self, context: Context, socket: Socket, endpoint: str, key: Key | None) -> None:
        self.socket = socket
        if key is not None:
            _use_key(socket, key)
        self._monitor = ConnectionMonitor(context, socket, endpoint, keyed=key is not None)
        self._host = HostWatch(urlsplit(endpoint).hostname or "")
        self._family = self._host.family(RESOLVE_SECONDS)
        socket.setsockopt(zmq.IPV6, self._family == network.AF_INET6)
        socket.connect(endpoint)

    def look(self) -> None:
        """Update `refusal` and `unresolved`, and reconnect after a rejection. To be called often."""
        self._monitor.look()
        connected = self._monitor.connected
        self._host.look(connected=connected, now=time.monotonic())
        family = self._host.newest_family()
        if not connected and family is not None and family != self._family:  # resolved late, or changed
            self._family = family
            self.socket.setsockopt(zmq.IPV6, family == network.AF_INET6)
            self._monitor.reconnect()

    @property
    def refusal(self) -> Refusal | None:
        """Why the broker rejects the connection; None if it does not, or is not reachable."""
        return self._monitor.refusal

    @property
    def unresolved(self) -> str:
        """Why the broker's host name cannot be resolved, in a sentence; "" if it can, or that is not known."""
        return self._host.unresolved

    def close(self) -> None:
        """Close the socket; queued messages are still sent during the linger time while the context is closed."""
        self._monitor.close()
        self.socket.close()


def refusal_of(connections: Iterable[BrokerConnection], broker: str, key: Path | None) -> str:
    """Why the broker rejects one of `connections`, in a sentence; "" if it rejects none, or is not reachable."""
    return next((each.refusal.sentence(broker, key) for each in connections if each.refusal is not None), "")


def unresolved_of(connections: Iterable[BrokerConnection]) -> str:
    """Why the broker's host name cannot be resolved, in a sentence; "" if it can."""
    return next((each.unresolved for each in connections if each.unresolved), "")


# --- sending ---------------------------------------------------------------------------------------------------------
class PublishSocket(BrokerConnection):
    """Publishes to one plane of the broker, and detects whether the broker receives.

    An XPUB instead of a PUB: it delivers the broker's own subscription, which proves that messages sent from then on
    arrive there. When the connection breaks, the subscription is withdrawn and queued messages are dropped.
    """

    def __init__(self, context: Context, endpoint: str, *, hwm_messages: int, key: Key | None = None) -> None:
        socket = context.socket(zmq.XPUB)
        configure(socket, hwm_messages=hwm_messages)
        socket.setsockopt(zmq.XPUB_VERBOSER, 1)
        socket.setsockopt(zmq.XPUB_NODROP, 1)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # without it a broken connection withdraws nothing
        super().__init__(context, socket, endpoint, key)
        self.bytes_sent = 0
        self._subscriptions = 0
        self._numbers: Counter[str] = Counter()

    @property
    def proven(self) -> bool:
        """The broker's subscription was read and has not been withdrawn since."""
        return self._subscriptions > 0

    def read_subscriptions(self) -> None:
        """Read the broker's subscriptions. Call when the socket polls readable; `send` calls it, too."""
        while int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            frame = self.socket.recv(zmq.NOBLOCK)
            if frame == SUBSCRIBE:
                self._subscriptions += 1
            elif frame == UNSUBSCRIBE:
                self._subscriptions = max(0, self._subscriptions - 1)

    def send(self, message: Message) -> bool:
        """Number and send `message`. Returns False, with nothing sent, if no broker receives or the high-water mark is
        reached.

        After False try again in a later turn of the loop: there is no event to poll for. A payload in a writable buffer
        is copied. SettingError if the message is larger than any socket accepts.
        """
        self.read_subscriptions()
        if not self.proven:
            return False
        if message.KIND not in UNNUMBERED:
            message = replace(message, sequence=self._numbers[message.KIND] + 1)
        frames = encode(message)
        size = sum(len(frame) for frame in frames)
        if size > MESSAGE_BYTES:
            raise SettingError(f"a {message.KIND} of {size} bytes cannot be sent: the limit is {MESSAGE_BYTES}")
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=not _is_immutable(frames[-1]))
        except zmq.Again:
            return False
        self._numbers[message.KIND] = message.sequence
        self.bytes_sent += size
        return True


def _is_immutable(buffer: bytes | memoryview) -> bool:
    """Whether the buffer can never change: `bytes`, or a view of them. A read-only view of other memory can change."""
    return isinstance(buffer.obj if isinstance(buffer, memoryview) else buffer, bytes)


# --- receiving -------------------------------------------------------------------------------------------------------
class SubscribeSocket(BrokerConnection):
    """Receives subscribed messages from one plane of the broker, checks them, and counts gaps in their numbers."""

    def __init__(
        self,
        context: Context,
        endpoint: str,
        *,
        hwm_messages: int,
        key: Key | None = None,
        on_malformed: Callable[[bytes, Malformed], Any] | None = None,
    ) -> None:
        socket = context.socket(zmq.SUB)
        configure(socket, hwm_messages=hwm_messages)
        socket.setsockopt(zmq.LINGER, 0)  # it sends subscriptions only, useless after it is closed
        super().__init__(context, socket, endpoint, key)
        self.on_malformed = on_malformed
        self.bytes_received = 0
        self.rejected: Counter[str] = Counter()
        """Malformed messages by reason."""
        self.gaps = 0
        """Messages that did not arrive, counted by gaps in the sequence numbers."""
        self._newest: dict[tuple[str, str, str, int], int] = {}

    def subscribe(self, prefix: bytes) -> None:
        self.socket.setsockopt(zmq.SUBSCRIBE, prefix)

    def unsubscribe(self, prefix: bytes) -> None:
        self.socket.setsockopt(zmq.UNSUBSCRIBE, prefix)

    def receive(self) -> Message | None:
        """The next valid message, or None if none is waiting. Never blocks.

        A payload is a view of the received frame and stays valid as long as a reference to it exists.
        """
        for _ in range(REJECTED_A_CALL):
            frames = self._read()
            if not frames:
                return None
            try:
                message = decode(frames)
            except Malformed as wrong:
                self.rejected[wrong.reason] += 1
                if self.on_malformed is not None:
                    self.on_malformed(bytes(frames[0][:256]), wrong)
                continue
            self._count_gap(message)
            return message
        return None

    def _read(self) -> list[memoryview]:
        frames: list[memoryview] = []
        with contextlib.suppress(zmq.Again):  # none is waiting; the frames of one message arrive together
            while True:
                frame = self.socket.recv(zmq.NOBLOCK, copy=False)
                self.bytes_received += len(frame)
                if len(frames) < 4:  # one more than any message has: enough for `decode` to reject
                    frames.append(frame.buffer)
                if not frame.more:
                    break
        return frames

    def _count_gap(self, message: Message) -> None:
        if message.sequence == 0:
            return
        lifetime = getattr(message, "incarnation", 0) or getattr(message, "epoch", 0)
        sender = (message.run, getattr(message, "name", ""), message.KIND, lifetime)
        before = self._newest.pop(sender, None)
        if before is not None and message.sequence > before + 1:
            self.gaps = min(MAX_COUNT, self.gaps + message.sequence - before - 1)
        self._newest[sender] = max(message.sequence, before or 0)
        if len(self._newest) > SENDERS_REMEMBERED:
            del self._newest[next(iter(self._newest))]


# --- waking a poller -------------------------------------------------------------------------------------------------
class Waker:
    """Wakes the poller of one thread from any other: register `socket` for reading, `clear` when it is readable."""

    def __init__(self) -> None:
        self.socket, self._far = network.socketpair()
        self.socket.setblocking(False)
        self._far.setblocking(False)

    def fileno(self) -> int:
        return self.socket.fileno()

    def wake(self) -> None:
        """Wake the poller. Thread-safe, also after `close`."""
        with contextlib.suppress(OSError):  # full: a wake-up is pending already; or closed
            self._far.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.socket.recv(4096):
                pass

    def close(self) -> None:
        self.socket.close()
        self._far.close()
