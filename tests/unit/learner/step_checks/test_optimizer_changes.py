"""What the optimizers hold is checked against the model."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checked_model import Model, Optimizer, step
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.learner import model_changes, optimizer_watch
from lone_session import Lone, backward, train
from torch import Tensor, nn


def test_an_optimizer_that_steps_more_than_the_model_is_refused_at_join() -> None:
    model = nn.Linear(2, 2)
    temperature = nn.Parameter(torch.ones(1))
    groups: list[dict[str, Any]] = [{"params": model.parameters()}, {"params": [temperature]}]
    with pytest.raises(SettingError, match=r"group 1 of Adam holds a tensor of shape \[1\], which is not part of"):
        Lone(model, torch.optim.Adam(groups))
    named: list[tuple[str, Tensor]] = [("temperature", temperature), *model.named_parameters()]
    with pytest.raises(SettingError, match="group 0 of Adam holds temperature, which is not part of the model"):
        Lone(model, torch.optim.Adam(named))
    second = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1)
    with pytest.raises(SettingError, match=r"group 0 of SGD holds a tensor of shape \[1, 1\]"):
        Lone(model, [torch.optim.Adam(model.parameters()), second])


def test_a_buffer_that_would_be_trained_is_refused_at_join() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("gain", torch.ones(1, requires_grad=True))
    with pytest.raises(SettingError, match="would train gain, which is a buffer"):
        Lone(model, torch.optim.SGD([*model.parameters(), model.get_buffer("gain")], lr=1))


def test_a_parameter_and_its_master_in_one_optimizer_are_refused_at_join() -> None:
    model = nn.Linear(2, 2).bfloat16()
    masters = {name: p.detach().clone().float() for name, p in model.named_parameters()}
    Lone(model, torch.optim.SGD(masters.values(), lr=1), masters).session.close("stopped")
    with pytest.raises(SettingError, match="weight itself, whose master is to be stepped"):
        Lone(model, torch.optim.SGD([*masters.values(), model.weight], lr=1), masters)


def test_frozen_parameters_may_lie_in_the_groups_until_they_are_trained(model: Model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lone = Lone(model, optimizer)
    assert step(lone, model, optimizer)
    model.old.requires_grad_(requires_grad=True)
    with pytest.raises(SettingError, match=r"old\.weight"):
        step(lone, model, optimizer)
    lone.session.close("failed")


def add_group(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    optimizer.add_param_group({"params": [parameter]})


def add_to_group(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    optimizer.param_groups[0]["params"].append(parameter)


def put_in_place(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    optimizer.param_groups[0]["params"][1] = parameter


@pytest.mark.parametrize("change", [add_group, add_to_group, put_in_place])
def test_a_strange_tensor_in_the_groups_after_join_is_refused(
    lone: Lone, model: Model, optimizer: Optimizer, change: Callable[[Optimizer, nn.Parameter], None]
) -> None:
    step(lone, model, optimizer)
    change(optimizer, nn.Parameter(torch.ones(3)))
    with pytest.raises(SettingError, match=r"of AdamW holds a tensor of shape \[3\], which is not part of the model"):
        lone.session.step(tokens=10)


def test_a_new_layer_in_a_new_group_is_refused_by_its_name(
    model: Model, optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_changes, "WHOLE_SECONDS", 1e9)
    lone = Lone(model, optimizer)
    model.body.append(layer := nn.Linear(1, 1))
    optimizer.add_param_group({"params": list(layer.parameters())})
    with pytest.raises(SettingError, match=r"body\.2\.weight was added to the model"):
        lone.session.step(tokens=10)
    lone.session.close("failed")


def test_a_state_that_is_loaded_into_an_optimizer_changes_nothing(
    lone: Lone, model: Model, optimizer: Optimizer
) -> None:
    step(lone, model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert step(lone, model, optimizer)
    assert lone.session.local_steps == 2


def test_an_optimizer_made_anew_is_taken_over_with_its_moments(lone: Lone, model: Model, optimizer: Optimizer) -> None:
    step(lone, model, optimizer)
    anew = torch.optim.Adam(model.body.parameters(), lr=0.1)
    assert step(lone, model, anew)
    assert lone.session.local_steps == 2
    assert lone.session._checks.optimizers.all == [optimizer, anew]
    add_group(anew, nn.Parameter(torch.ones(3)))
    with pytest.raises(SettingError, match="group 1 of Adam holds"):
        lone.session.step(tokens=10)


def test_an_optimizer_made_anew_for_more_than_the_model_is_refused(lone: Lone, model: Model) -> None:
    anew = torch.optim.Adam([*model.body.parameters(), nn.Parameter(torch.ones(3))])
    with pytest.raises(SettingError, match="group 0 of Adam holds"):
        step(lone, model, anew)


def test_optimizers_of_other_models_are_nobodys_business(lone: Lone, model: Model, optimizer: Optimizer) -> None:
    other = nn.Linear(3, 3)
    stranger = torch.optim.SGD(other.parameters(), lr=0.1)
    train(other, stranger)
    backward(model)
    lone.session.step(tokens=10)
    assert lone.session.local_steps == 0
    assert lone.session._checks.optimizers.all == [optimizer]
    stranger.add_param_group({"params": [model.body[0].weight]})
    train(other, stranger)
    with pytest.raises(SettingError, match="of SGD holds"):
        lone.session.step(tokens=10)


class Wrapper(Optimizer):
    """As libraries wrap one: a torch optimizer by its type alone, with the groups of the one inside."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Plain(Optimizer):
    """An optimizer of a user's own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data -= group["lr"] * parameter.grad


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "without state": lambda p: torch.optim.SGD(p, lr=0.1),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "one tensor after another": lambda p: torch.optim.RMSprop(p, foreach=False),
    "in a wrapper": lambda p: Wrapper(torch.optim.AdamW(p)),
    "of a user's own": Plain,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_steps_of_every_kind_of_optimizer_are_counted(make: Callable[[Any], Optimizer]) -> None:
    model = nn.Linear(2, 2)
    optimizer = make(list(model.parameters()))
    lone = Lone(model, optimizer)
    for _ in range(3):
        step(lone, model, optimizer)
        backward(model)
        lone.session.step(tokens=10)
    lone.session.close("stopped")
    assert (lone.session.local_steps, lone.session.tokens) == (3, 50)


def test_steps_with_a_closure_and_steps_in_the_backward_pass_are_counted() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
        torch.autograd.backward(loss)
        return loss

    lone = Lone(model, optimizer)
    optimizer.step(closure)  # type: ignore[no-untyped-call]
    lone.session.step(tokens=10)
    assert lone.session.local_steps == 1
    lone.session.close("stopped")


def test_two_optimizers_that_both_step_make_one_inner_step() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    both = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[1].parameters())]
    lone = Lone(model, both)
    for _ in range(3):
        step(lone, model, *both)
    for _ in range(2):
        step(lone, model, both[0])
    assert lone.session.local_steps == 5
    lone.session.close("stopped")


def test_a_model_trained_by_hand_is_counted_when_it_moves() -> None:
    model = nn.Linear(2, 2)
    lone = Lone(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for moved in (True, False, True, True, False):
        if moved:
            model.weight.data += 1
        lone.merge()
        lone.session.step(tokens=10)
    assert lone.session.local_steps == 3
    lone.session.close("stopped")


def test_a_step_by_hand_is_counted_however_few_values_it_moves() -> None:
    model = nn.Embedding(500, 2)
    lone = Lone(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for row in (7, None, 7, 8, None):
        if row is not None:
            with torch.no_grad():
                model.weight[row] += 1
        lone.show_global_weights()
        lone.merge()
        lone.session.step(tokens=10)
    assert lone.session.local_steps == 3
    lone.session.close("stopped")


def test_steps_are_counted_where_the_hooks_of_torch_are_taken_away_in_mid_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As torch.compile does in older versions of torch: the methods of all optimizers are unwrapped."""

    class Own(torch.optim.SGD):
        pass

    model = nn.Linear(2, 2)
    optimizer = Own(model.parameters(), lr=0.1)
    lone = Lone(model, optimizer)
    for number in range(40):
        if number == 10:
            hooked: Any = Own.step
            Own.step = hooked.__wrapped__  # type: ignore[method-assign]
        step(lone, model, optimizer)
        lone.merge()
    lone.session.close("stopped")
    assert lone.session.local_steps >= 39
    assert lone.session.tokens == 400
    assert "without_step" not in capsys.readouterr().err


def test_an_optimizer_of_another_kind_will_do_and_what_is_none_is_refused() -> None:
    model = nn.Linear(2, 2)

    class Other:
        param_groups = ({"params": list(model.parameters()), "lr": 0.1},)

    for optimizer in (Other(), [Other()]):
        lone: Any = Lone(model, optimizer, t=5)  # type: ignore[arg-type]
        with torch.no_grad():
            model.bias.add_(1)
        lone.session.step(tokens=10)
        assert lone.session.local_steps == 1
        assert lone.session.ramp < 1
        lone.session.close("stopped")
    for wrong in (model, model.parameters(), 3):
        with pytest.raises(SettingError, match="optimizer must be a torch optimizer, several of them, or None"):
            Lone(model, wrong)  # type: ignore[arg-type]


def test_without_an_optimizer_every_call_is_a_step() -> None:
    model = nn.Linear(2, 2)
    lone = Lone(model, None)
    for _ in range(3):
        lone.session.step(tokens=10)
    assert lone.session.local_steps == 3
    lone.session.close("stopped")


def test_sessions_in_one_process_count_their_own_steps_and_leave_nothing_behind() -> None:
    models = [nn.Linear(2, 2) for _ in range(3)]
    made = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    lones = [Lone(model, optimizer) for model, optimizer in zip(models, made, strict=True)]
    for lone, model, optimizer in zip(lones, models, made, strict=True):
        step(lone, model, optimizer)
    for lone, model in zip(lones, models, strict=True):
        backward(model)
        lone.session.step(tokens=10)
        assert lone.session.local_steps == 1
    lones[0].session.close("stopped")
    gone = weakref.ref(models[2])
    del lone, model, optimizer, lones[2], models[2], made[2]  # dropped without a close
    gc.collect()
    assert gone() is None
    assert [ref() for ref in optimizer_watch._watches._refs] == [lones[1].session._checks.optimizers]
    lones[1].session.close("stopped")
    assert not optimizer_watch._watches._refs
