"""Background thread that writes checkpoints and final buffers, so that the syncer's loop never waits for a disk."""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..common.checkpoints import saved_at
from ..common.errors import Malformed
from ..common.fragments import Plan
from ..common.static_tensor_format import replaced
from .checkpoint import Checkpoints
from .final_buffers import ReceivedBuffers, check
from .global_model import Snapshot

RETRY_SECONDS = 5.0
"""Initial delay after a failed write; it doubles with each consecutive failure, up to RETRY_LIMIT_SECONDS."""
RETRY_LIMIT_SECONDS = 60.0
OUTCOMES_KEPT = 100


@dataclass(frozen=True, kw_only=True)
class SaveOutcome:
    """Result of one write, for a log line and an event."""

    t: int
    """Global step of the snapshot."""
    number: int
    """Of the checkpoint; 0 = the write failed."""
    bytes: int
    seconds: float
    error: str
    """'' = the checkpoint is durable."""
    failed: int = 0
    """Consecutive failed writes before this one."""
    failing_seconds: float = 0.0
    """Since the first of those began."""


@dataclass(frozen=True, kw_only=True)
class StoredBuffers:
    """Result of checking and writing one learner's final buffers."""

    received: ReceivedBuffers
    moved: tuple[int, ...] = ()
    """Indices into the layout's static tensors."""
    static: bytes = b""
    """All static tensors with those values."""
    refused: Malformed | None = None
    """Why they cannot be used."""
    error: str = ""
    """'' = they are durable; otherwise they are valid, but not on disk."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    snapshot: Snapshot
    bookkeeping: Mapping[str, Any]
    t: int


class CheckpointWriter:
    """Writes the latest submitted snapshot. A failure is counted, reported and retried; it is never raised in the loop.

    Holds at most two snapshots: the one being written and the latest pending one.
    """

    def __init__(self, checkpoints: Checkpoints, *, retry_seconds: float = RETRY_SECONDS) -> None:
        self.saved = 0
        self.failures = 0
        self.last_error = ""
        """Of the latest write; '' if it succeeded."""
        self.saved_at = saved_at(checkpoints.directory)
        """When the newest checkpoint was written, in unix seconds; None if there is none yet."""
        self._checkpoints = checkpoints
        self._retry_seconds = retry_seconds
        self._failures_in_a_row = 0
        self._failing_since = 0.0
        self._changed = threading.Condition()
        self._job: _Job | None = None
        self._untried: _Job | None = None
        """The latest job, until its first attempt has ended."""
        self._buffers: tuple[Plan, ReceivedBuffers, bytes] | None = None
        self._stored: StoredBuffers | None = None
        self._not_before = 0.0
        self._closing = False
        self._outcomes: deque[SaveOutcome] = deque(maxlen=OUTCOMES_KEPT)
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the latest write succeeded (or none was attempted yet)."""
        return not self.last_error

    @property
    def settled(self) -> bool:
        """Whether the latest snapshot was attempted: it is durable, or it failed and is retried."""
        return self._untried is None

    def submit(self, snapshot: Snapshot, bookkeeping: Mapping[str, Any], *, t: int = 0) -> None:
        """Write this as soon as the disk is free; an older pending snapshot is dropped. Returns at once.

        bookkeeping: JSON data; copied, so that the caller may keep changing it.
        """
        job = _Job(snapshot=snapshot, bookkeeping=copy.deepcopy(bookkeeping), t=t)
        with self._changed:
            self._job = self._untried = job
            self._not_before = 0.0
            self._changed.notify()

    def store_buffers(self, plan: Plan, received: ReceivedBuffers, static: bytes) -> None:
        """Check a learner's buffers, put them into a copy of `static` and write them; see `stored`. Returns at once.

        The write is attempted once: a failing disk must not delay the end of the run.
        """
        with self._changed:
            self._buffers = (plan, received, static)
            self._changed.notify()

    def stored(self) -> StoredBuffers | None:
        """The result of the latest `store_buffers`, returned once; None before."""
        with self._changed:
            stored, self._stored = self._stored, None
            return stored

    def outcomes(self) -> list[SaveOutcome]:
        """Results of writes since the last call, oldest first (at most OUTCOMES_KEPT)."""
        with self._changed:
            rows = list(self._outcomes)
            self._outcomes.clear()
        return rows

    def close(self, wait_seconds: float) -> bool:
        """Write what is pending, retry a failed write once, and end. True if the last submitted snapshot is durable.

        False after `wait_seconds`: the write is then abandoned, which leaves earlier checkpoints intact.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(wait_seconds)
        return not self._thread.is_alive() and self.healthy

    def _run(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """Wait for a job and run it; False when closing. Holds no reference to a snapshot afterwards."""
        job = self._next()
        if isinstance(job, _Job):
            self._write(job)
        elif job is not None:
            self._store(*job)
        return job is not None

    def _next(self) -> _Job | tuple[Plan, ReceivedBuffers, bytes] | None:
        """Wait for the next job; None when closing."""
        with self._changed:
            while True:
                if self._buffers is not None:
                    buffers, self._buffers = self._buffers, None
                    return buffers
                pause = self._not_before - time.monotonic()
                if self._job is not None and (pause <= 0 or self._closing):
                    job, self._job = self._job, None
                    return job
                if self._closing:
                    return None
                self._changed.wait(pause if self._job is not None else None)

    def _store(self, plan: Plan, received: ReceivedBuffers, static: bytes) -> None:
        try:
            stored = self._checked_and_written(plan, received, static)
        except Malformed as failure:
            stored = StoredBuffers(received=received, refused=failure)
        except Exception as failure:  # noqa: BLE001 for example MemoryError: another learner's buffers may be used
            refused = Malformed("unusable", f"{type(failure).__name__}: {failure}")
            stored = StoredBuffers(received=received, refused=refused)
        with self._changed:
            self._stored = stored

    def _checked_and_written(self, plan: Plan, received: ReceivedBuffers, static: bytes) -> StoredBuffers:
        moved, error = check(plan, received), ""
        whole = replaced(plan.layout, static, moved)
        try:
            self._checkpoints.write_buffers(plan.layout, received.last.name, moved)
        except Exception as failure:  # noqa: BLE001 the model uses them in any case
            error = f"{type(failure).__name__}: {failure}"
        return StoredBuffers(received=received, moved=tuple(sorted(moved)), static=whole, error=error)

    def _write(self, job: _Job) -> None:
        began = time.monotonic()
        number = size = 0
        error = ""
        try:
            number, size = self._checkpoints.save(job.snapshot, job.bookkeeping)
        except Exception as failure:  # noqa: BLE001 training continues, and the failure is reported
            error = f"{type(failure).__name__}: {failure}"
        seconds = time.monotonic() - began
        with self._changed:
            failed = self._failures_in_a_row
            if not failed:
                self._failing_since = began
            self._outcomes.append(
                SaveOutcome(
                    t=job.t, number=number, bytes=size, seconds=seconds, error=error, failed=failed,
                    failing_seconds=time.monotonic() - self._failing_since if failed else 0.0,
                )
            )  # fmt: skip
            self.last_error = error
            if self._untried is job:
                self._untried = None
            if not error:
                self.saved += 1
                self.saved_at = time.time()
                self._failures_in_a_row = 0
                return
            self.failures += 1
            if self._job is None and not self._closing:
                pause = min(self._retry_seconds * 2 ** min(failed, 10), RETRY_LIMIT_SECONDS)
                self._job, self._not_before = job, time.monotonic() + pause
            self._failures_in_a_row += 1
