"""A small model, its trainer, and a scripted syncer for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from decoupled_diloco.common.config import RunSettings
from decoupled_diloco.common.errors import DilocoError
from decoupled_diloco.common.fragments import Plan, balanced_plan
from decoupled_diloco.learner import core
from decoupled_diloco.learner.link import Link
from decoupled_diloco.learner.replica import Replica, layout_of
from decoupled_diloco.learner.session import Session, join
from scripted_syncer import ScriptedSyncer
from torch import Tensor, nn
from waiting import wait_for

WIDTH = 1100
"""The first fragment has two chunks of 1 MiB as a keyframe (and in f32), the second one less than one."""


class Model(nn.Module):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.full((WIDTH, 300), value))
        self.narrow = nn.Parameter(torch.full((40,), value))
        self.fixed = nn.Parameter(torch.full((3,), value), requires_grad=False)


@dataclass
class Trainer:
    """A model that each step moves by 1, and its session."""

    model: Model
    optimizer: torch.optim.Optimizer
    session: Session

    def step(self, tokens: int = 10, loss: float | None = None, by: float = 1.0) -> bool:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(by)
        return self.session.step(tokens=tokens, loss=loss)

    def hears_call(self, slot: int, attempt: int = 1) -> None:
        wait_for(
            lambda: any((c.slot, c.attempt) == (slot, attempt) for c in self.session._mailbox._calls),
            f"the learner hears call {slot}, attempt {attempt}",
        )

    def gets(self, fragment: int, version: int) -> None:
        wait_for(
            lambda: fragment in (a := self.session._mailbox._arrivals) and a[fragment].public.version == version,
            f"version {version} of fragment {fragment} waits for the learner",
        )


def settings(**more: Any) -> RunSettings:
    rows: dict[str, Any] = {"run": "r", "fragments": 2, "overlap": 1, "codec_up": "f32", "codec_down": "f32"}
    return RunSettings(**(rows | more))


def vectors(value: float) -> list[Tensor]:
    model = Model(value)
    replica = Replica(model, plan_of(model))
    return [replica.vector(fragment) for fragment in replica.plan.fragments]


def plan_of(model: nn.Module) -> Plan:
    return balanced_plan(layout_of(model), 2)


@contextmanager
def syncer_at(address: str, **more: Any) -> Iterator[ScriptedSyncer]:
    """A seeded run: every fragment at version 1, all values 5, the static ones 0."""
    with ScriptedSyncer(address, settings(**more), layout_of(Model())) as syncer:
        syncer.put(vectors(5.0), 1, static=bytes(12))
        yield syncer


def trainer(address: str, **more: Any) -> Trainer:
    model = Model(-1.0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    rows: dict[str, Any] = {"name": "me", "run": "r"}
    return Trainer(model, optimizer, join(address, model, optimizer, **(rows | more)))


def talk_of(session: Session) -> core.LearnerCore:
    """What its link says and hears."""
    assert isinstance(session._link, Link)
    return session._link.core


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """`work` in a thread; what it returns or raises is in the list once it has ended."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except DilocoError as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result
