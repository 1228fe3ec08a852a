"""Static tensors that training changes: noticed, packed, and kept by a joiner where they are its own."""

from __future__ import annotations

import pytest
import torch
from decoupled_diloco.common.errors import Malformed
from decoupled_diloco.common.fragments import balanced_plan
from decoupled_diloco.common.static_tensor_format import pack, replaced, sizes, unpack
from decoupled_diloco.learner.replica import Replica, layout_of
from decoupled_diloco.learner.static_tensor_changes import StaticChecksums, own_statistics
from states import LAYOUT, STATIC
from torch import nn

BF16, MASK, COUNT = STATIC[:30], STATIC[30:33], STATIC[33:]


@pytest.mark.parametrize("moved", [{}, {1: b"abc"}, {0: bytes(30), 2: bytes(8)}, {0: BF16, 1: MASK, 2: COUNT}])
def test_what_is_packed_is_unpacked_and_takes_the_place_of_what_was_there(moved: dict[int, bytes]) -> None:
    payload = pack(LAYOUT, moved)
    assert len(payload) in sizes(LAYOUT)
    assert {index: bytes(values) for index, values in unpack(LAYOUT, memoryview(payload)).items()} == moved
    expected = b"".join(moved.get(index, old) for index, old in enumerate((BF16, MASK, COUNT)))
    assert replaced(LAYOUT, STATIC, moved) == expected


@pytest.mark.parametrize("payload", [b"\x02ab", b"\x02abcd", b"\x08", b"\xff" + STATIC, b"\x07" + STATIC[:-1]])
def test_a_payload_that_is_not_as_long_as_what_it_names_is_malformed(payload: bytes) -> None:
    with pytest.raises(Malformed, match="size"):
        unpack(LAYOUT, memoryview(payload))


class Odd(nn.Module):
    """Static tensors of every odd kind, one of them large."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.frozen = nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("queue", torch.arange(300_000, dtype=torch.float32))
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("empty", torch.zeros(0))


@pytest.mark.parametrize("name", ["frozen", "queue", "turned", "flag"])
def test_a_tensor_that_training_changed_is_found_however_it_was_written(name: str) -> None:
    model = Odd()
    replica = Replica(model, balanced_plan(layout_of(model), 1))
    part = StaticChecksums(replica.plan.layout, replica.static_tensors())
    assert part.changes().count == 0
    tensor = getattr(model, name)
    if name == "queue":
        tensor.data[7_000:8_000] = tensor.data[7_000:8_000].roll(500)  # no version counter moves
    else:
        tensor.data.fill_(True)
    moved = part.changes()
    [(index, values)] = unpack(replica.plan.layout, memoryview(moved.payload)).items()
    assert replica.plan.layout.static[index].name == name
    assert bytes(values) == tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_a_joiner_keeps_the_statistics_of_layers_that_have_counted_batches_and_continue() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model(torch.randn(4, 2))
    model[2].eval()  # frozen: a constant of the model
    model[3].reset_running_stats()  # type: ignore[operator]
    replica = Replica(model, balanced_plan(layout_of(model), 1))
    own = own_statistics(replica)
    assert own == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    before = model[1].running_mean.clone()  # type: ignore[operator]
    replaced = replica.load_static(bytes(replica.plan.layout.static_bytes), own)
    assert replaced[0] == "2.running_mean"
    assert torch.equal(model[1].running_mean, before)  # type: ignore[arg-type]
    assert not model[2].running_mean.any()  # type: ignore[operator]
    assert not model[3].running_var.any()  # type: ignore[operator]
