"""Steps that change nothing are not counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from checked_model import Model, Optimizer, step
from lone_session import Lone, backward
from torch import nn


def test_tokens_of_micro_batches_are_booked_with_the_step_that_learns_from_them(
    lone: Lone, model: Model, optimizer: Optimizer, capsys: pytest.CaptureFixture[str]
) -> None:
    for call in range(24):
        backward(model)
        if call % 8 == 7:
            optimizer.step()
            optimizer.zero_grad()
        lone.call(call)
        lone.session.step(tokens=10)
        assert lone.session.local_steps == (call + 1) // 8
        assert lone.session.tokens == (call + 1) // 8 * 80
    answers = lone.answers()
    assert [(c.until.steps - c.since.steps, c.until.tokens - c.since.tokens) for c in answers] == [(1, 80), (2, 160),
                                                                                                  (3, 240)]  # fmt: skip
    said = capsys.readouterr().err
    assert said.count("calls_without_step") == 1
    assert "call session.step() once for each optimizer step" in said


def scaled_steps(lone: Lone, model: nn.Module, optimizer: Optimizer, scale: Callable[[int], float], times: int) -> int:
    """A loop with a gradient scaler, whose session call follows in any case; how many optimizer steps there were."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**6)
    before = [p.detach().clone() for p in model.parameters()]
    made = 0
    for number in range(times):
        optimizer.zero_grad()
        backward(model, scale(number))
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update(1.0)
        made += any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        before = [p.detach().clone() for p in model.parameters()]
        lone.call(number)
        lone.session.step(tokens=10)
    return made


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_gradient_scaler_skips_are_not_counted(
    model: Model, capsys: pytest.CaptureFixture[str], *, fused: bool
) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, fused=fused)
    lone = Lone(model, optimizer)
    made = scaled_steps(lone, model, optimizer, lambda n: float("inf") if n % 8 else 1.0, 40)
    lone.session.close("stopped")
    assert made == 5
    assert (lone.session.local_steps, lone.session.tokens) == (5, 50)
    assert len(lone.answers()) == 5
    said = capsys.readouterr().err
    assert said.count("steps_skipped") == 1
    assert "a gradient scaler skipped the step" in said


def test_a_run_of_skipped_steps_alone_answers_nothing(lone: Lone, model: Model, optimizer: Optimizer) -> None:
    assert scaled_steps(lone, model, optimizer, lambda _: float("nan"), 20) == 0
    assert (lone.session.local_steps, lone.session.tokens) == (0, 0)
    assert not lone.answers()
    lone.merge(by=3.0)
    assert lone.session.step(tokens=10)
    assert lone.session.versions == (2,)


def test_tokens_of_micro_batches_that_a_scaler_throws_away_are_not_booked(
    lone: Lone, model: Model, optimizer: Optimizer
) -> None:
    backward(model)
    lone.session.step(tokens=10)
    backward(model, float("inf"))
    lone.session.step(tokens=10)
    step(lone, model, optimizer, tokens=1)
    assert (lone.session.local_steps, lone.session.tokens) == (1, 1)


def test_a_few_skipped_steps_are_not_worth_a_word(
    lone: Lone, model: Model, optimizer: Optimizer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scaled_steps(lone, model, optimizer, lambda n: float("inf") if n in (0, 1, 2, 50, 90) else 1.0, 100) == 95
    assert "steps_skipped" not in capsys.readouterr().err


def test_a_learner_that_passes_no_tokens_answers_nothing_and_reports_it_once(
    lone: Lone, model: Model, optimizer: Optimizer, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(20):
        lone.call(number)
        step(lone, model, optimizer, tokens=0)
    assert lone.session.local_steps == 20
    assert not lone.answers()
    said = capsys.readouterr().err
    assert said.count("no_tokens") == 1
    assert "pass session.step(tokens=...) the number of tokens" in said
    step(lone, model, optimizer, tokens=7)
    (answer,) = lone.answers()
    assert answer.until.tokens - answer.since.tokens == 7


def test_now_and_then_a_step_without_tokens_is_nothing_to_speak_of(
    lone: Lone, model: Model, optimizer: Optimizer, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(40):
        step(lone, model, optimizer, tokens=number % 5)
    assert "no_tokens" not in capsys.readouterr().err
