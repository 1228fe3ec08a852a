"""Odd but honest training loops around a session: what changes after join() is refused by name, steps are counted."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.learner import model_check, optimizer_watch
from decoupled_diloco.learner.training_checks import LowPrecisionCheck
from lone_session import Lone, backward, train
from torch import Tensor, nn
from torch.nn.utils import parametrize

Optimizer = torch.optim.Optimizer


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.old = nn.Linear(4, 2)
        self.old.requires_grad_(requires_grad=False)


@pytest.fixture(autouse=True)
def _always_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model is looked at in each step, not once a second."""
    monkeypatch.setattr(model_check, "WHOLE_SECONDS", 0.0)
    monkeypatch.setattr(optimizer_watch, "WHOLE_SECONDS", 0.0)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def optimizer(model: Model) -> Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


@pytest.fixture
def lone(model: Model, optimizer: Optimizer) -> Iterator[Lone]:
    joined = Lone(model, optimizer)
    yield joined
    joined.session.close("stopped")


def step(lone: Lone, model: nn.Module, *optimizer_watch: Optimizer, tokens: int = 10) -> bool:
    train(model, *optimizer_watch)
    return lone.session.step(tokens=tokens)


# --- what changes after join() ---------------------------------------------------------------------------------------
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
    monkeypatch.setattr(model_check, "WHOLE_SECONDS", 1e9)
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


# --- what the optimizers hold ----------------------------------------------------------------------------------------
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
    monkeypatch.setattr(model_check, "WHOLE_SECONDS", 1e9)
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


# --- steps that are no steps -----------------------------------------------------------------------------------------
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


def test_a_learner_that_passes_no_tokens_answers_nothing_and_says_so_once(
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


# --- parameters that cannot move -------------------------------------------------------------------------------------
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


# --- a learning rate of one's own ------------------------------------------------------------------------------------
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
