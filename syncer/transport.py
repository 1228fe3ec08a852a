"""Transport of the syncer: its four sockets behind one interface, which receives control messages first."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from ..common.auth_keys import held_key
from ..common.errors import Malformed
from ..common.sockets import (
    CONTROL_MESSAGES,
    Address,
    BrokerConnection,
    PublishSocket,
    SubscribeSocket,
    check_sockets,
    refusal_of,
    unresolved_of,
)
from ..common.wire import Message, Plane, beat_topic, prefix

QUEUE_MESSAGES = 256
"""High-water mark of the bulk plane, in messages of at most 1 MiB."""
CONTROL_SECONDS = 0.2
"""Longest time for control messages in one turn, so that a flood of them cannot delay rounds and beats."""
BULK_A_TURN = 64
"""Bulk messages received before control messages are read again."""
OUTBOX_MESSAGES = 4096
"""Bulk messages queued while the broker accepts no more; beyond it the oldest are dropped, and learners fetch them."""
RETRY_SECONDS = 0.005
"""Interval of retries while a socket is full (ZeroMQ has no event for it)."""

CONTROL_KINDS = ("hello", "alive", "goodbye", "fetch")
BULK_KINDS = ("delta", "seed", "buffers")


class Transport:
    """Connection to a broker. Used by one thread only."""

    def __init__(
        self, broker: str, run: str, on_malformed: Callable[[bytes, Malformed], Any], key: Path | None = None
    ) -> None:
        """`key`: the file with the syncer's key, for a broker with keys."""
        address, held = Address.parse(broker), held_key(key, "syncer")
        check_sockets(f"the syncer of run {run}", 4, threads=3)
        self._broker, self._key = broker, key
        self._context: zmq.Context[Any] = zmq.Context()
        self._up = {
            Plane.CONTROL: PublishSocket(self._context, address.control_in, hwm_messages=CONTROL_MESSAGES, key=held),
            Plane.BULK: PublishSocket(self._context, address.bulk_in, hwm_messages=QUEUE_MESSAGES, key=held),
        }
        self._control = SubscribeSocket(
            self._context, address.control_out, hwm_messages=CONTROL_MESSAGES, key=held, on_malformed=on_malformed
        )
        self._bulk = SubscribeSocket(
            self._context, address.bulk_out, hwm_messages=QUEUE_MESSAGES, key=held, on_malformed=on_malformed
        )
        self._all: tuple[BrokerConnection, ...] = (*self._up.values(), self._control, self._bulk)
        for kind in CONTROL_KINDS:
            self._control.subscribe(prefix(run, kind))
        self._control.subscribe(beat_topic(run))
        for kind in BULK_KINDS:
            self._bulk.subscribe(prefix(run, kind))
        self._outbox: deque[Message] = deque()
        self.dropped = 0
        """Messages that could not be sent because no broker accepted them."""
        self._poller = zmq.Poller()
        for connection in self._all:
            self._poller.register(connection.socket, zmq.POLLIN)
        self._ready: set[Any] = set()

    def call_on_malformed(self, on_malformed: Callable[[bytes, Malformed], Any]) -> None:
        """Set the callback for malformed messages; its arguments are the topic and the error."""
        self._control.on_malformed = self._bulk.on_malformed = on_malformed

    @property
    def proven(self) -> bool:
        """Whether the broker receives on both planes."""
        return all(up.proven for up in self._up.values())

    @property
    def refusal(self) -> str:
        """Why the broker rejects the connection, in a sentence; "" if it does not, or is not reachable."""
        return refusal_of(self._all, self._broker, self._key)

    @property
    def unresolved(self) -> str:
        """Why the broker's host name cannot be resolved, in a sentence; "" if it can."""
        return unresolved_of(self._all)

    def wait(self, seconds: float) -> None:
        """Wait for messages, at most `seconds`."""
        if self._outbox:
            self._flush()
        limit = min(seconds, RETRY_SECONDS) if self._outbox else seconds
        self._ready = {socket for socket, _ in self._poller.poll(math.ceil(max(0.0, limit) * 1000))}
        for connection in self._all:
            connection.look()
        for up in self._up.values():
            if up.socket in self._ready:
                up.read_subscriptions()

    def receive(self) -> Iterator[Message]:
        """The messages that had arrived when `wait` returned: control messages (all, unless they are a flood), then a
        bounded number of bulk messages.
        """
        if self._control.socket in self._ready:
            until = time.monotonic() + CONTROL_SECONDS
            while time.monotonic() < until and (message := self._control.receive()) is not None:
                yield message
        for _ in range(BULK_A_TURN if self._bulk.socket in self._ready else 0):
            message = self._bulk.receive()
            if message is None:
                return
            yield message

    def send(self, message: Message, plane: Plane | None = None) -> None:
        """Send now. On the bulk plane, messages are queued in order while the broker accepts no more."""
        plane = plane or message.PLANE
        if plane is Plane.CONTROL:
            self.dropped += not self._up[plane].send(message)
            return
        self._outbox.append(message)
        self._flush()
        while len(self._outbox) > OUTBOX_MESSAGES:
            self._outbox.popleft()
            self.dropped += 1

    def _flush(self) -> None:
        up = self._up[Plane.BULK]
        while self._outbox:
            if not up.send(self._outbox[0]):
                if not up.proven:  # no broker: queued messages would be stale later
                    self.dropped += len(self._outbox)
                    self._outbox.clear()
                return
            self._outbox.popleft()

    @property
    def bytes_up(self) -> int:
        return sum(up.bytes_sent for up in self._up.values())

    @property
    def bytes_down(self) -> int:
        return self._control.bytes_received + self._bulk.bytes_received

    @property
    def gaps(self) -> int:
        """Messages of learners that did not arrive, counted by gaps in the sequence numbers."""
        return self._control.gaps + self._bulk.gaps

    def close(self) -> None:
        for connection in self._all:
            connection.close()
        self._context.term()
