"""Backend interfaces of a virtual cluster: a real model that is trained, or only its counters and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..common.wire import Beat, Call
from ..learner.counters import Counts
from ..learner.identity import Identity
from ..learner.public_model import PublicFragment
from ..syncer.round_events import Merge
from ..syncer.rounds import Rounds
from ..syncer.run_metrics import RunMetrics

EPOCH = 1
MERGE_SECONDS = 0.001
"""Assumed duration of a merge: virtual time does not depend on this machine's speed."""


@dataclass(frozen=True)
class SentAnswer:
    """A learner's answer in transit: its payload size and its content for the syncer."""

    payload_bytes: int
    content: Any


class LearnerBackend(Protocol):
    """One incarnation of a learner."""

    share: float
    """Share of each batch that is trained on; smaller after losing slices."""

    @property
    def me(self) -> Identity: ...

    @property
    def done(self) -> Counts:
        """Steps and tokens so far."""

    @property
    def versions(self) -> tuple[int, ...]:
        """The adopted version of each fragment."""

    def receive_beat(self, beat: Beat, now: float) -> None:
        """Receive a beat."""

    def begin_step(self, now: float) -> None:
        """Begin an inner step; fixes the run's progress for it."""

    def step(self, calls: Sequence[Call]) -> float | None:
        """End an inner step and its boundary: adopt deliveries, answer calls; returns the loss."""

    def answers(self) -> list[SentAnswer]:
        """Answers of the last boundary."""

    def deliver(self, fragment: int, public: PublicFragment, *, reset: bool = False) -> None:
        """Receive a merged fragment; `reset` discards the learner's own progress."""

    def wants_reset(self) -> bool:
        """Whether it found values that are not finite and needs the whole model."""

    def close(self) -> None:
        """End this incarnation."""


class ModelBackend(Protocol):
    """The syncer's side: merges answers into the global model."""

    rounds: Rounds
    figures: RunMetrics

    def new_learner(self, name: str, incarnation: int, tape: Path | None) -> LearnerBackend:
        """A learner that has just fetched the whole model."""

    def public_model(self) -> Sequence[PublicFragment]:
        """Newest version of every fragment."""

    def take(self, sent: SentAnswer) -> str:
        """Receive an answer; returns the reason for a rejection, or ""."""

    def merge(self, merge: Merge, now: float) -> tuple[PublicFragment, int] | None:
        """Carry out and count a merge: the new version and its encoded size; None if it failed."""

    def finish(self) -> str:
        """End the run; returns the final model's hash, or "" without a model."""
