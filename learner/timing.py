"""What time it is: in the run (global steps, between two beats) and in the training thread (inner steps, our share).

Pure: the time, in seconds of one monotonic clock, is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..common.config import BEAT_SECONDS
from ..common.wire import Beat

EMA_SHARE = 0.2
"""Weight of the newest step in the moving average of step seconds."""


OUTLIER = 5.0
"""A step counts as at most so many usual ones, so that one pause of the machine does not pass for a slow learner."""


@dataclass(frozen=True)
class Progress:
    """How far the run is. `exact` lies between two global steps where the last beat is some time ago."""

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
    """Global steps between beats: t as last told, moved on by the typical step time, never back within one epoch."""

    def __init__(self) -> None:
        self._beat: Beat | None = None
        self._heard_at = 0.0
        self._told = 0.0

    def heard(self, beat: Beat, now: float) -> None:
        if self._beat is not None and beat.epoch != self._beat.epoch:
            self._told = 0.0  # a resume from an older checkpoint: the run's clock itself went back
        self._beat, self._heard_at = beat, now

    def progress(self, now: float) -> Progress:
        beat = self._beat
        if beat is None:
            return Progress(0.0, 0)
        if beat.state == "finished":
            return Progress(float(beat.steps), beat.steps)
        since = min(now - self._heard_at, 2 * BEAT_SECONDS) if beat.state == "running" else 0.0
        ahead = since / beat.step_seconds if beat.step_seconds else 0.0
        self._told = max(self._told, min(beat.t + ahead, float(beat.steps)))
        return Progress(self._told, beat.steps)


class StepTimer:
    """Where the training thread's seconds go, from the moment it joined."""

    def __init__(self, now: float) -> None:
        self.started_at = now
        self.last_step_at = now
        self.step_seconds = 0.0
        """Moving average over inner steps, the first one (which may compile) left out; 0 = none timed yet."""
        self.inner_seconds = 0.0
        self.session_seconds = 0.0
        self._left_at = now
        self._steps = 0
        self._unstepped_seconds = 0.0
        """Of calls since the last inner step: without an optimizer step they are part of the next one."""

    def enter(self, now: float, *, stepped: bool = True) -> None:
        """A session call begins, and with `stepped` an inner step has ended."""
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
        """The session call ends; what follows is the next inner step."""
        self.session_seconds += max(0.0, now - self._left_at)
        self._left_at = now

    def leave_out(self, seconds: float, ours: float = 0.0) -> None:
        """So many seconds since the last call were neither an inner step nor ours (an evaluation), but for `ours`."""
        self._left_at += seconds
        self.session_seconds += ours
