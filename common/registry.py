"""What a run shows of itself in Redis: every key has its name here, and nowhere else.

The registry is a view. The syncer's files and its memory are the authority, so nothing waits for Redis: callers leave
what is new, and a thread (registry_writer) writes it. docs/redis.md says what each field means.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from typing import Any

from structlog.typing import FilteringBoundLogger

from .redis_client import FAILURES, check_connection, connect, explain, redact_url
from .redis_keys import RedisKeys
from .registry_buffer import PendingWrites, Value
from .registry_writer import RegistryWriter

__all__ = ["RedisKeys", "Registry", "check_connection", "list_runs", "read_status", "redact_url"]

_WHOLE = re.compile(r"-?\d{1,19}")
_REAL = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")
_COUNTER = re.compile(r"\d{1,14}")
"""No run comes further. Whoever wrote more into the store would drive epochs and versions to where no message can."""
_TEXTS = ("run", "state", "kind", "learner", "learners", "host", "device", "reason", "model_hash",
          "blocked", "rejected_reason", "sentence")  # fmt: skip
"""Fields that stay text although one may look like a number."""
_FRAGMENTS_AT_ONCE = 256


class Registry:
    """The syncer's side. No method but the two that read, and `close`, ever waits; none fails because of the store."""

    def __init__(self, url: str | None, run: str, log: FilteringBoundLogger) -> None:
        """`url` None: there is no store, and every method does nothing. SettingError for a malformed URL or name."""
        self._keys = RedisKeys(run)
        self._url = url
        self._log = log
        self._board = PendingWrites()
        self._writer: RegistryWriter | None = None
        if url is not None:
            connect(url)  # a malformed URL is told to the caller, not to a thread
            self._writer = RegistryWriter(url, self._keys, self._board, log)
            self._writer.start()

    @property
    def healthy(self) -> bool:
        """The last write reached the store (True where there is none to reach)."""
        return self._writer is None or (self._writer.connected and self._writer.is_alive())

    def publish_run(self, **fields: Value) -> None:
        """Fields keep their last value until they are given again; None and what is not finite become empty."""
        self._board.put(self._keys.run, fields)

    def publish_learner(self, name: str, last_seen_unix: float, **fields: Value) -> None:
        self._board.put(self._keys.learner(name), fields, member=(self._keys.learners, name, last_seen_unix))

    def publish_fragment(self, fragment: int, *, merged_at: float = 0.0, **fields: Value) -> None:
        """`merged_at`: unix seconds of its last merge; 0 = not since the syncer's start."""
        listed = (self._keys.fragments, str(int(fragment)), merged_at)
        self._board.put(self._keys.fragment(fragment), {"merged_at": merged_at, **fields}, member=listed)

    def forget_learner(self, name: str) -> None:
        """Its hash and its place in the set go; a later publish_learner begins anew."""
        self._board.forget(self._keys.learner(name), self._keys.learners, name)

    def event(self, kind: str, /, **fields: Value) -> None:
        """One entry of the stream: `at`, the fields, and `kind` (a field of that name gives way).

        While the store is away the newest thousand are kept.
        """
        self._board.add_event(kind, fields)

    def write_epoch(self, epoch: int) -> None:
        """Left for the thread like everything else: the syncer's file is what counts."""
        self._board.put_epoch(epoch)

    def stored_epoch(self) -> int:
        """The epoch that the store knows; 0 if it knows none or does not answer within a second."""
        return _count(self._read(lambda client: client.get(self._keys.epoch)))

    def stored_versions(self) -> dict[int, int]:
        """Fragment -> version, as far as the store knows them; empty if it does not answer within a second."""
        rows = self._read(lambda client: _read_fragments(client, self._keys)) or {}
        return {p: _count(row["version"]) for p, row in rows.items() if _COUNTER.fullmatch(row.get("version", ""))}

    def close(self) -> None:
        """Writes what is left; waits 3 s for that at most."""
        if self._writer is not None:
            self._writer.close()

    def _read(self, ask: Callable[[Any], Any]) -> Any:
        if self._url is None:
            return None
        client = connect(self._url)
        try:
            return ask(client)
        except FAILURES as wrong:
            self._log.warning("registry_unreadable", reason=str(explain(self._url, wrong)))
            return None
        finally:
            client.close()


def read_status(url: str, run: str, events: int = 50) -> dict[str, Any]:
    """What the store shows of `run`: {"run": {field: value}, "epoch": int, "learners": {name: {"last_seen": float,
    field: value}}, "fragments": {p: {field: value}}, "events": [{"at", "kind", field: value}], oldest first}.

    Numbers are numbers again, what is unknown is None. All is empty for a run that the store does not know. PeerLost or
    SettingError where the store does not answer.
    """
    keys, client = RedisKeys(run), connect(url)
    try:
        pipe = client.pipeline(transaction=False)
        pipe.hgetall(keys.run).get(keys.epoch)
        pipe.zrange(keys.learners, 0, -1, withscores=True).xrevrange(keys.events, count=events)
        run_row, epoch, members, stream = pipe.execute()
        pipe = client.pipeline(transaction=False)
        for name, _ in members:
            pipe.hgetall(keys.learner(name))
        learners = zip(members, pipe.execute(), strict=True)
        fragments = _read_fragments(client, keys)
    except FAILURES as wrong:
        raise explain(url, wrong) from None
    finally:
        client.close()
    return {
        "run": _values(run_row),
        "epoch": _count(epoch),
        "learners": {name: {"last_seen": seen} | _values(row) for (name, seen), row in learners},
        "fragments": {fragment: _values(row) for fragment, row in fragments.items()},
        "events": [_values(row) for _, row in reversed(stream)],
    }


def list_runs(url: str) -> list[str]:
    """Names of all runs that the store knows, sorted. PeerLost or SettingError where it does not answer."""
    client = connect(url)
    try:
        return sorted(
            key.split(":")[1] for key in client.scan_iter(match="dd:*:run", count=1000) if key.count(":") == 2
        )
    except FAILURES as wrong:
        raise explain(url, wrong) from None
    finally:
        client.close()


def _read_fragments(client: Any, keys: RedisKeys) -> dict[int, dict[str, str]]:
    """All fragments' rows. The store does not say how many there are: ask until so many in a row are missing."""
    found: dict[int, dict[str, str]] = {}
    for start in count(0, _FRAGMENTS_AT_ONCE):
        pipe = client.pipeline(transaction=False)
        for fragment in range(start, start + _FRAGMENTS_AT_ONCE):
            pipe.hgetall(keys.fragment(fragment))
        rows = {start + i: row for i, row in enumerate(pipe.execute()) if row}
        if not rows:
            break
        found |= rows
    return found


def _values(row: dict[str, str]) -> dict[str, Any]:
    return {name: text if name in _TEXTS else _value(text) for name, text in row.items()}


def _value(text: str) -> int | float | str | None:
    """What stood there before it was made text; None for what was unknown or not finite."""
    if not text:
        return None
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _REAL.fullmatch(text) else text


def _count(text: str | None) -> int:
    """A counter as stored; 0 if there is none or somebody wrote something else there."""
    return int(text) if text is not None and _COUNTER.fullmatch(text) else 0
