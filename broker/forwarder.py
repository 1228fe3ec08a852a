"""Forwarder of one plane of the broker: a pair of sockets and the thread that copies messages between them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import zmq

from ..common.config import MESSAGE_BYTES
from ..common.errors import SettingError
from ..common.log import get_logger
from ..common.sockets import SUBSCRIBE, UNSUBSCRIBE, Socket, Waker
from ..common.wire import Plane
from .acl import PING, topic_pattern

log = get_logger("broker")

BATCH = 256
"""Messages forwarded before the other sockets of the plane are polled again."""
DROPS_LOGGED_SECONDS = 1.0
"""Shortest time between two log lines about dropped messages."""
REOPEN_SECONDS = 5.0
"""How long a port may stay taken after it was closed: libzmq closes sockets in a thread of its own."""

OpenPair = Callable[[], tuple[Socket, Socket]]
"""Opens and binds `source` and `sink` of a plane; SettingError if a port is taken."""


class Forwarder(threading.Thread):
    """Forwards the messages of one plane until `stop`. No message from a peer can end it."""

    def __init__(self, plane: Plane, open_pair: OpenPair, on_failure: Callable[[], object]) -> None:
        """Raises SettingError, with no port open, if a port is taken."""
        super().__init__(name=f"broker-{plane.name.lower()}", daemon=True)
        self.plane = plane
        self.messages = 0
        self.bytes = 0
        self.dropped: Counter[str] = Counter()
        """Dropped messages, by reason."""
        self.subscriptions = 0
        """Distinct prefixes that receivers subscribe to now."""
        self.listening = 0
        """Those of them other than pings."""
        self.visited = False
        """Whether there was such a subscription since the last call of `in_use`."""
        self.failure: BaseException | None = None
        self._open_pair, self._on_failure = open_pair, on_failure
        self._source, self._sink = open_pair()
        self._topic = topic_pattern(plane)
        self._waker = Waker()
        self._stopping = self._reopening = False
        self._logged_at, self._logged = 0.0, 0

    def stop(self) -> None:
        self._stopping = True
        self._waker.wake()

    def reopen(self) -> None:
        """Close both sockets with all their connections, and listen again."""
        self._reopening = True
        self._waker.wake()

    def close(self) -> None:
        """Free the ports at once. For a thread that was never started, or has ended."""
        self._source.close(0)
        self._sink.close(0)
        self._waker.close()

    def in_use(self) -> bool:
        """Whether a client subscribes to more than its own pings, or did since the last call."""
        visited, self.visited = self.visited, False
        return visited or self.listening > 0

    def run(self) -> None:
        try:
            while not self._stopping:
                self._source.send(SUBSCRIBE)
                self._loop()
                if self._reopening:
                    self._reopen()
        except BaseException as failure:  # the broker ends too: with one plane it would only look alive
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
        while not (self._stopping or self._reopening):
            ready = dict(poller.poll(1000))
            if self._waker.fileno() in ready:
                self._waker.clear()
            if self._sink in ready:
                self._take_subscriptions()
            if self._source in ready:
                self._forward_some()
            self._log_drops()

    def _reopen(self) -> None:
        self._reopening = False
        self._waker.clear()  # after the line above, so that a request in between is not lost
        self._source.close(0)
        self._sink.close(0)
        self.subscriptions = self.listening = 0
        deadline = time.monotonic() + REOPEN_SECONDS
        while not self._stopping:
            try:
                self._source, self._sink = self._open_pair()
                return
            except (SettingError, zmq.ZMQError):  # ZMQError: no file descriptor is left
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _take_subscriptions(self) -> None:
        with contextlib.suppress(zmq.Again):  # no more are waiting
            for _ in range(BATCH):
                frame = self._sink.recv(zmq.NOBLOCK)
                change = (frame[:1] == SUBSCRIBE) - (frame[:1] == UNSUBSCRIBE)
                self.subscriptions += change
                if not PING.match(frame, 1):
                    self.listening += change
                    self.visited |= change > 0

    def _forward_some(self) -> None:
        """Forward waiting messages, BATCH at most. The hot path: it runs thousands of times a second."""
        receive, more = self._source.recv, self._source.getsockopt
        fits = self._topic.fullmatch
        with contextlib.suppress(zmq.Again):  # no more are waiting
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
                self._forward(topic, header, payload, size)

    def _forward(self, topic: bytes, header: bytes, payload: zmq.Frame | None, size: int) -> None:
        send = self._sink.send
        send(topic, zmq.SNDMORE)
        if payload is None:
            send(header)
        else:
            send(header, zmq.SNDMORE)
            send(payload, copy=False)
        self.messages += 1
        self.bytes += size

    def _drop(self, reason: str) -> None:
        """Drop a message, with its remaining frames."""
        while self._source.getsockopt(zmq.RCVMORE):
            self._source.recv(zmq.NOBLOCK, copy=False)
        self.dropped[reason] += 1

    def _log_drops(self) -> None:
        total, now = self.dropped.total(), time.monotonic()
        if total > self._logged and now - self._logged_at >= DROPS_LOGGED_SECONDS:
            self._logged_at, self._logged = now, total
            log.warning("messages_dropped", plane=self.plane.name.lower(), **self.dropped, **self._drop_details())

    def _drop_details(self) -> dict[str, Any]:
        return {}
