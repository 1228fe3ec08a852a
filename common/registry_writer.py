"""The thread behind the registry: whatever the store does, callers go on and memory stays O(keys).

It writes what has changed at most twice a second and everything once a second, each time as one transaction, so that
a store that was flushed, restarted or frozen, or that lost a single key, is whole again within a second of being back.
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
"""Shortest time between two writes."""
RETRY_SECONDS = 0.5
CLOSE_SECONDS = 3.0
FULL_SHARE = 10
"""A full write waits at least so many times what the last one took: thousands of fragments do not eat the syncer."""
STREAM_EVENTS = 10_000
"""About so many events stay in the stream."""
TOLD_SECONDS = 60.0
"""Keys that vanish again and again (a store that evicts) are told so often."""


class RegistryWriter(threading.Thread):
    """`connected` says whether the last write arrived."""

    def __init__(self, url: str, keys: RedisKeys, board: PendingWrites, log: FilteringBoundLogger) -> None:
        super().__init__(name="registry", daemon=True)
        self.connected = False
        self._url, self._board, self._log = url, board, log
        self._session = _Session(url, keys)
        self._closing = threading.Event()
        self._lost_since: float | None = None
        self._next_full = 0.0
        self._told = -math.inf

    def run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.is_set()
            if not self._write(full=closing or not self.connected or time.monotonic() >= self._next_full):
                self._closing.wait(RETRY_SECONDS)
            elif not self._closing.wait(WRITE_SECONDS):
                self._board.changed.wait(max(0.0, self._next_full - time.monotonic()))
        self._session.disconnect()

    def close(self) -> None:
        """One last write of everything; CLOSE_SECONDS at most."""
        self._closing.set()
        self._board.changed.set()
        self.join(CLOSE_SECONDS)

    def _write(self, *, full: bool) -> bool:
        started = time.monotonic()
        try:
            self._board.restore(self._session.reconnect())
            vanished = self._session.write(self._board, full=full)
        except (*FAILURES, SettingError) as wrong:  # a file that the URL names may be away for a while
            self._session.disconnect()
            self._lost(wrong)
            return False
        ended = time.monotonic()
        if full:
            self._next_full = ended + max(BEAT_SECONDS, FULL_SHARE * (ended - started))
        if vanished:
            self._next_full = ended
        self._arrived(vanished)
        return True

    def _lost(self, wrong: Exception) -> None:
        self.connected = False
        if self._lost_since is None:
            self._lost_since = time.monotonic()
            reason = wrong if isinstance(wrong, SettingError) else explain(self._url, wrong)
            self._log.warning("registry_lost", reason=str(reason))

    def _arrived(self, vanished: list[str]) -> None:
        self.connected = True
        now = time.monotonic()
        if self._lost_since is not None:
            seconds, self._lost_since = round(now - self._lost_since, 1), None
            dropped = self._board.take_dropped_events()
            self._log.info("registry_back", seconds=seconds, rewritten_keys=len(vanished), dropped_events=dropped)
            self._board.add_event("registry_back", {"seconds": seconds, "dropped_events": dropped})
        elif vanished and now >= self._told + TOLD_SECONDS:
            self._told = now
            reason = f"keys vanished from the store and were written anew, such as {vanished[0]}"
            self._log.warning("registry_lost", url=redact_url(self._url), reason=reason, keys=len(vanished))
            self._board.add_event("registry_lost", {"reason": reason})


@dataclass
class _Told:
    """What the store has confirmed: it tells afterwards whether somebody took it away again."""

    names: dict[str, frozenset[str]] = field(default_factory=dict)
    """Key -> fields of a hash, members of a set."""
    events: deque[Row] = field(default_factory=lambda: deque(maxlen=WAITING_EVENTS))
    """The newest events, for a stream that was lost."""


class _Session:
    """Connections to one store, one after the other, and what is known of the store across them."""

    def __init__(self, url: str, keys: RedisKeys) -> None:
        self._url, self._keys = url, keys
        self._client: Any = None
        self._told = _Told()
        self._unsure: tuple[Row, ...] = ()

    def reconnect(self) -> tuple[Row, ...]:
        """After it there is a connection whose store has answered. Returns the events of a write that broke off, if
        they did not arrive.

        A frozen store that thaws still executes what an abandoned connection holds. It does so before it answers this
        ping, so that no older figures come after newer ones, and the newest event tells whether that write was whole.
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

    def write(self, board: PendingWrites, *, full: bool) -> list[str]:
        """One transaction; returns the keys that had vanished since they were confirmed (and are there again)."""
        batch = board.take(full=full)
        try:
            if self._told.events and not self._client.exists(self._keys.events):
                batch = replace(batch, events=(*self._told.events, *batch.events))
                self._told.events.clear()
                return [self._keys.events, *self._execute(batch, full=full)]
            return self._execute(batch, full=full)
        except FAILURES:
            self._unsure = batch.events
            board.put_back(batch.forgotten)
            raise

    def _execute(self, batch: Batch, *, full: bool) -> list[str]:
        keys, told = self._keys, self._told.names
        pipe = self._client.pipeline(transaction=True)
        checks: list[tuple[int, str, frozenset[str]]] = []  # number of the reply, key, names that the key has after it

        def check(key: str, names: frozenset[str]) -> None:
            checks.append((len(pipe), key, names))

        for key, (listed, name) in batch.forgotten.items():
            pipe.zrem(listed, name).delete(key)
            told.pop(key, None)
            told[listed] = told.get(listed, frozenset()) - {name}
        for key, row in batch.rows.items():
            stamped = {**row, "updated_at": f"{time.time():.3f}"} if full and key == keys.run else row
            if stamped:
                check(key, frozenset(stamped))
                pipe.hset(key, mapping=stamped)
        for listed, scores in batch.scores.items():
            if scores:
                check(listed, frozenset(scores))
                pipe.zadd(listed, scores)
        if batch.epoch is not None:
            check(keys.epoch, frozenset({"epoch"}))
            pipe.setnx(keys.epoch, batch.epoch).set(keys.epoch, batch.epoch)
        for event in batch.events:
            pipe.xadd(keys.events, event, maxlen=STREAM_EVENTS, approximate=True)
        replies = pipe.execute()
        vanished = []
        for number, key, names in checks:
            had = told.get(key, frozenset())
            if had and int(replies[number]) > len(names - had):
                vanished.append(key)
            told[key] = had | names
        self._told.events.extend(batch.events)
        return vanished
