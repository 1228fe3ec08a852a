"""Changes of the model after join() are found and named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checked_model import Model, Optimizer, step
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.learner import model_changes
from lone_session import Lone
from torch import nn
from torch.nn.utils import parametrize


def replace_a_weight(model: Model) -> None:
    model.body[0].weight = nn.Parameter(torch.zeros(4, 4))


def untie(model: Model) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


def parametrize_a_weight(model: Model) -> None:
    parametrize.register_parametrization(model.body[0], "weight", nn.Identity())


CHANGES: dict[str, tuple[Callable[[Model], Any], str]] = {
    "a layer": (lambda m: m.body.append(nn.Linear(1, 1)), r"body\.2\.weight was added to the model after join\(\)"),
    "a child": (lambda m: m.add_module("extra", nn.Linear(1, 1)), r"extra\.weight was added"),
    "a parameter": (lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(1))), "scale was added"),
    "a buffer": (lambda m: m.register_buffer("seen", torch.ones(1)), "seen was added"),
    "a parameter gone": (lambda m: setattr(m.body[0], "bias", None), r"body\.0\.bias was removed"),
    "a layer gone": (lambda m: m.body.pop(1), r"body\.1\.(weight|running_mean) was removed"),
    "a parameter replaced": (replace_a_weight, r"body\.0\.weight was replaced by another tensor"),
    "weights untied": (untie, r"head\.weight was replaced .*tied"),
    "weights newly tied": (lambda m: setattr(m.old, "weight", m.body[0].weight), r"old\.weight was replaced"),
    "a frozen one unfrozen": (lambda m: m.old.requires_grad_(requires_grad=True), r"old\.weight, frozen .*True"),
    "another dtype": (lambda m: m.bfloat16(), r"embed\.weight changed from \[5, 4\] float32 to \[5, 4\] bfloat16"),
    "another shape": (
        lambda m: setattr(m.body[0].bias, "data", torch.zeros(7)), r"body\.0\.bias changed from \[4\] .* to \[7\]"
    ),
    "a buffer that grows": (
        lambda m: setattr(m.body[1], "running_mean", torch.zeros(9)), r"running_mean changed from \[4\]"
    ),
    "a parametrization": (parametrize_a_weight, r"body\.0\.parametrizations\.weight\.original was added"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES.keys())
def test_a_change_of_the_model_after_join_is_refused_by_name(
    lone: Lone, model: Model, optimizer: Optimizer, change: Callable[[Model], Any], said: str
) -> None:
    step(lone, model, optimizer)
    change(model)
    with pytest.raises(SettingError, match=said) as refused:
        lone.session.step(tokens=10)
    assert "before join()" in str(refused.value)


def retie(model: Model) -> None:
    model.head.weight = model.embed.weight


def compile_a_part(model: Model) -> None:
    if isinstance(model.body, nn.Sequential):
        model.body = torch.compile(model.body, backend="eager")  # type: ignore[assignment]


HARMLESS: dict[str, Callable[[Model], Any]] = {
    "nothing": lambda _: None,
    "weights tied again": retie,
    "evaluation": lambda m: m.eval(),
    "a layer without parameters": lambda m: m.body.append(nn.ReLU()),
    "a scratch buffer": lambda m: m.register_buffer("scratch", torch.ones(2), persistent=False),
    "a buffer's values in a new tensor": lambda m: setattr(m.body[1], "running_mean", torch.ones(4)),
    "a part is compiled": compile_a_part,
    "a trained part is frozen": lambda m: m.body[0].requires_grad_(requires_grad=False),
    "all is frozen for a moment": lambda m: m.embed.requires_grad_(False).requires_grad_(True),
    "new storage": lambda m: m.double().float(),
    "own weights from a file": lambda m: m.load_state_dict(copy.deepcopy(m.state_dict())),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS.keys())
def test_what_trains_nothing_of_its_own_may_change(
    lone: Lone, model: Model, optimizer: Optimizer, change: Callable[[Model], Any]
) -> None:
    for _ in range(2):
        assert step(lone, model, optimizer)
        change(model)
    assert step(lone, model, optimizer)
    assert lone.session.local_steps == 3


def test_a_trained_part_may_be_frozen_and_unfrozen_at_will(lone: Lone, model: Model, optimizer: Optimizer) -> None:
    for trained in (False, True, False, True):
        model.body.requires_grad_(requires_grad=trained)
        assert step(lone, model, optimizer)


def test_a_change_is_found_within_some_steps_even_before_the_whole_model_is_looked_at(
    model: Model, optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_changes, "WHOLE_SECONDS", 1e9)
    lone = Lone(model, optimizer)
    replace_a_weight(model)

    def train_on() -> None:
        for _ in range(10):
            lone.session.step(tokens=1)

    with pytest.raises(SettingError, match=r"body\.0\.weight was replaced"):
        train_on()
    lone.session.close("failed")


def test_tied_weights_that_are_two_objects_must_stay_one_memory() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight.data = first.weight.data
    model = nn.Sequential(first, second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lone = Lone(model, optimizer)
    assert step(lone, model, optimizer)
    second.weight.data = second.weight.data.clone()
    with pytest.raises(SettingError, match=r"0\.weight stopped sharing its memory"):
        lone.session.step(tokens=1)
    lone.session.close("failed")


class Wrapped(nn.Module):
    """As DDP holds a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("wrap", [Wrapped, lambda m: torch.compile(m, backend="eager")], ids=["module.", "compiled"])
def test_a_change_inside_a_wrapper_is_refused(model: Model, optimizer: Optimizer, wrap: Callable[[Any], Any]) -> None:
    lone = Lone(wrap(model), optimizer)
    assert step(lone, model, optimizer)
    model.body.append(nn.Linear(1, 1))
    with pytest.raises(SettingError, match=r"body\.2\.weight was added to the model"):
        lone.session.step(tokens=10)
    lone.session.close("failed")
