"""Events of the rounds: the answers that a call collects, and the actions that `Rounds.tick` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .ledger import Who
from .membership import Member


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One learner's complete answer to one call. `vector` is the decoded delta, which `Rounds` does not read."""

    who: Who
    fragment: int
    slot: int
    attempt: int
    base_version: int
    tokens_from: int
    tokens_to: int
    steps_from: int
    steps_to: int
    vector: Any = None

    @property
    def tokens(self) -> int:
        return self.tokens_to - self.tokens_from

    @property
    def steps(self) -> int:
        return self.steps_to - self.steps_from


@dataclass
class OpenCall:
    """An open call and the answers to its present attempt."""

    slot: int
    t: int
    fragment: int
    version: int
    opened_at: float
    attempt: int = 1
    attempt_at: float = 0.0
    patience: float = 1.0
    """Duration of this attempt, as a multiple of the usual one. Doubled at each attempt: answers may only be late."""
    answers: dict[Who, Answer] = field(default_factory=dict)
    quorum_at: float | None = None
    closes_at: float | None = None
    drains: bool = False
    """One of the last calls of the run."""
    failures: int = 0
    """Unusable merges of it."""


@dataclass(frozen=True)
class Called:
    """Publish this call (a new one, or a new attempt of it)."""

    call: OpenCall


@dataclass(frozen=True)
class Merge:
    """Merge these answers, sorted by (name, incarnation), then call merged() or failed(). `unreported` answers are left
    out: they cover more work than their learners' reports allow.
    """

    call: OpenCall
    answers: tuple[Answer, ...]
    unreported: tuple[Answer, ...]

    @property
    def contributors(self) -> tuple[tuple[str, int, int, int], ...]:
        """(name, incarnation, steps_to, tokens_to) of each answer, as in an Update."""
        return tuple((*a.who, a.steps_to, a.tokens_to) for a in self.answers)


@dataclass(frozen=True)
class Unmet:
    """One of the last calls was given up below the quorum: the fragment keeps its version."""

    call: OpenCall


@dataclass(frozen=True)
class Lost:
    """This member has been silent for 3 beats."""

    member: Member


@dataclass(frozen=True)
class Drained:
    """Every fragment has had its last round."""


Action = Called | Merge | Unmet | Lost | Drained
