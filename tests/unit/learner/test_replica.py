"""What a model looks like from outside, and how fragments get out of it and into it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from decoupled_diloco.common.errors import Malformed, SettingError
from decoupled_diloco.common.fragments import Layout, Plan, TensorSpec, balanced_plan
from decoupled_diloco.learner.model_layout import inventory, live_buffers
from decoupled_diloco.learner.replica import Replica, anchor, close_holes, layout_of
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


class Tied(nn.Module):
    """Embedding and head are one tensor; there is a frozen part, and buffers of three sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.body = nn.Linear(8, 8)
        self.old = nn.Linear(8, 3)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.old.requires_grad_(requires_grad=False)
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.register_buffer("seen", torch.tensor([True, False]))


class Odd(nn.Module):
    """No elements, no dimensions, one element, a prime number of elements beyond a quantizer block."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 8, dtype=dtype))
        self.scalar = nn.Parameter(torch.tensor(0.5, dtype=dtype))
        self.one = nn.Parameter(torch.full((1,), 0.25, dtype=dtype))
        self.prime = nn.Parameter(torch.randn(131).to(dtype))


def specs(layout: Layout) -> dict[str, TensorSpec]:
    return {t.name: t for t in layout.tensors}


def replica_of(model: nn.Module, fragments: int = 1, masters: dict[str, Tensor] | None = None) -> Replica:
    return Replica(model, balanced_plan(layout_of(model, masters=masters), fragments), masters)


def captured(replica: Replica, fragment: int = 0) -> Tensor:
    part = replica.plan.fragments[fragment]
    out = torch.full((part.length,), 7.0)
    replica.capture(part, out)
    close_holes(part, out)
    return out


# --- layout ----------------------------------------------------------------------------------------------------------
def test_tied_weights_are_one_tensor_under_its_first_name_and_merged_by_the_mean() -> None:
    tensors = specs(layout_of(Tied()))
    assert tensors["embed.weight"].tied == ("head.weight",)
    assert "head.weight" not in tensors
    assert tensors["embed.weight"].merge == "mean"
    assert tensors["body.weight"].merge == "rda"


def test_two_parameters_that_share_memory_are_tied_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight.data = model[0].weight.data
    assert [(t.name, t.tied) for t in layout_of(model).tensors] == [("0.weight", ("1.weight",))]


def test_a_head_tied_to_an_embedding_that_comes_later_is_merged_by_the_mean() -> None:
    model = nn.ModuleDict({"head": nn.Linear(8, 5, bias=False), "tokens": nn.Embedding(5, 8)})
    model["head"].weight = model["tokens"].weight
    assert [(t.name, t.merge) for t in layout_of(model).tensors] == [("head.weight", "mean")]


def test_the_merge_kind_can_be_chosen_by_name() -> None:
    tensors = specs(layout_of(Tied(), merge={"embed.weight": "rda", "body.bias": "mean"}))
    assert tensors["embed.weight"].merge == "rda"
    assert tensors["body.bias"].merge == "mean"
    with pytest.raises(SettingError, match="'nothing', which the model does not have"):
        layout_of(Tied(), merge={"nothing": "mean"})


def test_frozen_parameters_and_persistent_buffers_are_static_and_others_stay_out() -> None:
    layout = layout_of(Tied())
    kinds = {t.name: t.kind for t in layout.tensors}
    assert kinds["old.weight"] == kinds["old.bias"] == "frozen"
    assert kinds["norm.running_mean"] == kinds["seen"] == kinds["norm.num_batches_tracked"] == "buffer"
    assert "scratch" not in kinds
    assert layout.static_bytes == 4 * (24 + 3 + 8 + 8) + 8 + 2
    assert live_buffers(inventory(Tied())) == ["norm.running_mean", "norm.running_var"]


def test_other_frozen_layers_give_another_fingerprint() -> None:
    one, other = Tied(), Tied()
    other.body.requires_grad_(requires_grad=False)
    assert layout_of(one).fingerprint != layout_of(other).fingerprint


def test_a_compiled_model_has_the_same_fingerprint() -> None:
    model = Tied()
    assert layout_of(torch.compile(model, backend="eager")).fingerprint == layout_of(model).fingerprint  # type: ignore[arg-type]
    model.body = torch.compile(model.body, backend="eager")  # type: ignore[assignment]
    assert layout_of(model).fingerprint == layout_of(Tied()).fingerprint


def test_a_model_in_distributed_data_parallel_has_the_same_fingerprint() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        try:
            wrapped = nn.parallel.DistributedDataParallel(model)
            assert layout_of(wrapped).fingerprint == layout_of(model).fingerprint
            assert torch.equal(captured(replica_of(wrapped)), captured(replica_of(model)))
        finally:
            dist.destroy_process_group()


def test_a_trainable_parameter_that_no_optimizer_steps_is_named() -> None:
    model = Tied()
    optimizer = torch.optim.SGD([model.embed.weight, model.norm.weight, model.norm.bias, model.body.weight], lr=1)
    with pytest.raises(SettingError, match=r"body\.bias is trainable, but no optimizer group holds it"):
        layout_of(model, optimizer)
    second = torch.optim.SGD([model.body.bias], lr=1)
    layout_of(model, [optimizer, second])


def test_an_optimizer_that_holds_copies_is_refused() -> None:
    model = nn.Linear(3, 3)
    copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
    with pytest.raises(SettingError, match="weight is trainable"):
        layout_of(model, torch.optim.SGD(copies, lr=1))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.Linear(2, 2).double(), "weight is trainable and float64"),
        (lambda: nn.Linear(2, 2, device="meta"), "weight has no values yet"),
        (lambda: nn.LazyLinear(2), "weight has no values yet"),
        (lambda: nn.Linear(2, 2).requires_grad_(requires_grad=False), "no trainable parameter"),
    ],
    ids=["float64", "on the meta device", "lazy", "all frozen"],
)
def test_a_model_that_cannot_be_shared_is_refused_in_words(make: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        layout_of(make())


# --- fragments -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_odd_shapes_survive_the_way_out_and_in(dtype: torch.dtype) -> None:
    source, target = Odd(dtype), Odd(dtype)
    vector = captured(replica_of(source))
    replica_of(target).overwrite(replica_of(target).plan.fragments[0], vector)
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter, source.get_parameter(name))
        assert parameter.dtype == dtype
    assert target.none.shape == (0, 8)
    assert target.scalar.shape == ()


def test_holes_between_tensors_are_zero_whatever_the_buffer_held() -> None:
    replica = replica_of(Odd())
    vector, fragment = captured(replica), replica.plan.fragments[0]
    held = torch.zeros(fragment.length, dtype=torch.bool)
    for span in fragment.spans:
        held[span.offset : span.stop] = True
    assert not vector[~held].any()
    assert torch.equal(vector, replica.vector(fragment))


def test_a_capture_does_not_change_when_the_model_trains_on() -> None:
    model = Odd()
    before = captured(replica := replica_of(model))
    kept = before.clone()
    with torch.no_grad():
        model.prime.add_(1)
    assert torch.equal(before, kept)
    assert not torch.equal(captured(replica), kept)


def test_tied_weights_stay_tied_when_they_are_written() -> None:
    model = Tied()
    replica = replica_of(model, fragments=2)
    for fragment in replica.plan.fragments:
        replica.overwrite(fragment, torch.full((fragment.length,), 0.5))
    assert model.embed.weight is model.head.weight
    assert (model.embed.weight == 0.5).all()
    assert (model.old.weight != 0.5).any()


def test_a_transposed_parameter_is_written_in_its_own_order() -> None:
    model = nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    plain = nn.Conv2d(3, 4, 3, bias=False)
    replica = replica_of(model)
    replica.overwrite(replica.plan.fragments[0], captured(replica_of(plain)))
    assert torch.equal(model.weight, plain.weight)
    assert torch.equal(captured(replica), captured(replica_of(plain)))


def test_the_anchor_of_a_bf16_model_is_what_the_model_holds() -> None:
    model = Odd(torch.bfloat16)
    replica = replica_of(model)
    fragment = replica.plan.fragments[0]
    public = torch.randn(fragment.length)
    close_holes(fragment, public)
    replica.overwrite(fragment, public)
    assert torch.equal(anchor(fragment, public), captured(replica))
    assert not torch.equal(anchor(fragment, public), public)


def test_a_rebase_keeps_what_was_done_since_the_capture() -> None:
    model = Odd()
    replica = replica_of(model)
    fragment, before = replica.plan.fragments[0], captured(replica_of(model))
    with torch.no_grad():
        model.prime.add_(0.25)
    public = torch.randn(fragment.length)
    replica.rebase(fragment, public, before)
    span = next(s for s in fragment.spans if s.tensor.name == "prime")
    assert torch.allclose(model.prime.detach(), public[span.offset : span.stop] + 0.25, atol=1e-6)


def test_mixing_keeps_a_share_of_the_own_parameters() -> None:
    model = Odd()
    replica = replica_of(model)
    replica.mix(replica.plan.fragments[0], torch.full((replica.plan.fragments[0].length,), 1.0), alpha=0.25)
    assert model.scalar.item() == pytest.approx(0.25 * 0.5 + 0.75)


def test_masters_hold_the_state_and_the_parameters_follow() -> None:
    model = nn.Linear(4, 4).bfloat16()
    masters = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(masters.values(), lr=1)
    layout = layout_of(model, optimizer, masters)
    assert {t.dtype for t in layout.tensors} == {"float32"}
    replica = replica_of(model, masters=masters)
    public = torch.full((replica.plan.fragments[0].length,), 1.0 + 2**-12)
    replica.overwrite(replica.plan.fragments[0], public)
    assert (masters["weight"] == 1.0 + 2**-12).all()
    assert (model.weight == 1.0).all()
    assert captured(replica).max() == 1.0 + 2**-12


@pytest.mark.parametrize("wrong", [torch.zeros(4, 4, dtype=torch.bfloat16), torch.zeros(4, 3)], ids=["dtype", "shape"])
def test_a_master_that_does_not_fit_is_refused(wrong: Tensor) -> None:
    with pytest.raises(SettingError, match=r"master of weight must be float32 of shape \[4, 4\]"):
        layout_of(nn.Linear(4, 4).bfloat16(), masters={"weight": wrong})


# --- what never changes, and the whole model -------------------------------------------------------------------------
def test_static_values_travel_bit_for_bit() -> None:
    source, target = Tied(), Tied()
    with torch.no_grad():
        source.old.weight[0, 0] = float("nan")
        source.norm.num_batches_tracked.fill_(2**40)  # type: ignore[union-attr]
        source.seen.fill_(True)  # type: ignore[operator]
    content = replica_of(source).static_bytes()
    replaced = replica_of(target).load_static(content)
    assert {"old.weight", "norm.num_batches_tracked", "seen"} <= set(replaced)
    assert replica_of(target).static_bytes() == content
    source.old.weight.data[0, 0] = target.old.weight.data[0, 0] = 0.0  # nan equals nothing
    assert replica_of(target).load_static(replica_of(source).static_bytes()) == []
    assert target.norm.num_batches_tracked == 2**40
    assert not target.old.weight.requires_grad


def test_static_values_of_a_wrong_size_change_nothing() -> None:
    replica = replica_of(Tied())
    before = replica.static_bytes()
    with pytest.raises(Malformed, match="size"):
        replica.load_static(before[:-1])
    assert replica.static_bytes() == before


def test_showing_the_global_model_and_putting_the_own_back_leaves_no_trace() -> None:
    model = Tied()
    with torch.no_grad():
        model.body.weight[0, 0] = -0.0
    replica: Replica = replica_of(model, fragments=2)
    plan: Plan = replica.plan
    before = [p.detach().clone() for p in model.parameters()]
    kept = replica.keep_parameters()
    replica.show([torch.ones(f.length) for f in plan.fragments])
    assert (model.body.weight == 1).all()
    replica.put_back(kept)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.view(torch.int32), old.view(torch.int32))


def test_a_saved_model_names_what_is_tied(tmp_path: Path) -> None:
    model = Tied()
    replica_of(model).save(tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["head.weight"] == "embed.weight"
        assert torch.equal(file.get_tensor("embed.weight"), model.embed.weight)
        assert "head.weight" not in file.keys()  # noqa: SIM118 - safe_open is no mapping


# --- names -----------------------------------------------------------------------------------------------------------
class Named(nn.Module):
    """Its own modules are called what wrappers call the module that they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 3)
        self._orig_mod = nn.Linear(3, 2)
        self.a = nn.Sequential()
        self.a.module = nn.Sequential(nn.BatchNorm1d(2))
        self.parts = nn.ModuleDict({"module": nn.Linear(2, 2), "_fsdp_wrapped_module": nn.Linear(1, 1)})
        self.weight = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return self._orig_mod(self.module(x))  # type: ignore[no-any-return]


@contextmanager
def process_group() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def test_names_are_those_of_the_state_dict_whatever_the_model_calls_its_modules() -> None:
    for model in (Named(), nn.Sequential(Named()), nn.ModuleDict({"module": Named()})):
        assert {name for spec in layout_of(model).tensors for name in (spec.name, *spec.tied)} == set(
            model.state_dict()
        )


def test_wrappers_leave_names_and_fingerprint_as_they_are() -> None:
    bare = layout_of(Named())
    parallel = nn.parallel.DistributedDataParallel
    with process_group():
        for wrapped in (
            compiled(Named()), nn.DataParallel(Named()), parallel(Named()), compiled(parallel(Named())),
            parallel(compiled(Named())), checkpoint_wrapper(Named()), parallel(checkpoint_wrapper(Named())),
        ):  # fmt: skip
            assert layout_of(wrapped) == bare
        inner = Named()
        inner.a.module = parallel(compiled(inner.a.get_submodule("module")))
        assert layout_of(inner) == bare


def test_the_fingerprint_of_an_ordinary_model_stays_what_it_was() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.extra = model[0]
    assert layout_of(model).fingerprint == "b665bbb62d3ceb95bcc3307201813ee15f2d7f4a519d44473914fd9f3a90119b"


def test_a_tensor_may_be_named_as_the_model_says_it_or_as_the_run_does() -> None:
    model = compiled(Named())
    for name in ("_orig_mod.module.weight", "module.weight"):
        (named,) = [spec for spec in layout_of(model, merge={name: "mean"}).tensors if spec.merge == "mean"]
        assert named.name == "module.weight"
    with pytest.raises(SettingError, match="which the model does not have"):
        layout_of(model, merge={"_orig_mod.module.nothing": "mean"})
