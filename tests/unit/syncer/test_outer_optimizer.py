"""The outer step, alone and together with codec and merge, as a round uses them one after the other."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from decoupled_diloco.common import codec as codec_module
from decoupled_diloco.common.codec import apply_step, decode_delta, digest, encode_delta, encode_step
from decoupled_diloco.common.fragments import Layout, TensorSpec, balanced_plan
from decoupled_diloco.syncer.aggregate import merge
from decoupled_diloco.syncer.outer_optimizer import outer_step
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import examples
from torch import Tensor

WEIGHT, BIAS = (TensorSpec(name=str(shape), shape=shape, dtype="float32") for shape in ((127, 131), (131,)))
FRAGMENT = balanced_plan(Layout((WEIGHT, BIAS)), 1).fragments[0]


def noise(seed: int, size: float = 1.0) -> Tensor:
    """A flat vector of the fragment, zero between its tensors."""
    vector, generator = torch.zeros(FRAGMENT.length), torch.Generator().manual_seed(seed)
    for span in FRAGMENT.spans:
        vector[span.offset : span.stop] = torch.randn(span.tensor.numel, generator=generator) * size
    return vector


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("lr", "mu"), [(1.0, 0.0), (0.7, 0.9), (0.4, 0.5)])
def test_many_rounds_of_nesterov_follow_the_formula(
    lr: float, mu: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_module, "SLAB", 5_000)  # several pieces, the last one smaller
    parameters, momentum = noise(0), torch.zeros(FRAGMENT.length) if mu else None
    deltas = [noise(1 + i, 0.01) for i in range(40)]
    want, velocity = reference.nesterov(parameters.numpy(), [d.numpy() for d in deltas], lr, mu)
    for delta in deltas:
        parameters = outer_step(parameters, delta.to(dtype), momentum, lr, mu)
    assert parameters.dtype == torch.float32
    assert np.abs(parameters.numpy() - want).max() < 2e-5
    if momentum is not None:
        assert np.abs(momentum.numpy() - velocity).max() < 1e-6


def test_a_step_goes_down_the_outer_gradient() -> None:
    target = outer_step(torch.zeros(128), torch.ones(128), None, 0.5, 0.0)
    assert target.tolist() == [-0.5] * 128


def test_the_first_step_with_momentum_is_already_longer_by_it() -> None:
    momentum = torch.zeros(128)
    target = outer_step(torch.zeros(128), torch.ones(128), momentum, 1.0, 0.9)
    assert torch.allclose(target, torch.full((128,), -1.9))
    assert momentum.tolist() == [1.0] * 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_momentum_is_updated_in_place_and_nothing_else_is(dtype: torch.dtype) -> None:
    start, delta, momentum = noise(1), noise(2).to(dtype), noise(3)
    place, copies = momentum.data_ptr(), (start.clone(), delta.clone(), momentum.clone())
    outer_step(start, delta, momentum, 0.7, 0.9)
    assert torch.equal(start, copies[0])
    assert torch.equal(delta, copies[1])
    assert momentum.data_ptr() == place
    assert torch.allclose(momentum, (copies[2] * 0.9 + copies[1]).float(), rtol=1e-6, atol=1e-6)


def test_momentum_without_a_vector_to_keep_it_is_a_mistake_that_is_named() -> None:
    with pytest.raises(ValueError, match=r"momentum 0\.9 needs a momentum vector"):
        outer_step(torch.zeros(128), torch.zeros(128), None, 1.0, 0.9)


def test_an_empty_fragment_takes_a_step_of_nothing() -> None:
    assert len(outer_step(torch.zeros(0), torch.zeros(0), torch.zeros(0), 1.0, 0.9)) == 0


# --- one learner, lr 1, no momentum ----------------------------------------------------------------------------------
def lone_round(public: Tensor, anchor: Tensor, theta: Tensor) -> Tensor:
    """The new global fragment after one round with one learner, f32 both ways."""
    delta = decode_delta("f32", anchor, encode_delta("f32", anchor, theta).numpy().tobytes())
    target = outer_step(public, merge(FRAGMENT, [delta], [4096.0]), None, 1.0, 0.0)
    payload, new = encode_step("f32", public, target)
    assert digest(apply_step("f32", public, payload.numpy().tobytes())) == digest(new)
    return new


@given(seed=st.integers(0, 2**31), apart=st.floats(-9, 4), size=st.floats(-6, 6))
@settings(max_examples=examples(30))
def test_a_lone_learner_gets_its_own_parameters_back_within_one_unit_in_the_last_place(
    seed: int, apart: float, size: float
) -> None:
    anchor = noise(seed, 10**size)
    theta = anchor + noise(seed + 1, 10 ** (size + apart))
    new = lone_round(anchor, anchor, theta).numpy()
    assert (np.abs(new - theta.numpy()) <= np.spacing(np.abs(theta.numpy()))).all()


def test_a_lone_learner_in_bfloat16_gets_its_own_parameters_back() -> None:
    public = noise(1).bfloat16().float()
    theta = (public + noise(2, 0.01)).bfloat16().float()
    new = lone_round(public, public.bfloat16().float(), theta)
    assert torch.equal(new.bfloat16(), theta.bfloat16())


# --- four bits down: what a step leaves over goes into the next ------------------------------------------------------
@pytest.mark.parametrize("codec", ["int4", "int8", "bf16"])
def test_over_many_rounds_the_steps_that_arrive_add_up_to_those_that_were_meant(codec: str) -> None:
    public, residual, held = noise(0), torch.zeros(FRAGMENT.length), noise(0)
    forgetful, exact = noise(0), noise(0).double()
    worst = 0.0
    for i in range(40):
        delta = noise(100 + i, 0.01) + 0.01 * noise(7, 0.01)
        target = outer_step(public + residual, delta, None, 1.0, 0.0)
        payload, public = encode_step(codec, public, target)
        residual = target - public
        held = apply_step(codec, held, payload.numpy().tobytes())
        assert torch.equal(held, public)
        forgetful = encode_step(codec, forgetful, forgetful - delta)[1]
        exact -= delta.double()
        worst = max(worst, float(residual.abs().max()))
    drift, loose = ((v.double() - exact).abs().max() for v in (public, forgetful))
    assert float(drift) <= worst + 1e-4
    assert float((public.double() + residual.double() - exact).abs().max()) < 1e-4
    if codec == "int4":
        assert float(drift) < float(loose) / 3
    assert not public[FRAGMENT.spans[0].stop : FRAGMENT.spans[1].offset].any()


def test_a_round_of_four_bits_both_ways_keeps_the_direction_of_the_true_one() -> None:
    public = noise(0)
    thetas = [public - noise(10 + i, 0.01) for i in range(4)]
    deltas = [decode_delta("int4", public, encode_delta("int4", public, t).numpy().tobytes()) for t in thetas]
    target = outer_step(public, merge(FRAGMENT, deltas, [1.0] * 4), None, 1.0, 0.0)
    _, new = encode_step("int4", public, target)
    true = outer_step(public, merge(FRAGMENT, [public - t for t in thetas], [1.0] * 4), None, 1.0, 0.0)
    step, wanted = new - public, true - public
    cosine = float(step @ wanted / (step.norm() * wanted.norm()))
    assert cosine > 0.98
    assert float(step.norm()) == pytest.approx(float(wanted.norm()), rel=0.03)
