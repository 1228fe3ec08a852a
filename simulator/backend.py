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
from ..syncer.metrics import RunMetrics
from ..syncer.round_events import Merge
from ..syncer.rounds import Rounds

EPOCH = 1
MERGE_SECONDS = 0.001
"""What a merge is said to take: a figure of its own, since virtual time does not know how fast this machine is."""


@dataclass(frozen=True)
class Sent:
    """A learner's answer on its way: its size, and what the syncer takes out of it."""

    octets: int
    content: Any


class LearnerBackend(Protocol):
    """One life of a learner."""

    share: float
    """Of each batch that is worked on: a learner that lost slices works on less."""

    @property
    def me(self) -> Identity: ...

    @property
    def done(self) -> Counts:
        """Steps and tokens so far."""

    @property
    def versions(self) -> tuple[int, ...]:
        """The adopted version of each fragment."""

    def hear(self, beat: Beat, now: float) -> None:
        """A beat arrives."""

    def begin_step(self, now: float) -> None:
        """An inner step begins: how far the run is, it knows now."""

    def step(self, calls: Sequence[Call]) -> float | None:
        """An inner step ends, and its boundary: adopt what was delivered, answer what is called; the loss."""

    def sent(self) -> list[Sent]:
        """What the last boundary answered."""

    def deliver(self, fragment: int, public: PublicFragment, *, reset: bool = False) -> None:
        """A merged fragment arrives; with `reset` nothing of the learner's own is kept."""

    def wants_reset(self) -> bool:
        """It found values that are not finite, and asks for the whole model."""

    def close(self) -> None:
        """It ends here."""


class ModelBackend(Protocol):
    """The syncer's side: what is merged."""

    rounds: Rounds
    figures: RunMetrics

    def worker(self, name: str, incarnation: int, tape: Path | None) -> LearnerBackend:
        """A learner that has just fetched everything."""

    def whole(self) -> Sequence[PublicFragment]:
        """The newest version of every fragment."""

    def take(self, sent: Sent) -> str:
        """An answer arrives; why it is refused, or "" if it is taken."""

    def merge(self, merge: Merge, now: float) -> tuple[PublicFragment, int] | None:
        """Carry out a merge and book it: the new version, and its size on the way down; None if it gave nothing."""

    def finish(self) -> str:
        """The run is over: the final model's hash, "" where there is none."""
