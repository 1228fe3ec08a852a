"""Timing of a run and of a training thread: global steps between two beats; seconds of inner steps and session calls.

Pure: the time, in seconds of one monotonic clock, is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..common.config import BEAT_SECONDS
from ..common.wire import Beat

EMA_SHARE = 0.2
"""Weight of the newest step in the moving average of step seconds."""


OUTLIER = 5.0
"""A step counts as at most this many average ones, so that one pause of the machine is not taken for a slow learner."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run. `exact` is interpolated between global steps by the time since the last beat."""

    exact: float
    steps: int
    """T, in global steps."""

    @property
    def step(self) -> int:
        """Global step t."""
        return int(self.exact)

    @property
    def fraction(self) -> float:
        """From 0 at the start to 1 at the end."""
        return min(1.0, self.exact / self.steps) if self.steps else 0.0


class RunClock:
    """Global steps between beats: t of the newest beat, advanced by the typical step time, monotonic in an epoch."""

    def __init__(self) -> None:
        self._beat: Beat | None = None
        self._received_at = 0.0
        self._reported = 0.0

    def receive(self, beat: Beat, now: float) -> None:
        if self._beat is not None and beat.epoch != self._beat.epoch:
            self._reported = 0.0  # a resume from an older checkpoint sets the run's clock back
        self._beat, self._received_at = beat, now

    def progress(self, now: float) -> Progress:
        beat = self._beat
        if beat is None:
            return Progress(0.0, 0)
        if beat.state == "finished":
            return Progress(float(beat.steps), beat.steps)
        since = min(now - self._received_at, 2 * BEAT_SECONDS) if beat.state == "running" else 0.0
        ahead = since / beat.step_seconds if beat.step_seconds else 0.0
        self._reported = max(self._reported, min(beat.t + ahead, float(beat.steps)))
        return Progress(self._reported, beat.steps)


class StepTimer:
    """Splits the training thread's time since the join into inner steps and session calls."""

    def __init__(self, now: float) -> None:
        self.started_at = now
        self.last_step_at = now
        self.step_seconds = 0.0
        """Moving average over inner steps, without the first, which may compile; 0 = none timed yet."""
        self.inner_seconds = 0.0
        self.session_seconds = 0.0
        self._left_at = now
        self._steps = 0
        self._unstepped_seconds = 0.0
        """Time of calls without an optimizer step, which counts for the next inner step."""

    def enter(self, now: float, *, stepped: bool = True) -> None:
        """A session call begins; with `stepped`, an inner step has ended."""
        inner = max(0.0, now - self._left_at)
        self.inner_seconds += inner
        self._left_at = now
        if not stepped:
            self._unstepped_seconds += inner
            return
        inner, self._unstepped_seconds = inner + self._unstepped_seconds, 0.0
        self._steps += 1
        if self._steps == 2:
            self.step_seconds = inner
        elif self._steps > 2:
            usual = min(inner, OUTLIER * self.step_seconds)
            self.step_seconds += EMA_SHARE * (usual - self.step_seconds)
        self.last_step_at = now

    def leave(self, now: float) -> None:
        """The session call ends, and the next inner step begins."""
        self.session_seconds += max(0.0, now - self._left_at)
        self._left_at = now

    def leave_out(self, seconds: float, ours: float = 0.0) -> None:
        """Exclude `seconds` since the last call (an evaluation), of which `ours` count as session time."""
        self._left_at += seconds
        self.session_seconds += ours
