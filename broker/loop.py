"""The broker: two planes, so that bulk never starves control; each is one pair of sockets and one thread.

Publishers connect to `source` (XSUB), receivers to `sink` (XPUB). The broker subscribes to everything itself: reading
that subscription is how a publisher knows that its path is open. Receivers' subscriptions stay here. What is kept for a
receiver that does not read is bounded by the water mark of `sink`; beyond it messages for that receiver are dropped,
which it sees by their numbers.
"""

from __future__ import annotations

import contextlib
import re
import socket as network
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import zmq

from ..common.config import CHUNK_BYTES, MESSAGE_BYTES, BrokerConfig
from ..common.errors import SettingError
from ..common.log import get_logger
from ..common.sockets import CONTROL_MESSAGES, SUBSCRIBE, UNSUBSCRIBE, Address, Context, Socket, Waker, configure
from ..common.wire import BOTH_PLANES, FRAGMENT_KINDS, MESSAGES, NAMED_KINDS, Plane

log = get_logger("broker")

BATCH = 256
"""Messages forwarded before the other sockets of the plane are looked at again."""
SUBSCRIPTION_BYTES = 1024
"""The largest frame a receiver may send: a subscription is one byte and a prefix of a topic."""
DROPS_TOLD_SECONDS = 1.0
"""At most one line about dropped messages in so long, whatever arrives."""


def topic_pattern(plane: Plane) -> re.Pattern[bytes]:
    """Topics that pass: RUN/KIND/[FRAGMENT/][NAME/] of the kinds that travel on `plane`; beats and pings on both."""
    name = "[a-z0-9][a-z0-9-]{0,39}"
    kinds = [
        kind + ("/[0-9]{1,6}" if kind in FRAGMENT_KINDS else "") + (f"/{name}" if kind in NAMED_KINDS else "")
        for kind, message in MESSAGES.items()
        if (message.PLANE is plane or kind in BOTH_PLANES) and kind != "beat"
    ]
    return re.compile(f"(?:_/beat/{name}|{name}/(?:{'|'.join(kinds)}))/".encode())


class PlaneThread(threading.Thread):
    """Forwards the messages of one plane until `stop`; whatever a peer sends, it goes on."""

    def __init__(self, plane: Plane, source: Socket, sink: Socket, on_failure: Callable[[], object]) -> None:
        super().__init__(name=f"broker-{plane.name.lower()}", daemon=True)
        self.plane = plane
        self.messages = 0
        self.bytes = 0
        self.dropped: Counter[str] = Counter()
        """Messages that were not passed on, by reason."""
        self.subscriptions = 0
        """Distinct prefixes that receivers want now."""
        self.failure: BaseException | None = None
        self._source, self._sink, self._on_failure = source, sink, on_failure
        self._topic = topic_pattern(plane)
        self._waker = Waker()
        self._stopping = False
        self._told_at, self._told = 0.0, 0

    def stop(self) -> None:
        self._stopping = True
        self._waker.wake()

    def run(self) -> None:
        try:
            self._source.send(SUBSCRIBE)
            self._loop()
        except BaseException as failure:  # the broker ends with it: half a broker would be worse than none
            self.failure = failure
            log.exception("plane_failed", plane=self.plane.name.lower())
            self._on_failure()
        finally:
            self._source.close()
            self._sink.close()
            self._waker.close()

    def _loop(self) -> None:
        poller = zmq.Poller()
        for socket in (self._source, self._sink, self._waker.socket):
            poller.register(socket, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll(1000))
            if self._sink in ready:
                self._take_subscriptions()
            if self._source in ready:
                self._forward_some()
            self._tell_drops()

    def _take_subscriptions(self) -> None:
        with contextlib.suppress(zmq.Again):  # none waits
            for _ in range(BATCH):
                kind = self._sink.recv(zmq.NOBLOCK)[:1]
                self.subscriptions += (kind == SUBSCRIBE) - (kind == UNSUBSCRIBE)

    def _forward_some(self) -> None:
        """Forward what waits, BATCH messages at most. Every line of it is paid a thousand times a second."""
        receive, more, send = self._source.recv, self._source.getsockopt, self._sink.send
        fits = self._topic.fullmatch
        with contextlib.suppress(zmq.Again):  # nothing waits any more
            for _ in range(BATCH):
                topic = receive(zmq.NOBLOCK)
                header = receive(zmq.NOBLOCK) if more(zmq.RCVMORE) else None
                payload = receive(zmq.NOBLOCK, copy=False) if header is not None and more(zmq.RCVMORE) else None
                if header is None or (payload is not None and payload.more):
                    self._drop("frames")
                    continue
                size = len(topic) + len(header) + (0 if payload is None else len(payload))
                if not fits(topic):
                    self._drop("topic")
                    continue
                if size > MESSAGE_BYTES:
                    self._drop("size")
                    continue
                send(topic, zmq.SNDMORE)
                if payload is None:
                    send(header)
                else:
                    send(header, zmq.SNDMORE)
                    send(payload, copy=False)
                self.messages += 1
                self.bytes += size

    def _drop(self, reason: str) -> None:
        """Leave a message out, with all that is left of it."""
        while self._source.getsockopt(zmq.RCVMORE):
            self._source.recv(zmq.NOBLOCK, copy=False)
        self.dropped[reason] += 1

    def _tell_drops(self) -> None:
        total, now = self.dropped.total(), time.monotonic()
        if total > self._told and now - self._told_at >= DROPS_TOLD_SECONDS:
            self._told_at, self._told = now, total
            log.warning("messages_dropped", plane=self.plane.name.lower(), **dict(self.dropped))


class Broker:
    """Four ports and a thread a plane, from `start` to `stop`.

    `on_failure` is called, from a thread of the broker, when a plane ends by itself; what remains is to `stop`.
    """

    def __init__(self, config: BrokerConfig, on_failure: Callable[[], object] = lambda: None) -> None:
        self.config = config
        self._on_failure = on_failure
        self._planes: list[PlaneThread] = []
        self._context: Context | None = None

    def start(self) -> None:
        """Listen on all four ports and forward; SettingError, and nothing listens, if one cannot be had."""
        address = Address(numeric(self.config.host), self.config.port)
        bulk_messages = self.config.queue_mib * 2**20 // CHUNK_BYTES
        self._context = zmq.Context(io_threads=2)
        sockets: list[Socket] = []
        try:
            for source, sink, messages, io_thread in (
                (address.control_in, address.control_out, CONTROL_MESSAGES, 0),
                (address.bulk_in, address.bulk_out, bulk_messages, 1),
            ):
                for kind, endpoint, frame_bytes in (
                    (zmq.XSUB, source, MESSAGE_BYTES),
                    (zmq.XPUB, sink, SUBSCRIPTION_BYTES),
                ):
                    sockets.append(socket := self._context.socket(kind))
                    configure(socket, hwm_messages=messages, message_bytes=frame_bytes)
                    socket.setsockopt(zmq.AFFINITY, 1 << io_thread)
                    bind(socket, endpoint)
        except BaseException:
            for socket in sockets:
                socket.close(0)
            self._context.term()
            raise
        self._planes = [
            PlaneThread(Plane.CONTROL, sockets[0], sockets[1], self._on_failure),
            PlaneThread(Plane.BULK, sockets[2], sockets[3], self._on_failure),
        ]
        for plane in self._planes:
            plane.start()

    def stop(self) -> None:
        """End both planes and free the ports. What receivers have not taken yet goes out for the linger time."""
        for plane in self._planes:
            plane.stop()
        self.join()

    def join(self, timeout_seconds: float | None = None) -> None:
        """Wait until both planes have ended, after `stop` or a failure."""
        for plane in self._planes:
            plane.join(timeout_seconds)
        if self._context is not None and not any(plane.is_alive() for plane in self._planes):
            self._context.term()

    @property
    def failure(self) -> BaseException | None:
        """Why a plane ended by itself; None while all is well."""
        return next((plane.failure for plane in self._planes if plane.failure is not None), None)

    def counters(self) -> dict[str, dict[str, Any]]:
        """For each plane: messages and bytes passed on, messages dropped by reason, distinct subscriptions."""
        return {
            plane.plane.name.lower(): {
                "messages": plane.messages,
                "bytes": plane.bytes,
                "subscriptions": plane.subscriptions,
                "dropped": dict(plane.dropped),
            }
            for plane in self._planes
        }


def numeric(host: str) -> str:
    """`host` as an IP address (a broker binds to an interface, not to a name); IPv4 if it has both kinds."""
    try:
        found = network.getaddrinfo(host, None, type=network.SOCK_STREAM)
    except (OSError, UnicodeError) as cause:
        raise SettingError(f"--host {host} is no address of this machine: {cause}") from cause
    found.sort(key=lambda entry: entry[0] != network.AF_INET)
    return str(found[0][4][0])


def bind(socket: Socket, endpoint: str) -> None:
    """Listen at `endpoint`; SettingError naming it if that cannot be."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as cause:
        port = endpoint.rpartition(":")[2]
        if cause.errno == zmq.EADDRINUSE:
            reason = f"port {port} is taken: another broker or program listens at {endpoint}; stop it, or choose --port"
        else:
            reason = f"port {port} cannot be opened at {endpoint}: {cause.strerror}; check --host and --port"
        raise SettingError(reason) from cause
