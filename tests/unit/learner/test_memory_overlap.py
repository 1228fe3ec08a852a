"""Tensors that share memory: which of them a run can hold, and which are refused before anything is seeded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.learner.memory_overlap import first_overlap, overlaps_itself
from decoupled_diloco.learner.model_layout import inventory
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 6))


def transposed(model: Model) -> None:
    model.b = nn.Parameter(model.a.data.t())


def part(model: Model) -> None:
    model.b = nn.Parameter(model.a.data[1:3])


def flat(model: Model) -> None:
    model.b = nn.Parameter(model.a.data.view(24), requires_grad=False)


def other_dtype(model: Model) -> None:
    model.b = nn.Parameter(model.a.data.view(torch.bfloat16))


def buffer(model: Model) -> None:
    model.register_buffer("b", model.a.data[:, :2])


def from_numpy(model: Model) -> None:
    model.b = nn.Parameter(torch.from_numpy(model.a.data.numpy()).t())


@pytest.mark.parametrize("share", [transposed, part, flat, other_dtype, buffer, from_numpy])
def test_two_views_of_a_trained_tensor_are_refused_by_name(share: Callable[[Model], None]) -> None:
    model = Model()
    share(model)
    with pytest.raises(SettingError, match=r"^[ab] and [ab] share memory without being the same view .* \.clone\(\)"):
        inventory(model)


def columns(model: Model) -> None:
    whole = torch.randn(4, 6)
    model.a, model.b = nn.Parameter(whole[:, :2]), nn.Parameter(whole[:, 2:])


def slices(model: Model) -> None:
    whole = torch.randn(48)
    model.a, model.b = nn.Parameter(whole[:24].view(4, 6)), nn.Parameter(whole[24:])


def what_never_changes(model: Model) -> None:
    table = torch.randn(8)
    model.register_buffer("table", table)
    model.register_buffer("start", table[:4])


def scratch(model: Model) -> None:
    model.register_buffer("cache", model.a.data.t(), persistent=False)


def the_same_view(model: Model) -> None:
    model.b = nn.Parameter(model.a.data)


@pytest.mark.parametrize("share", [columns, slices, what_never_changes, scratch, the_same_view])
def test_what_has_its_own_elements_or_never_changes_may_share_a_storage(share: Callable[[Model], None]) -> None:
    model = Model()
    share(model)
    inventory(model)


def test_one_master_for_two_parameters_is_refused() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False).bfloat16() for name in "ab"})
    master = torch.zeros(2, 2)
    with pytest.raises(SettingError, match=r"the master of a\.weight and the master of b\.weight share memory"):
        inventory(model, masters={"a.weight": master, "b.weight": master})


@pytest.mark.parametrize("kind", ["parameter", "frozen", "buffer", "master"])
def test_a_tensor_whose_elements_are_the_same_memory_is_refused_by_name(kind: str) -> None:
    model = nn.Linear(2, 8, bias=False).bfloat16()
    wide, masters = torch.zeros(1).expand(8), {}
    if kind == "buffer":
        model.register_buffer("wide", wide)
    elif kind == "master":
        masters["weight"] = torch.zeros(1).expand(8, 2)
    else:
        model.wide = nn.Parameter(wide, requires_grad=kind == "parameter")
    with pytest.raises(SettingError, match=r"(wide|the master of weight) has elements that are the same memory"):
        inventory(model, masters=masters)


def places(tensor: Tensor) -> set[int]:
    index = torch.arange(tensor.untyped_storage().nbytes() // tensor.itemsize)
    return set(index.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).reshape(-1).tolist())


def test_a_vast_expanded_tensor_is_found_without_memory_for_its_elements() -> None:
    assert overlaps_itself(torch.zeros(1).expand(2**40))


VIEWS = st.tuples(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 7)), min_size=1, max_size=3), st.integers(0, 20))


@given(st.lists(VIEWS, min_size=1, max_size=4))
def test_overlaps_are_found_whatever_the_strides(views: list[tuple[list[tuple[int, int]], int]]) -> None:
    memory = torch.zeros(70)
    tensors = [memory.as_strided([s for s, _ in dims], [t for _, t in dims], offset) for dims, offset in views]
    sound = []
    for tensor in tensors:
        assert overlaps_itself(tensor) == (len(places(tensor)) < tensor.numel())
        if not overlaps_itself(tensor):
            sound.append(tensor)
    owned = [places(tensor) for tensor in sound]
    shared = any(owned[i] & owned[j] for i in range(len(owned)) for j in range(i))
    found = first_overlap([(str(i), tensor, True) for i, tensor in enumerate(sound)])
    assert (found is not None) == shared
    if found is not None:
        assert owned[int(found[0])] & owned[int(found[1])]
    assert first_overlap([(str(i), tensor, False) for i, tensor in enumerate(sound)]) is None
