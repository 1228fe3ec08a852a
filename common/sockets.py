"""The sockets of learners and syncer: everyone connects, only the broker binds. ZeroMQ sockets belong to one thread.

A socket comes back after an outage only while its program uses it: subscriptions are sent again when the program polls
the socket, not before. So a link's own thread polls all of its sockets all the time, whatever the training thread does.
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
"""Water mark of the control plane, in messages, at every socket."""
LINGER_SECONDS = 2.0
"""How long closing may take to hand what was sent to a broker that is there. An absent one is not waited for."""
HEARTBEAT_SECONDS = 5.0
SILENCE_SECONDS = 60.0
"""A connection on which nothing came for so long, not even a heartbeat, is closed and what waits for it is freed."""
RESOLVE_SECONDS = 0.5
"""How long a new connection waits for its host name; one that is not resolved by then is connected to all the same."""
UNNUMBERED = frozenset({"welcome", "keyframe"})
"""Kinds that not everybody receives; their `sequence` stays 0."""
SENDERS_REMEMBERED = 65_536
"""Receivers count gaps of so many (sender, kind); the one not heard for longest is forgotten, if names are invented."""
REJECTED_A_CALL = 64
"""`SubscribeSocket.receive` skips so many malformed messages at a time: a flood of them cannot hold its caller."""
SUBSCRIBE, UNSUBSCRIBE = b"\x01", b"\x00"
LABEL = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST_PATTERN = re.compile(rf"(?=.{{1,253}}\Z){LABEL}(\.{LABEL})*")


# --- addresses -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Address:
    """The one address that everybody needs: the broker's host and the first of its four consecutive ports.

    >>> Address.parse("tcp://[::1]:5550").bulk_out
    'tcp://[::1]:5553'
    """

    host: str
    """A name, an IPv4 or an IPv6 address, without brackets."""
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """The address in `tcp://HOST:PORT`; SettingError if that is not what it is."""
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
            raise SettingError(f"the broker's port must lie between 1 and 65532, not {port}: it takes four in a row")
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
    """Set every option that all sockets share, the broker's too. To be called before connect or bind."""
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


def show_key(socket: Socket, key: Key) -> None:
    """Prove `key` to the broker, have the broker prove itself, and let nobody read along. Before connect."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())
    socket.setsockopt(zmq.CURVE_SERVERKEY, key.broker.encode())


CONTEXT_FILES, FILES_A_THREAD, FILES_A_SOCKET = 3, 2, 4
"""What libzmq opens for a context, for each of its threads, and for a socket with its connection and its monitor."""


def check_sockets(who: str, sockets: int, *, io_threads: int = 1, threads: int = 0) -> None:
    """LimitReached unless `who` may open a context with so many sockets, and start `threads` of its own."""
    files = CONTEXT_FILES + FILES_A_THREAD * io_threads + FILES_A_SOCKET * sockets
    check_room(who, files=files, threads=1 + io_threads + threads)


class BrokerConnection:
    """What sending and receiving sockets share: a connection to the broker, and what becomes of it.

    It goes over IPv4 where the host has such an address, else over IPv6: libzmq tries one address only, and with IPv6
    on that is ::1 for `localhost`, where a broker on 127.0.0.1 is not. A name that cannot be resolved yet is
    asked for again at each attempt.
    """

    def __init__(self, context: Context, socket: Socket, endpoint: str, key: Key | None) -> None:
        self.socket = socket
        if key is not None:
            show_key(socket, key)
        self._handshakes = ConnectionMonitor(context, socket, endpoint, keyed=key is not None)
        self._place = HostWatch(urlsplit(endpoint).hostname or "")
        self._family = self._place.family(RESOLVE_SECONDS)
        socket.setsockopt(zmq.IPV6, self._family == network.AF_INET6)
        socket.connect(endpoint)

    def look(self) -> None:
        """Take note of a refusal and of a name that leads nowhere, and call again after one. To be called often."""
        self._handshakes.look()
        connected = self._handshakes.connected
        self._place.look(connected=connected, now=time.monotonic())
        family = self._place.newest_family()
        if not connected and family is not None and family != self._family:  # it was not known in time, or has moved
            self._family = family
            self.socket.setsockopt(zmq.IPV6, family == network.AF_INET6)
            self._handshakes.reconnect()

    @property
    def refusal(self) -> Refusal | None:
        """Why the broker takes no connection of ours; None if it does, or is not there."""
        return self._handshakes.refusal

    @property
    def unresolved(self) -> str:
        """Why the broker's host name leads nowhere, in a sentence; "" if it does, or that is not known."""
        return self._place.unresolved

    def close(self) -> None:
        """Give the socket up; what was sent still goes out for its linger time while the context is closed."""
        self._handshakes.close()
        self.socket.close()


def refusal_of(lines: Iterable[BrokerConnection], broker: str, key: Path | None) -> str:
    """Why the broker does not let one of `lines` in, in a sentence; "" if it lets all in, or is not there."""
    return next((line.refusal.told(broker, key) for line in lines if line.refusal is not None), "")


def unresolved_of(lines: Iterable[BrokerConnection]) -> str:
    """Why the broker cannot be looked for at all, in a sentence; "" if it can."""
    return next((line.unresolved for line in lines if line.unresolved), "")


# --- sending ---------------------------------------------------------------------------------------------------------
class PublishSocket(BrokerConnection):
    """Publishes to one plane of the broker, and knows whether the broker is listening.

    An XPUB instead of a PUB: it hands over the broker's own subscription, which proves that what is sent from now on
    arrives there. When the connection breaks, the subscription is withdrawn, with all that still waited to be sent.
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
        """The broker's subscription was read and not withdrawn since."""
        return self._subscriptions > 0

    def read_subscriptions(self) -> None:
        """Take what the broker says. To be called whenever the socket polls readable; `send` does it as well."""
        while int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            frame = self.socket.recv(zmq.NOBLOCK)
            if frame == SUBSCRIBE:
                self._subscriptions += 1
            elif frame == UNSUBSCRIBE:
                self._subscriptions = max(0, self._subscriptions - 1)

    def send(self, message: Message) -> bool:
        """Number and send `message`; False, and nothing was sent, where no broker listens or the water mark is reached.

        After False try again at a later turn of the loop: there is no event to poll for. What was sent stays as it
        was: a payload in a buffer that could be written to is copied. SettingError for what no socket would take.
        """
        self.read_subscriptions()
        if not self.proven:
            return False
        if message.KIND not in UNNUMBERED:
            message = replace(message, sequence=self._numbers[message.KIND] + 1)
        frames = encode(message)
        size = sum(len(frame) for frame in frames)
        if size > MESSAGE_BYTES:
            raise SettingError(f"a {message.KIND} of {size} bytes cannot be sent: {MESSAGE_BYTES} are the most")
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=not is_immutable(frames[-1]))
        except zmq.Again:
            return False
        self._numbers[message.KIND] = message.sequence
        self.bytes_sent += size
        return True


def is_immutable(buffer: bytes | memoryview) -> bool:
    """Nobody can ever change it: `bytes`, or a view of some. A read-only view of anything else can change below."""
    return isinstance(buffer.obj if isinstance(buffer, memoryview) else buffer, bytes)


# --- receiving -------------------------------------------------------------------------------------------------------
class SubscribeSocket(BrokerConnection):
    """Receives from one plane of the broker what was subscribed to, checked, and counts what is missing."""

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
        socket.setsockopt(zmq.LINGER, 0)  # it sends subscriptions only, which nobody needs any more
        super().__init__(context, socket, endpoint, key)
        self.on_malformed = on_malformed
        self.bytes_received = 0
        self.rejected: Counter[str] = Counter()
        """Malformed messages by reason."""
        self.gaps = 0
        """Messages that never came, by the numbers of those that did."""
        self._heard: dict[tuple[str, str, str, int], int] = {}

    def subscribe(self, prefix: bytes) -> None:
        self.socket.setsockopt(zmq.SUBSCRIBE, prefix)

    def unsubscribe(self, prefix: bytes) -> None:
        self.socket.setsockopt(zmq.UNSUBSCRIBE, prefix)

    def receive(self) -> Message | None:
        """The next message that is what it says, or None when none waits. Never blocks.

        A payload is a view of the received frame: it stays valid as long as somebody holds it.
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
        with contextlib.suppress(zmq.Again):  # nothing waits; the frames of one message arrive together
            while True:
                frame = self.socket.recv(zmq.NOBLOCK, copy=False)
                self.bytes_received += len(frame)
                if len(frames) < 4:  # one more than any message has tells `decode` enough
                    frames.append(frame.buffer)
                if not frame.more:
                    break
        return frames

    def _count_gap(self, message: Message) -> None:
        if message.sequence == 0:
            return
        lifetime = getattr(message, "incarnation", 0) or getattr(message, "epoch", 0)
        sender = (message.run, getattr(message, "name", ""), message.KIND, lifetime)
        before = self._heard.pop(sender, None)
        if before is not None and message.sequence > before + 1:
            self.gaps = min(MAX_COUNT, self.gaps + message.sequence - before - 1)
        self._heard[sender] = max(message.sequence, before or 0)
        if len(self._heard) > SENDERS_REMEMBERED:
            del self._heard[next(iter(self._heard))]


# --- waking a poller -------------------------------------------------------------------------------------------------
class Waker:
    """Wakes the poller of one thread from any other: register `socket` for reading, `clear` when it is."""

    def __init__(self) -> None:
        self.socket, self._far = network.socketpair()
        self.socket.setblocking(False)
        self._far.setblocking(False)

    def fileno(self) -> int:
        return self.socket.fileno()

    def wake(self) -> None:
        """Safe from every thread, also after `close`."""
        with contextlib.suppress(OSError):  # full: a wake-up is waiting already; closed: nobody is left to wake
            self._far.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.socket.recv(4096):
                pass

    def close(self) -> None:
        self.socket.close()
        self._far.close()
