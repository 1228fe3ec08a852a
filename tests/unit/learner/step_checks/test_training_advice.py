"""Parameters that cannot move, and a learning rate of the learner's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from checked_model import step
from decoupled_diloco.learner.training_checks import LowPrecisionCheck
from lone_session import Lone
from torch import nn


class Halves(nn.Module):
    """One bf16 parameter that a small step cannot move, and one that it can."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(40, dtype=torch.bfloat16))
        self.shift = nn.Parameter(torch.zeros(40, dtype=torch.bfloat16))


def still_after(
    steps: int, model: Halves, lr: float, capsys: pytest.CaptureFixture[str], *, warmup: int = 1, by: float = 0.5
) -> str:
    """What is said of standing still in so many steps, the first of them with a rising rate."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    lone = Lone(model, optimizer)
    for number in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (number + 1) / warmup)
        step(lone, model, optimizer)
        optimizer.zero_grad()
        if number % 8 == 7:
            lone.merge(by)
    lone.session.close("stopped")
    return "\n".join(line for line in capsys.readouterr().err.splitlines() if "parameters_stand_still" in line)


def test_16_bit_parameters_that_never_move_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    said = still_after(80, Halves(), 1e-4, capsys)
    assert said.count("\n") == 0
    assert "1 of 2 parameters in 16 bits, first gain (bfloat16), have not moved" in said
    assert "join(masters=...)" in said


@pytest.mark.parametrize("lr", [0.5, 0.0])
def test_16_bit_parameters_that_move_or_are_not_to_are_not_named(lr: float, capsys: pytest.CaptureFixture[str]) -> None:
    assert not still_after(80, Halves(), lr, capsys)


def test_a_rate_that_still_rises_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert not still_after(150, Halves(), 0.004, capsys, warmup=100, by=0.0), "its last steps are large enough"
    assert "first gain" in still_after(150, Halves(), 1e-4, capsys, warmup=50)


def test_a_parameter_that_gets_gradients_late_and_moves_then_is_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = Halves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    lone = Lone(model, optimizer)
    for number in range(LowPrecisionCheck.STEPS + 8):
        model.shift.grad = torch.ones_like(model.shift)
        model.gain.grad = torch.ones_like(model.gain) if number > LowPrecisionCheck.STEPS else None
        optimizer.step()
        lone.session.step(tokens=10)
    assert model.gain[0] != 1
    lone.session.close("stopped")
    assert "parameters_stand_still" not in capsys.readouterr().err


def test_what_gets_no_gradients_is_looked_at_for_a_while_only() -> None:
    model = Halves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    check = LowPrecisionCheck([("gain", model.gain, 0)])
    assert [check.stepped(0.5) for _ in range(LowPrecisionCheck.STEPS)][-1]
    for _ in range(LowPrecisionCheck.LOOKS):
        assert not check.over
        assert not check.verdict(optimizer)
    assert check.over
    assert not check.stepped(0.5)


def test_masters_and_float32_are_not_watched_for_standing_still(capsys: pytest.CaptureFixture[str]) -> None:
    model = Halves()
    masters = {name: p.detach().clone().float().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(masters.values(), lr=1e-6)
    lone = Lone(model, optimizer, masters)
    for _ in range(50):
        for name, master in masters.items():
            master.grad = torch.ones_like(master)
            optimizer.step()
            model.get_parameter(name).data.copy_(master)
        lone.session.step(tokens=10)
    lone.session.close("stopped")
    assert lone.session.local_steps == 50
    assert "parameters_stand_still" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("t", "asks", "rate", "said"),
    [
        (60, False, lambda n: 1 - n / 100, 1),
        (0, False, lambda n: 1 - n / 100, 0),
        (60, True, lambda n: 1 - n / 100, 0),
        (60, False, lambda n: min(1.0, n / 20), 0),
        (60, False, lambda n: 0.1 ** (n // 20), 0),
        (60, False, lambda n: min(1.0, n / 20) * (1 - n / 100), 1),
    ],
    ids=["falls", "falls from the start on", "follows the run", "warms up", "falls in a few stairs", "both"],
)
def test_a_late_joiner_whose_schedule_is_its_own_is_warned_once(
    t: int, asks: bool, rate: Callable[[int], float], said: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    lone = Lone(model, optimizer, t=t)
    for number in range(60):
        if asks:
            assert lone.session.progress.fraction == 0
        optimizer.param_groups[0]["lr"] = rate(number)
        step(lone, model, optimizer)
    lone.session.close("stopped")
    heard = capsys.readouterr().err
    assert heard.count("rate_is_local") == said
    assert ("session.progress.fraction" in heard) == bool(said)
