"""Run metrics, as README.md defines them: uptime, merge participation, bandwidth. Pure sums, O(1) memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RECENT_BEATS = 30


@dataclass
class RunMetrics:
    """Sums over a run's merges. `parameters` is N, the number of elements of the model.

    Run time is counted from the first inner step. That moment moves back whenever a learner reports an earlier one:
    learners keep training while the syncer is down or disconnected, and that time must count as well.
    """

    parameters: int
    steps_between: float
    """H / P."""
    merges: int = 0
    contributions: int = 0
    """Answers that were merged."""
    participation_sum: float = 0.0
    late_seconds: float = 0.0
    """Sum of max(0, gap between merges - 2 (H / P) typical steps)."""
    longest_gap_seconds: float = 0.0
    merge_seconds: float = 0.0
    bytes_f32_allreduce: int = 0
    first_merge_seconds: float | None = None
    last_merge_seconds: float | None = None
    """In seconds of run time; None before the first merge."""
    first_step_at: float | None = None
    now: float = 0.0
    _t: int = 0

    def record_first_step(self, now: float, since_first_step_seconds: float) -> None:
        """A learner reports how long ago its first step began; run time starts with the earliest."""
        self.now = now
        if since_first_step_seconds > 0:
            began = now - since_first_step_seconds
            self.first_step_at = began if self.first_step_at is None else min(began, self.first_step_at)

    def record_step(self, t: int, live: int) -> None:
        """Global step `t` with `live` learners; a data-parallel ring all-reduce moves 2 (M - 1) 4 N bytes per step."""
        if t > self._t:
            self.bytes_f32_allreduce += (t - self._t) * 2 * max(0, live - 1) * 4 * self.parameters
            self._t = t

    def record_merge(self, now: float, *, contributors: int, live: int, typical_seconds: float, seconds: float) -> None:
        self.merges += 1
        self.contributions += contributors
        self.participation_sum += min(1.0, contributors / max(1, live))
        self.merge_seconds += seconds
        at = self._run_seconds(now)
        if self.first_merge_seconds is None:
            self.first_merge_seconds = at
        if self.last_merge_seconds is not None:
            gap = at - self.last_merge_seconds
            self.longest_gap_seconds = max(self.longest_gap_seconds, gap)
            self.late_seconds += max(0.0, gap - 2 * self.steps_between * typical_seconds)
        self.last_merge_seconds = at

    def to_summary(self) -> dict[str, Any]:
        seconds, first = self._run_seconds(self.now), self.first_merge_seconds
        return {
            "merges": self.merges,
            "seconds": round(seconds, 3),
            "uptime": round(1 - min(1.0, self.late_seconds / seconds), 4) if seconds else 0.0,
            "merge_participation": round(self.participation_sum / self.merges, 4) if self.merges else 0.0,
            "longest_merge_gap_seconds": round(self.longest_gap_seconds, 3),
            "merge_seconds_mean": round(self.merge_seconds / self.merges, 6) if self.merges else 0.0,
            "seconds_to_first_merge": None if first is None else round(first, 3),
            "bytes_f32_allreduce": self.bytes_f32_allreduce,
        }

    def to_json(self) -> dict[str, Any]:
        """Sums with which a resumed run continues (clock readings are not valid in another process)."""
        rows = {name: getattr(self, name) for name in _SUMS}
        return rows | {"elapsed": self._run_seconds(self.now), "t": self._t}

    def load_json(self, rows: dict[str, Any], now: float) -> None:
        for name in _SUMS:
            setattr(self, name, rows[name])
        self.first_step_at, self._t, self.now = now - rows["elapsed"], rows["t"], now

    def _run_seconds(self, now: float) -> float:
        return 0.0 if self.first_step_at is None else max(0.0, now - self.first_step_at)


_SUMS = (
    "merges",
    "contributions",
    "participation_sum",
    "late_seconds",
    "longest_gap_seconds",
    "merge_seconds",
    "bytes_f32_allreduce",
    "first_merge_seconds",
    "last_merge_seconds",
)
