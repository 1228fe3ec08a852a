"""Buffer of the registry's pending writes: the newest value of every field, and queued events. No I/O."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real

from .printable import printable

WAITING_EVENTS = 1_000
"""Most events queued while Redis does not answer; the newest are kept."""
TEXT_CHARACTERS = 1_000

Value = object
"""Text, a number, a flag, None, or a list of them; anything else is converted to text, except bytes."""
Row = Mapping[str, str]


def _text(value: Value) -> str:
    """One line of plain text: flags are 0 or 1, lists are joined by blanks, None and non-finite numbers are empty."""
    if value is None:
        return ""
    if isinstance(value, bool | Integral):
        return str(int(value))
    if isinstance(value, Real):
        return format(float(value), ".13g") if math.isfinite(value) else ""  # unix seconds keep their milliseconds
    if isinstance(value, list | tuple):
        return " ".join(_text(inner) for inner in value[:TEXT_CHARACTERS])[:TEXT_CHARACTERS]
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("a registry's value is text or a number, not bytes")
    return printable(str(value)[:TEXT_CHARACTERS])


@dataclass(frozen=True)
class Batch:
    """The content of one transaction. Rows are replaced, never modified, so none is copied."""

    rows: dict[str, Row]
    scores: dict[str, dict[str, float]]
    """Sorted set -> member -> score, in unix seconds."""
    forgotten: dict[str, tuple[str, str]]
    """Key of a hash to delete -> the sorted set that lists it, and its name there."""
    epoch: int | None
    events: tuple[Row, ...]


class PendingWrites:
    """The newest state of every key and the queued events; shared by the callers and the writer's thread."""

    def __init__(self) -> None:
        self.changed = threading.Event()
        self._lock = threading.Lock()
        self._state = Batch(rows={}, scores={}, forgotten={}, epoch=None, events=())
        self._new: set[str] = set()
        self._new_scores: dict[str, dict[str, float]] = {}
        self._events: deque[Row] = deque()
        self._dropped_events = 0
        self._last_at = 0.0

    def put(self, key: str, fields: Mapping[str, Value], member: tuple[str, str, float] | None = None) -> None:
        """`member`: the sorted set that lists the key, its name there, and its score in unix seconds."""
        texts = {name: _text(value) for name, value in fields.items()}
        with self._lock:
            if member is not None:
                set_key, name, score = member
                self._state.scores.setdefault(set_key, {})[name] = round(score, 3)
                self._new_scores.setdefault(set_key, {})[name] = round(score, 3)
            self._state.rows[key] = {**self._state.rows.get(key, {}), **texts}
            self._new.add(key)
        self.changed.set()

    def forget(self, key: str, set_key: str, name: str) -> None:
        """Delete the hash `key`, which the sorted set `set_key` lists as `name`."""
        with self._lock:
            for scores in (self._state.scores, self._new_scores):
                scores.get(set_key, {}).pop(name, None)
            self._state.rows.pop(key, None)
            self._state.forgotten[key] = (set_key, name)
        self.changed.set()

    def put_epoch(self, epoch: int) -> None:
        with self._lock:
            self._state = replace(self._state, epoch=int(epoch))
        self.changed.set()

    def add_event(self, kind: str, fields: Mapping[str, Value]) -> None:
        """`at`, in unix seconds, is unique per event, so that a repeated write of an event can be detected."""
        texts = {name: _text(value) for name, value in fields.items() if value is not None}
        with self._lock:
            self._last_at = max(time.time(), self._last_at + 2e-6)
            self._events.append({"at": f"{self._last_at:.6f}", **texts, "kind": _text(kind)})
            self._bound()
        self.changed.set()

    def take(self, *, full: bool) -> Batch:
        """The next batch: all rows, or only those that have changed."""
        with self._lock:
            self.changed.clear()
            rows = self._state.rows
            batch = replace(
                self._state,
                rows=dict(rows) if full else {key: rows[key] for key in self._new if key in rows},
                scores={key: dict(row) for key, row in (self._state.scores if full else self._new_scores).items()},
                events=tuple(self._events),
            )
            self._state = replace(self._state, forgotten={})
            self._new, self._new_scores = set(), {}
            self._events.clear()
            return batch

    def put_back(self, forgotten: Mapping[str, tuple[str, str]]) -> None:
        """Queue the deletions of a batch again that may not have arrived (rows need none: the next write is full)."""
        with self._lock:
            self._state.forgotten.update(forgotten)

    def restore(self, events: Sequence[Row]) -> None:
        """Queue these events before all others."""
        with self._lock:
            self._events.extendleft(reversed(events))
            self._bound()

    def take_dropped_events(self) -> int:
        """Number of events dropped since the last call because the queue was full."""
        with self._lock:
            dropped, self._dropped_events = self._dropped_events, 0
            return dropped

    def _bound(self) -> None:
        while len(self._events) > WAITING_EVENTS:
            self._events.popleft()
            self._dropped_events += 1
