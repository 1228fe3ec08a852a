"""The built-in learner's loop, with a session that only counts."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import torch
from decoupled_diloco.common.config import TaskSettings
from decoupled_diloco.learner.session import Session
from decoupled_diloco.learner.task import loop
from decoupled_diloco.learner.task.transformer import Transformer
from decoupled_diloco.learner.timing import Progress

TASK = TaskSettings(layers=1, width=32, sequence_length=8, batch_sequences=1)


class Counting:
    """A session of a run that is over after three steps."""

    def __init__(self) -> None:
        self.local_steps = 0
        self.losses: list[float] = []

    @property
    def progress(self) -> Progress:
        return Progress(exact=float(self.local_steps), steps=3)

    @property
    def finished(self) -> bool:
        return self.local_steps >= 3

    def step(self, tokens: int, loss: float) -> bool:
        assert tokens == TASK.tokens_per_step
        self.local_steps += 1
        self.losses.append(loss)
        return not self.finished


def trained(stop: threading.Event) -> Counting:
    session = Counting()
    model = Transformer(TASK, seed=0)
    window = torch.zeros(1, TASK.sequence_length, dtype=torch.int64)
    batches = cast("Any", iter([(window, window)] * 10))
    loop.train(cast("Session", session), model, loop.make_optimizer(model), batches, inner_lr=1e-2, stop=stop)
    return session


def test_the_loop_ends_with_the_run_and_its_loss_falls() -> None:
    session = trained(threading.Event())
    assert len(session.losses) == 3
    assert session.losses[-1] < session.losses[0]


def test_the_loop_ends_after_the_step_in_which_somebody_wished_so() -> None:
    stop = threading.Event()
    stop.set()
    assert trained(stop).local_steps == 1


def test_an_observer_of_a_learner_hears_how_it_goes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LOG_SECONDS", 0.0)
    trained(threading.Event())
    told = capsys.readouterr().err
    assert "training step=1 steps=3 loss=5.5" in told
    assert told.count("training") == 2, "the last step is told by the session's own end"
