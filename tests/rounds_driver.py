"""Rounds with learners around them, driven by hand: time moves only when a test says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from decoupled_diloco.common.config import RunSettings
from decoupled_diloco.common.wire import Alive
from decoupled_diloco.syncer.ledger import Who
from decoupled_diloco.syncer.round_events import Action, Answer, Merge
from decoupled_diloco.syncer.rounds import Rounds

P = 4


SIZES = [100, 10, 33, 7]


TOKENS = 10
"""Of one inner step."""


@dataclass
class Worker:
    """What a learner knows of itself: counters; per fragment, its anchor's version and where its interval begins."""

    name: str
    incarnation: int
    steps: int = 0
    step_seconds: float = 0.0
    versions: list[int] = field(default_factory=lambda: [0] * P)
    since: list[int] = field(default_factory=lambda: [0] * P)

    @property
    def who(self) -> Who:
        return self.name, self.incarnation

    def alive(self, age: float = 0.0) -> Alive:
        return Alive(
            run="run", name=self.name, incarnation=self.incarnation, epoch=1, local_steps=self.steps,
            tokens=self.steps * TOKENS, step_seconds=self.step_seconds, last_step_age_seconds=age, inner_seconds=0.0,
            session_seconds=0.0, since_first_step_seconds=0.0,
        )  # fmt: skip

    def answer(self, slot: int, attempt: int, fragment: int) -> Answer:
        begin = self.since[fragment]
        return Answer(
            who=self.who, fragment=fragment, slot=slot, attempt=attempt, base_version=self.versions[fragment],
            tokens_from=begin * TOKENS, tokens_to=self.steps * TOKENS, steps_from=begin, steps_to=self.steps,
        )  # fmt: skip

    def adopt(self, fragment: int, version: int) -> None:
        self.versions[fragment], self.since[fragment] = version, self.steps


@dataclass
class RoundsDriver:
    """A machine with workers round it, driven by hand: time moves only when a test says so."""

    rounds: Rounds
    now: float = 100.0
    workers: dict[str, Worker] = field(default_factory=dict)
    merges: list[Merge] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)

    def join(self, name: str, incarnation: int, step_seconds: float = 1.0) -> Worker:
        worker = Worker(name, incarnation, versions=list(self.rounds.versions))
        self.rounds.join(name, incarnation, self.now)
        self.workers[name] = worker
        worker.step_seconds = step_seconds
        return worker

    def step(self, worker: Worker, steps: int = 1) -> None:
        worker.steps += steps
        self.hear(worker)

    def hear(self, worker: Worker, age: float = 0.0) -> None:
        self.rounds.alive(worker.alive(age), self.now)

    def tick(self, seconds: float = 0.0) -> list[Action]:
        """Let `seconds` pass, carry out what the machine wants, and give it back."""
        self.now += seconds
        done: list[Action] = []
        while actions := self.rounds.tick(self.now):
            for action in actions:
                if isinstance(action, Merge):
                    self.merges.append(action)
                    self.rounds.merged(action, 0.01)
            done += actions
        self.actions += done
        return done

    def answer(self, worker: Worker, fragment: int) -> str:
        call = self.rounds.calls[fragment]
        return self.rounds.answer(worker.answer(call.slot, call.attempt, fragment))

    def adopt_all(self) -> None:
        for worker in self.workers.values():
            for p, version in enumerate(self.rounds.versions):
                if worker.versions[p] != version:
                    worker.adopt(p, version)

    def open_one(self) -> int:
        """Tick until a call is open; its fragment."""
        for _ in range(100):
            if self.rounds.calls:
                return next(iter(self.rounds.calls))
            self.tick(1.0)
            for worker in self.workers.values():
                self.step(worker)
        raise AssertionError("no call was opened")


def driven(workers: int = 2, **changes: Any) -> RoundsDriver:
    defaults: dict[str, Any] = {"steps": 50, "sync_every": P, "fragments": P, "overlap": 2, "quorum": 1}
    made = RoundsDriver(Rounds(RunSettings(**(defaults | changes)), SIZES, epoch=1))
    for i in range(workers):
        made.step(made.join(f"w{i}", 1 + i), 2)
    return made


def of(actions: list[Action], kind: type[Any]) -> list[Any]:
    return [a for a in actions if isinstance(a, kind)]
