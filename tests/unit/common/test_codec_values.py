"""Codecs on arbitrary values: error bounds, shapes, holes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
import torch
from codec_values import QUANTIZED, array, carried, flat, noise, wild_blocks
from decoupled_diloco.common.codec import (
    apply_step,
    decode_delta,
    encode_delta,
    encode_step,
)
from decoupled_diloco.common.config import CODECS
from decoupled_diloco.common.fragments import ALIGN, Layout, TensorSpec, balanced_plan
from hypothesis import example, given, settings
from hypothesis import strategies as st
from searching import examples
from torch import Tensor


@given(values=wild_blocks(), codec=st.sampled_from(QUANTIZED))
@example(values=torch.full((ALIGN,), 1e-30), codec="int4")
@example(values=torch.full((ALIGN,), 1e-28), codec="int8")
@example(values=torch.tensor([1e30] + [1e-3] * 127), codec="int4")
@example(values=torch.tensor([1e-3] * 255 + [-1e30]), codec="int8")
@settings(max_examples=examples(150))
def test_no_element_is_further_off_than_half_its_blocks_scale(values: Tensor, codec: str) -> None:
    payload, delta = carried(codec, values)
    assert delta.isfinite().all()
    assert (np.abs(array(delta) - array(values)) <= reference.error_bound(codec, array(values))).all()
    assert np.array_equal(array(delta), reference.decode(codec, payload, len(values)))
    assert (delta[values == 0] == 0).all()


@given(values=wild_blocks())
@settings(max_examples=examples(60))
def test_what_four_bits_carried_once_they_carry_again_without_a_loss(values: Tensor) -> None:
    payload, once = carried("int4", values)
    again, twice = carried("int4", once)
    assert torch.equal(twice, once)
    assert again == payload


@pytest.mark.parametrize("codec", CODECS)
def test_a_delta_of_exactly_zero_stays_exactly_zero(codec: str) -> None:
    theta = noise(5 * ALIGN)
    assert not decode_delta(codec, theta, encode_delta(codec, theta, theta)).any()


@pytest.mark.parametrize("codec", QUANTIZED)
def test_an_outlier_costs_its_own_block_and_no_other(codec: str) -> None:
    values = torch.full((3 * ALIGN,), 1e-3)
    values[ALIGN + 5] = 1e30
    _, delta = carried(codec, values)
    assert torch.equal(delta[:ALIGN], delta[2 * ALIGN :])
    assert delta[0] == pytest.approx(1e-3, rel=0.01)
    assert delta[ALIGN + 5] == pytest.approx(1e30, rel=0.01)
    assert delta[ALIGN] == 0


@given(
    shapes=st.lists(
        st.sampled_from([(), (1,), (0, 8), (2,), (127,), (131,), (521,), (7, 37), (128,), (4, 32), (33_013,)]),
        min_size=1,
        max_size=6,
    ).filter(lambda shapes: any(math.prod(shape) for shape in shapes)),
    codec=st.sampled_from(CODECS),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=examples(60))
def test_tensors_of_any_shape_come_through_and_the_holes_between_them_stay_zero(
    shapes: list[tuple[int, ...]], codec: str, seed: int
) -> None:
    specs = tuple(TensorSpec(name=f"t{i}", shape=shape, dtype="float32") for i, shape in enumerate(shapes))
    plan = balanced_plan(Layout(specs), 1)
    tensors = {spec.name: noise(spec.numel, seed + i).view(spec.shape) for i, spec in enumerate(plan.layout.trainable)}
    public = torch.zeros(plan.fragments[0].length)
    target = flat(plan.fragments[0], tensors)
    payload, new = encode_step(codec, public, target)
    assert torch.equal(new, apply_step(codec, public, payload))
    holes = torch.ones(len(new), dtype=torch.bool)
    for span in plan.fragments[0].spans:
        holes[span.offset : span.stop] = False
        back, sent = new[span.offset : span.stop].view(span.tensor.shape), tensors[span.tensor.name]
        assert torch.allclose(back, sent, rtol=0, atol=float(sent.abs().max()) / 13)
    assert not new[holes].any()
