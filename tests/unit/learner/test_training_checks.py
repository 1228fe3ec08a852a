"""The two watches of the training thread: a loss that is not finite, and an adoption that is undone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.learner.training_checks import AdoptionCheck, LossWatch, heal_moments
from torch import Tensor


@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.tensor(float("nan")), torch.tensor([-torch.inf])])
def test_a_loss_that_is_not_finite_is_noticed_and_the_last_finite_one_kept(value: float | Tensor) -> None:
    watch = LossWatch()
    assert watch.take(2.5)
    assert not watch.take(value)
    assert watch.value == 2.5
    assert watch.take(torch.tensor(1.5, requires_grad=True, dtype=torch.bfloat16))
    assert watch.value == 1.5
    assert watch.take(None)


@pytest.mark.parametrize("loss", [torch.zeros(3), torch.tensor(1j), 1j, "much", [1.0]], ids=repr)
def test_a_loss_that_is_no_single_number_is_refused(loss: Any) -> None:
    with pytest.raises(SettingError, match="one number"):
        LossWatch().take(loss)


def verdict(before: Tensor, adopted: Tensor, *then: Tensor) -> bool | None:
    """What the check says when the tensor goes through these values, one after each inner step."""
    tensor = before.clone()
    check = AdoptionCheck(tensor)
    tensor.copy_(adopted)
    check.adopted()
    said: bool | None = None
    for values in then:
        assert said is None
        tensor.copy_(values)
        said = check.stepped()
    return said


def test_an_adoption_that_stays_is_accepted() -> None:
    old, new = torch.zeros(3000), torch.ones(3000)
    assert verdict(old, new, new + 0.01, new + 0.02) is True


def test_an_adoption_that_the_optimizer_undoes_is_noticed() -> None:
    old, new = torch.zeros(3000), torch.ones(3000)
    assert verdict(old, new, old + 0.01, old + 0.02) is False


def test_an_adoption_that_moved_no_further_than_a_step_tells_nothing() -> None:
    old, new = torch.ones(8), torch.zeros(8)
    assert verdict(old, new, old, old + 1) is True  # the step goes where the adoption came from
    assert verdict(new, new, new, new) is True
    scalar = torch.tensor(1.0)
    assert verdict(scalar, scalar + 1, scalar + 1, scalar + 1) is True


def test_the_sample_of_a_tensor_of_many_millions_ends_where_the_tensor_ends() -> None:
    AdoptionCheck(torch.zeros(1).expand(2**25 + 4))  # its last index is no f32 number


def test_moments_that_are_not_finite_are_cleared_and_others_kept() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.state[parameters[0]]["exp_avg"][1] = float("nan")
    assert heal_moments(optimizer) == 1
    assert not optimizer.state[parameters[0]]["exp_avg"].any()
    assert optimizer.state[parameters[1]]["exp_avg"].all()
    assert heal_moments([optimizer]) == 0
