"""Registry: a run's status in Redis, written by the syncer and read by status and watch.

The registry is a view. The syncer's files and memory are the authority, so nothing waits for Redis: callers queue new
values, and a thread (registry_writer) writes them. docs/redis.md explains each field.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from structlog.typing import FilteringBoundLogger

from .errors import SettingError
from .redis_client import FAILURES, check_connection, connect, explain, foreign_key, is_wrong_type, redact_url
from .redis_keys import RedisKeys
from .registry_buffer import TEXT_CHARACTERS, PendingWrites, Value
from .registry_writer import RegistryWriter

__all__ = ["RedisKeys", "Registry", "check_connection", "list_runs", "read_status", "redact_url"]

_WHOLE = re.compile(r"-?[0-9]{1,20}")
_REAL = re.compile(r"-?[0-9]{1,40}(\.[0-9]{1,40})?(e[+-]?[0-9]{1,4})?")
_COUNTER = re.compile(r"[0-9]{1,14}")
"""No run counts further. A larger value in Redis, written by others, would push epochs and versions beyond what
messages can carry.
"""
_TEXTS = ("run", "state", "kind", "learner", "learners", "host", "device", "reason", "model_hash",
          "blocked", "rejected_reason", "sentence", "quorum_state", "save_error")  # fmt: skip
"""Fields that are text, even if their value looks like a number. All other fields of a hash are numbers."""
_FRAGMENTS_AT_ONCE = 256


class Registry:
    """The syncer's side. Only `stored_epoch`, `stored_versions` and `close` wait; no method fails because of Redis."""

    def __init__(self, url: str | None, run: str, log: FilteringBoundLogger) -> None:
        """`url` None: no Redis, and every method does nothing. SettingError for a malformed URL or name."""
        self._keys = RedisKeys(run)
        self._url = url
        self._log = log
        self._pending = PendingWrites()
        self._writer: RegistryWriter | None = None
        if url is not None:
            connect(url)  # a malformed URL is an error of the caller, not of the thread
            self._writer = RegistryWriter(url, self._keys, self._pending, log)
            self._writer.start()

    @property
    def healthy(self) -> bool:
        """The last write reached Redis (True without Redis)."""
        return self._writer is None or (self._writer.connected and self._writer.is_alive())

    def publish_run(self, **fields: Value) -> None:
        """Fields keep their last value until they are given again; None and non-finite numbers become empty."""
        self._pending.put(self._keys.run, fields)

    def publish_learner(self, name: str, last_seen_unix: float, **fields: Value) -> None:
        self._pending.put(self._keys.learner(name), fields, member=(self._keys.learners, name, last_seen_unix))

    def publish_fragment(self, fragment: int, *, merged_at: float = 0.0, **fields: Value) -> None:
        """`merged_at`: unix seconds of its last merge; 0 = not since the syncer's start."""
        listed = (self._keys.fragments, str(int(fragment)), merged_at)
        self._pending.put(self._keys.fragment(fragment), {"merged_at": merged_at, **fields}, member=listed)

    def forget_learner(self, name: str) -> None:
        """Remove its hash and its entry in the set; a later publish_learner creates them again."""
        self._pending.forget(self._keys.learner(name), self._keys.learners, name)

    def event(self, kind: str, /, **fields: Value) -> None:
        """One entry of the stream: `at`, the fields, and `kind` (which replaces a field of that name).

        While Redis does not answer, the newest thousand are kept.
        """
        self._pending.add_event(kind, fields)

    def write_epoch(self, epoch: int) -> None:
        """Queued for the thread like everything else: the syncer's file is the authority."""
        self._pending.put_epoch(epoch)

    def stored_epoch(self) -> int:
        """The epoch in Redis; 0 if there is none or Redis does not answer within a second."""
        return _count(self._read(lambda view: view.read([("get", self._keys.epoch)])[0]))

    def stored_versions(self) -> dict[int, int]:
        """Fragment -> version, as far as Redis has them; empty if it does not answer within a second."""
        rows = self._read(lambda view: view.fragments(self._keys)) or {}
        return {p: _count(row["version"]) for p, row in rows.items() if _COUNTER.fullmatch(row.get("version", ""))}

    def close(self) -> None:
        """Write what is pending; waits 3 s at most."""
        if self._writer is not None:
            self._writer.close()

    def _read(self, query: Callable[[_RedisView], Any]) -> Any:
        if self._url is None:
            return None
        client = connect(self._url)
        view = _RedisView(client)
        try:
            return query(view)
        except FAILURES as error:
            self._log.warning("registry_unreadable", reason=str(explain(self._url, error)))
            return None
        finally:
            client.close()
            for note in view.notes:
                self._log.warning("registry_unreadable", reason=note)


def read_status(url: str, run: str, events: int = 50) -> dict[str, Any]:
    """The status of `run` in Redis: {"run": {field: value}, "epoch": int, "learners": {name: {"last_seen": float,
    field: value}}, "fragments": {p: {field: value}}, "events": [{"at", "kind", field: value}], oldest first,
    "notes": [sentence]}.

    Numbers are parsed, unknown values are None. Everything is empty for a run that is not in Redis. Values that no run
    writes are left out, and a note says so. PeerLost or SettingError if Redis does not answer.
    """
    keys, client = RedisKeys(run), connect(url)
    view = _RedisView(client)
    try:
        run_row, epoch, members, stream = view.read(
            [("hgetall", keys.run), ("get", keys.epoch), ("zrange", keys.learners, 0, -1, False, True),
             ("xrevrange", keys.events, "+", "-", events)]
        )  # fmt: skip
        seen = {name: score for name, score in members or () if view.is_name(keys, name)}
        learners = view.read([("hgetall", keys.learner(name)) for name in seen])
        fragments = view.fragments(keys)
    except FAILURES as error:
        raise explain(url, error) from None
    finally:
        client.close()
    return {
        "run": view.values(keys.run, run_row),
        "epoch": _count(epoch),
        "learners": {
            name: view.values(keys.learner(name), row) | {"last_seen": seen[name]}
            for name, row in zip(seen, learners, strict=True)
        },
        "fragments": {fragment: view.values(keys.fragment(fragment), row) for fragment, row in fragments.items()},
        "events": [_values(row) for _, row in reversed(stream or ())],
        "notes": view.notes,
    }


def list_runs(url: str) -> list[str]:
    """Sorted names of all runs in Redis. PeerLost or SettingError if it does not answer."""
    client = connect(url)
    try:
        return sorted(
            key.split(":")[1] for key in client.scan_iter(match="dd:*:run", count=1000) if key.count(":") == 2
        )
    except FAILURES as error:
        raise explain(url, error) from None
    finally:
        client.close()


class _RedisView:
    """Reads a run's keys with the caution needed for a Redis that other programs write to as well."""

    def __init__(self, client: Any) -> None:
        self.notes: list[str] = []
        """Sentences: what was left out, why, and what to do."""
        self._client = client

    def read(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The replies to client commands whose first argument is a key; None if that key has another type."""
        pipe = self._client.pipeline(transaction=False)
        for name, *arguments in commands:
            getattr(pipe, name)(*arguments)
        return [
            self._own_type(str(command[1]), reply)
            for command, reply in zip(commands, pipe.execute(raise_on_error=False), strict=True)
        ]

    def fragments(self, keys: RedisKeys) -> dict[int, dict[str, str]]:
        """All fragments' rows. Their number is unknown: reads until _FRAGMENTS_AT_ONCE in a row are missing."""
        found: dict[int, dict[str, str]] = {}
        for start in count(0, _FRAGMENTS_AT_ONCE):
            rows = self.read([("hgetall", keys.fragment(start + i)) for i in range(_FRAGMENTS_AT_ONCE)])
            found |= {start + i: row for i, row in enumerate(rows) if row}
            if not any(rows):
                break
        return found

    def values(self, key: str, row: Mapping[str, str] | None) -> dict[str, Any]:
        """A hash's values; None for fields that should be numbers, but are not."""
        values = _values(row)
        invalid = sorted(name for name, value in values.items() if isinstance(value, str) and name not in _TEXTS)
        if invalid:
            more = f" and {len(invalid) - 3} more" if len(invalid) > 3 else ""
            named = ", ".join(name[:40] for name in invalid[:3]) + more
            self.notes.append(
                f"in {key} {named} should be a number and is left out; if the run does not write it again, delete it"
            )
        return values | dict.fromkeys(invalid)

    def is_name(self, keys: RedisKeys, name: str) -> bool:
        try:
            keys.learner(name)
        except SettingError:
            self.notes.append(
                f"in {keys.learners} {name[:40]!r} is not a learner's name and is left out; remove it (ZREM)"
            )
            return False
        return True

    def _own_type(self, key: str, reply: Any) -> Any:
        if is_wrong_type(reply):
            self.notes.append(foreign_key(key))
            return None
        if isinstance(reply, Exception):
            raise reply
        return reply


def _values(row: Mapping[str, str] | None) -> dict[str, Any]:
    return {name: _value(name, text) for name, text in (row or {}).items()}


def _value(name: str, text: str) -> int | float | str | None:
    """The value whose text this is; None if it was unknown or not finite."""
    if name in _TEXTS:
        return text[:TEXT_CHARACTERS]
    if not text:
        return None
    if _WHOLE.fullmatch(text):
        return int(text)
    if _REAL.fullmatch(text):
        return number if math.isfinite(number := float(text)) else None
    return text[:TEXT_CHARACTERS]


def _count(text: str | None) -> int:
    """A stored counter; 0 if there is none or it is not a plausible number."""
    return int(text) if text is not None and _COUNTER.fullmatch(text) else 0
