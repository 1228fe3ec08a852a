"""Background thread that writes the registry to Redis. Callers never wait, and memory stays O(keys).

It writes changes at most twice a second and everything once a second, each as one transaction, so that a Redis that was
flushed, restarted or frozen, or that lost a single key, is complete again within a second of its return.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from structlog.typing import FilteringBoundLogger

from .config import BEAT_SECONDS
from .errors import SettingError
from .redis_client import FAILURES, connect, explain, is_wrong_type, redact_url
from .registry_buffer import WAITING_EVENTS, Batch, PendingWrites, Row

if TYPE_CHECKING:
    from .redis_keys import RedisKeys

WRITE_SECONDS = 0.5
"""Minimum interval between two writes."""
RETRY_SECONDS = 0.5
CLOSE_SECONDS = 3.0
FULL_SHARE = 10
"""A full write waits at least this many times the duration of the last one, so that thousands of fragments do not load
the syncer.
"""
STREAM_EVENTS = 10_000
"""Approximate length of the stream."""
WARNING_SECONDS = 60.0
"""Minimum interval between warnings about keys that vanish (for example, because Redis evicts them)."""


class RegistryWriter(threading.Thread):
    """Writer thread. `connected`: the last write arrived."""

    def __init__(self, url: str, keys: RedisKeys, pending: PendingWrites, log: FilteringBoundLogger) -> None:
        super().__init__(name="registry", daemon=True)
        self.connected = False
        self._url, self._pending, self._log = url, pending, log
        self._session = _Session(url, keys)
        self._closing = threading.Event()
        self._lost_since: float | None = None
        self._next_full = 0.0
        self._warned_at = -math.inf

    def run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.is_set()
            if not self._write(full=closing or not self.connected or time.monotonic() >= self._next_full):
                self._closing.wait(RETRY_SECONDS)
            elif not self._closing.wait(WRITE_SECONDS):
                self._pending.changed.wait(max(0.0, self._next_full - time.monotonic()))
        self._session.disconnect()

    def close(self) -> None:
        """Write everything once more and end; waits CLOSE_SECONDS at most."""
        self._closing.set()
        self._pending.changed.set()
        self.join(CLOSE_SECONDS)

    def _write(self, *, full: bool) -> bool:
        started = time.monotonic()
        try:
            self._pending.restore(self._session.reconnect())
            vanished = self._session.write(self._pending, full=full)
        except (*FAILURES, SettingError) as error:  # a file that the URL names may be missing for a while
            self._session.disconnect()
            self._lost(error)
            return False
        ended = time.monotonic()
        if full:
            self._next_full = ended + max(BEAT_SECONDS, FULL_SHARE * (ended - started))
        if vanished:
            self._next_full = ended
        self._arrived(vanished)
        return True

    def _lost(self, error: Exception) -> None:
        self.connected = False
        if self._lost_since is None:
            self._lost_since = time.monotonic()
            reason = error if isinstance(error, SettingError) else explain(self._url, error)
            self._log.warning("registry_lost", reason=str(reason))

    def _arrived(self, vanished: list[str]) -> None:
        self.connected = True
        now = time.monotonic()
        if self._lost_since is not None:
            seconds, self._lost_since = round(now - self._lost_since, 1), None
            dropped = self._pending.take_dropped_events()
            self._log.info("registry_back", seconds=seconds, rewritten_keys=len(vanished), dropped_events=dropped)
            self._pending.add_event("registry_back", {"seconds": seconds, "dropped_events": dropped})
        elif vanished and now >= self._warned_at + WARNING_SECONDS:
            self._warned_at = now
            reason = f"keys vanished from Redis and were written again, such as {vanished[0]}"
            self._log.warning("registry_lost", url=redact_url(self._url), reason=reason, keys=len(vanished))
            self._pending.add_event("registry_lost", {"reason": reason})


@dataclass
class _Confirmed:
    """What Redis has confirmed, to detect later whether it was deleted."""

    names: dict[str, frozenset[str]] = field(default_factory=dict)
    """Key -> fields of a hash, members of a set."""
    events: deque[Row] = field(default_factory=lambda: deque(maxlen=WAITING_EVENTS))
    """The newest events, to restore a lost stream."""


class _Session:
    """Successive connections to one Redis, and what is known of its content across them."""

    def __init__(self, url: str, keys: RedisKeys) -> None:
        self._url, self._keys = url, keys
        self._client: Any = None
        self._confirmed = _Confirmed()
        self._unsure: tuple[Row, ...] = ()

    def reconnect(self) -> tuple[Row, ...]:
        """Connect if needed and wait for an answer. Returns the events of an interrupted write if they did not arrive.

        A Redis that resumes after a freeze still executes the commands of an abandoned connection. It does so before it
        answers this ping, so older values cannot overwrite newer ones, and its newest event shows whether that write
        was complete.
        """
        if self._client is not None:
            return ()
        self._client = connect(self._url)
        self._client.ping()
        unsure = self._unsure
        if unsure:
            newest = self._newest_event()
            if newest and newest[0][1].get("at") == unsure[-1]["at"]:
                unsure = ()
        self._unsure = ()
        return unsure

    def _newest_event(self) -> Any:
        try:
            return self._client.xrevrange(self._keys.events, count=1)
        except FAILURES as wrong:
            if not is_wrong_type(wrong):
                raise
            return []  # the key is another program's; the other keys are written all the same

    def disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def write(self, pending: PendingWrites, *, full: bool) -> list[str]:
        """Write one transaction; returns the keys that had vanished since they were confirmed; they are restored."""
        batch = pending.take(full=full)
        try:
            if self._confirmed.events and not self._client.exists(self._keys.events):
                batch = replace(batch, events=(*self._confirmed.events, *batch.events))
                self._confirmed.events.clear()
                return [self._keys.events, *self._execute(batch, full=full)]
            return self._execute(batch, full=full)
        except FAILURES:
            self._unsure = batch.events
            pending.put_back(batch.forgotten)
            raise

    def _execute(self, batch: Batch, *, full: bool) -> list[str]:
        keys, confirmed = self._keys, self._confirmed.names
        pipe = self._client.pipeline(transaction=True)
        checks: list[tuple[int, str, frozenset[str]]] = []  # index of the reply, key, names that it holds afterwards

        def check(key: str, names: frozenset[str]) -> None:
            checks.append((len(pipe), key, names))

        for key, (set_key, name) in batch.forgotten.items():
            pipe.zrem(set_key, name).delete(key)
            confirmed.pop(key, None)
            confirmed[set_key] = confirmed.get(set_key, frozenset()) - {name}
        for key, row in batch.rows.items():
            stamped = {**row, "updated_at": f"{time.time():.3f}"} if full and key == keys.run else row
            if stamped:
                check(key, frozenset(stamped))
                pipe.hset(key, mapping=stamped)
        for set_key, scores in batch.scores.items():
            if scores:
                check(set_key, frozenset(scores))
                pipe.zadd(set_key, scores)
        if batch.epoch is not None:
            check(keys.epoch, frozenset({"epoch"}))
            pipe.setnx(keys.epoch, batch.epoch).set(keys.epoch, batch.epoch)
        for event in batch.events:
            pipe.xadd(keys.events, event, maxlen=STREAM_EVENTS, approximate=True)
        replies = pipe.execute()
        vanished = []
        for number, key, names in checks:
            had = confirmed.get(key, frozenset())
            if had and int(replies[number]) > len(names - had):
                vanished.append(key)
            confirmed[key] = had | names
        self._confirmed.events.extend(batch.events)
        return vanished
