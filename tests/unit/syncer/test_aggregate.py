"""The merge: weights, weighted RDA tensor by tensor, and every case in which a direction does not exist."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import reference
import torch
from decoupled_diloco.common.errors import Malformed
from decoupled_diloco.common.fragments import Fragment, Layout, TensorSpec, balanced_plan
from decoupled_diloco.syncer.aggregate import merge, norm, token_weight
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import examples
from torch import Tensor


def fragment_of(*tensors: tuple[tuple[int, ...], str]) -> Fragment:
    specs = [TensorSpec(name=f"t{i}", shape=s, dtype="float32", merge=m) for i, (s, m) in enumerate(tensors)]  # type: ignore[arg-type]
    return balanced_plan(Layout(tuple(specs)), 1).fragments[0]


MIXED = fragment_of(
    ((40, 33), "rda"), ((7, 33), "mean"), ((31,), "rda"), ((32,), "rda"), ((), "rda"), ((33_001,), "rda")
)
MATRIX = fragment_of(((64, 32), "rda"))


def random_delta(fragment: Fragment, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator, vector = torch.Generator().manual_seed(seed), torch.zeros(fragment.length, dtype=dtype)
    for span in fragment.spans:
        vector[span.offset : span.stop] = torch.randn(span.tensor.numel, generator=generator, dtype=dtype)
    return vector


def expected(fragment: Fragment, deltas: Sequence[Tensor], weights: Sequence[float]) -> reference.F64:
    result = np.zeros(fragment.length)
    for span in fragment.spans:
        views = [d[span.offset : span.stop].numpy().astype(np.float64) for d in deltas]
        plain = span.tensor.merge == "mean" or span.tensor.numel < 32
        result[span.offset : span.stop] = (reference.mean if plain else reference.rda)(views, weights)
    return result


@given(
    sizes=st.lists(st.floats(-20, 20), min_size=1, max_size=6),
    weights=st.lists(st.floats(1e-3, 1e12), min_size=6, max_size=6),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=examples(25))
def test_the_merge_is_the_formula_of_the_paper_tensor_by_tensor(
    sizes: list[float], weights: list[float], seed: int
) -> None:
    deltas = [random_delta(MIXED, seed + i) * 10**size for i, size in enumerate(sizes)]
    merged = merge(MIXED, deltas, weights[: len(deltas)])
    want = expected(MIXED, deltas, weights[: len(deltas)])
    assert merged.dtype == torch.float32
    for span in MIXED.spans:
        part = slice(span.offset, span.stop)
        off = np.abs(merged[part].numpy() - want[part]).max()
        assert off <= 3e-6 * np.abs(np.stack([d[part].numpy() for d in deltas])).max()


def test_deltas_in_double_precision_are_merged_in_double_precision() -> None:
    deltas = [random_delta(MIXED, i, torch.float64) for i in range(3)]
    merged = merge(MIXED, deltas, [1.0, 2.0, 3.0])
    assert merged.dtype == torch.float64
    assert np.allclose(merged.numpy(), expected(MIXED, deltas, [1, 2, 3]), rtol=1e-12, atol=1e-13)
    assert merge(MIXED, [deltas[0].float(), deltas[1]], [1.0, 1.0]).dtype == torch.float64


@pytest.mark.parametrize("count", [1, 2, 4, 16])
def test_outer_gradients_of_one_norm_merge_to_that_norm_where_their_mean_would_shrink(count: int) -> None:
    deltas = [random_delta(MATRIX, i) for i in range(count)]
    deltas = [delta * (3.0 / norm(delta)) for delta in deltas]
    weights = [float(1 + i % 3) for i in range(count)]
    assert norm(merge(MATRIX, deltas, weights)) == pytest.approx(3.0, rel=1e-5)
    mean = reference.mean([d.numpy().astype(np.float64) for d in deltas], [1] * count)
    assert np.linalg.norm(mean) == pytest.approx(3.0 / math.sqrt(count), rel=0.2)


def test_the_merged_norm_is_the_weighted_mean_of_the_norms() -> None:
    deltas = [random_delta(MATRIX, i) * 10.0**i for i in range(3)]
    weights = [5.0, 1.0, 0.5]
    want = sum(w * norm(d) for w, d in zip(weights, deltas, strict=True)) / 6.5
    assert norm(merge(MATRIX, deltas, weights)) == pytest.approx(want, rel=1e-5)


# --- order, shares ---------------------------------------------------------------------------------------------------
def test_the_order_of_arrival_does_not_change_a_bit_once_contributors_are_sorted() -> None:
    contributors = {("a", 7): (random_delta(MIXED, 1), 3.0), ("a", 9): (random_delta(MIXED, 2), 1.0),
                    ("b", 1): (random_delta(MIXED, 3), 0.3), ("c", 2): (random_delta(MIXED, 4), 11.0)}  # fmt: skip
    results = []
    for arrival in itertools.permutations(contributors.items()):
        ordered = [value for _, value in sorted(arrival, key=lambda item: item[0])]
        results.append(merge(MIXED, [d for d, _ in ordered], [w for _, w in ordered]))
    assert all(torch.equal(result, results[0]) for result in results)


def test_any_order_gives_the_same_but_for_rounding() -> None:
    deltas, weights = [random_delta(MIXED, i) for i in range(4)], [1.0, 2.0, 3.0, 4.0]
    there, back = merge(MIXED, deltas, weights), merge(MIXED, deltas[::-1], weights[::-1])
    assert torch.allclose(there, back, rtol=1e-4, atol=1e-5)


def test_one_contributor_gives_its_delta_bit_for_bit() -> None:
    delta = random_delta(MIXED, 1) * 1.234e-7
    merged = merge(MIXED, [delta], [17.0])
    assert torch.equal(merged, delta)
    assert merged.data_ptr() != delta.data_ptr()


def test_a_learner_that_weighs_nothing_changes_not_a_bit() -> None:
    genuine, other = random_delta(MIXED, 1), random_delta(MIXED, 2)
    assert torch.equal(merge(MIXED, [other, genuine], [0.0, 5.0]), genuine)
    three = merge(MIXED, [genuine, other, other * 100], [1.0, 2.0, 0.0])
    assert torch.equal(three, merge(MIXED, [genuine, other], [1.0, 2.0]))


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [1.0, math.nan], [math.inf, 1.0]])
def test_weights_that_say_nothing_are_refused_and_never_give_nan(weights: list[float]) -> None:
    with pytest.raises(Malformed) as caught:
        merge(MATRIX, [random_delta(MATRIX, 1), random_delta(MATRIX, 2)], weights)
    assert caught.value.reason == "weights"


def test_nobody_at_all_and_vectors_of_other_lengths_are_mistakes_that_are_named() -> None:
    with pytest.raises(Malformed, match="0 contributors"):
        merge(MATRIX, [], [])
    with pytest.raises(ValueError, match="1 deltas, 2 weights"):
        merge(MATRIX, [random_delta(MATRIX, 1)], [1.0, 1.0])
    with pytest.raises(ValueError, match="each delta has 2048 elements"):
        merge(MATRIX, [torch.zeros(2047)], [1.0])


def test_only_the_ratio_of_weights_matters_however_large_they_are() -> None:
    deltas = [random_delta(MIXED, i) for i in range(3)]
    small, large = merge(MIXED, deltas, [1.0, 2.0, 4.0]), merge(MIXED, deltas, [2.0**200, 2.0**201, 2.0**202])
    assert torch.equal(small, large)


@pytest.mark.parametrize(("tokens", "steps", "weight"), [(0, 0, 0.0), (0, 5, 0.0), (100, 0, 0.0), (100, 5, 2000.0)])
def test_a_weight_is_tokens_times_tokens_a_step(tokens: int, steps: int, weight: float) -> None:
    assert token_weight(tokens, steps) == weight


def test_the_largest_counters_still_have_a_finite_weight() -> None:
    weight = token_weight(2**53, 1)
    assert math.isfinite(weight * 10_000)
    deltas = [random_delta(MATRIX, 1), random_delta(MATRIX, 2)]
    assert merge(MATRIX, deltas, [weight, token_weight(1, 1)]).isfinite().all()


# --- what has no direction -------------------------------------------------------------------------------------------
def test_a_delta_of_zero_has_no_direction_and_only_shortens_the_others() -> None:
    delta, zero = random_delta(MATRIX, 1), torch.zeros(MATRIX.length)
    merged = merge(MATRIX, [delta, zero], [1.0, 3.0])
    assert torch.allclose(merged, delta / 4, rtol=1e-5, atol=1e-7)


def test_deltas_that_are_all_zero_merge_to_zero() -> None:
    merged = merge(MIXED, [torch.zeros(MIXED.length)] * 3, [1.0, 2.0, 3.0])
    assert not merged.any()


@pytest.mark.parametrize("length", [-1.0, -3.0, -1.0 - 1e-7])
def test_where_directions_cancel_the_mean_is_taken(length: float) -> None:
    delta = random_delta(MATRIX, 1)
    merged = merge(MATRIX, [delta, delta * length], [1.0, 1.0])
    assert torch.allclose(merged, delta * (1 + length) / 2, rtol=1e-5, atol=1e-6)


def test_directions_that_nearly_cancel_still_count() -> None:
    delta = random_delta(MATRIX, 1)
    other = -delta + random_delta(MATRIX, 2) * 1e-3
    assert norm(merge(MATRIX, [delta, other], [1.0, 1.0])) == pytest.approx(norm(delta), rel=1e-3)


def test_the_same_delta_from_everybody_is_that_delta() -> None:
    delta = random_delta(MIXED, 1)
    assert torch.allclose(merge(MIXED, [delta] * 5, [1.0, 2, 3, 4, 5]), delta, rtol=1e-5, atol=1e-7)


def test_embeddings_and_small_tensors_are_merged_by_the_mean() -> None:
    fragment = fragment_of(((50, 8), "mean"), ((31,), "rda"), ((), "rda"), ((1,), "rda"))
    deltas = [random_delta(fragment, i) for i in range(3)]
    want = reference.mean([d.numpy().astype(np.float64) for d in deltas], [1, 2, 3])
    assert np.allclose(merge(fragment, deltas, [1.0, 2.0, 3.0]).numpy(), want, rtol=1e-5, atol=1e-6)


def test_each_tensor_has_its_own_norm() -> None:
    fragment = fragment_of(((64, 8), "rda"), ((64, 8), "rda"))
    one, other = random_delta(fragment, 1), random_delta(fragment, 2)
    one[:512] *= 1000
    merged = merge(fragment, [one, other], [1.0, 1.0])
    assert norm(merged[512:]) == pytest.approx((norm(one[512:]) + norm(other[512:])) / 2, rel=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e-12, 1e12, 1e19, 1e30])
def test_norms_beyond_the_squares_of_single_precision_are_right(size: float) -> None:
    deltas = [random_delta(MIXED, i) * size for i in range(2)]
    assert norm(deltas[0]) == pytest.approx(float(np.linalg.norm(deltas[0].numpy().astype(np.float64))), rel=1e-5)
    merged = merge(MIXED, deltas, [1.0, 1.0])
    want = expected(MIXED, deltas, [1, 1])
    assert np.abs(merged.numpy() - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("size", [1e-42, 1e-38, 1e-30, 1e36], ids=str)
def test_deltas_whose_norms_no_single_precision_factor_can_turn_into_directions_are_merged_right(size: float) -> None:
    wide = fragment_of(((1000, 300), "rda"))
    deltas = [(random_delta(wide, i, torch.float64).sign() * size).float() for i in range(2)]
    merged, want = merge(wide, deltas, [1.0, 3.0]), expected(wide, deltas, [1.0, 3.0])
    assert merged.dtype == torch.float32
    assert np.abs(merged.numpy() - want).max() <= max(1e-5 * size, 1.5e-45)
    usual = random_delta(wide, 9)
    assert torch.isfinite(merge(wide, [deltas[0], usual], [1.0, 1.0])).all()


def test_what_a_peer_writes_between_the_tensors_goes_nowhere() -> None:
    fragment = fragment_of(((100,), "rda"), ((5,), "rda"))
    deltas = [torch.full((fragment.length,), float(i)) for i in (1, 2)]
    for merged in (merge(fragment, deltas, [1.0, 1.0]), merge(fragment, deltas[:1], [1.0])):
        assert merged[:100].all()
        assert not merged[100:128].any()
        assert not merged[133:].any()


def test_the_merge_leaves_its_inputs_alone() -> None:
    deltas = [random_delta(MIXED, i) for i in range(3)]
    copies = [delta.clone() for delta in deltas]
    merge(MIXED, deltas, [1.0, 2.0, 3.0])
    assert all(torch.equal(delta, copy) for delta, copy in zip(deltas, copies, strict=True))
