"""Aggregation of outer gradients (arXiv 2604.21428, section 3): token weights, and Radial-Directional Averaging (RDA)
of each tensor.

RDA averages directions and norms separately, so that M nearly orthogonal outer gradients of norm R give one of norm R,
where the plain mean gives R / sqrt(M). The functions are stateless and sum in the given order: callers sort
contributors by (name, incarnation), which makes the result independent of the order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..common.codec import slabs
from ..common.errors import Malformed
from ..common.fragments import SMALL_TENSOR, Fragment, TensorSpan

CANCELLED = 1e-6
"""If the sum of unit vectors is shorter than this share of the sum of weights, it has no meaningful direction."""
SHORT, LONG = 1e-30, 1e30
"""Between these limits a norm and its inverse are factors that f32 can hold, for all weights."""


def token_weight(tokens: int, steps: int) -> float:
    """w = c_tokens * (c_tokens / c_steps), "quantity x quality" (arXiv 2604.21428, section 3); 0 without steps."""
    return tokens * tokens / steps if steps else 0.0


@torch.no_grad()
def merge(fragment: Fragment, deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Aggregate outer gradients of one fragment; returns a new flat vector, zero in the holes between tensors.

    deltas: flat f32 or f64 vectors, finite; the result is f64 if one of them is. weights: >= 0; deltas of weight 0 are
    left out, and if one is left, the result equals it bit for bit. Malformed ("weights") if all weights are 0, or one
    is negative or not finite.
    """
    if len(deltas) != len(weights) or any(len(delta) != fragment.length for delta in deltas):
        raise ValueError(f"{len(deltas)} deltas, {len(weights)} weights: each delta has {fragment.length} elements")
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise Malformed("weights", f"{len(weights)} contributors weigh {sum(weights)} together")
    present = [(delta, weight) for delta, weight in zip(deltas, weights, strict=True) if weight > 0]
    total = math.fsum(weight for _, weight in present)
    shares = [weight / total for _, weight in present]
    dtype = torch.float64 if any(delta.dtype == torch.float64 for delta, _ in present) else torch.float32
    merged = torch.zeros(fragment.length, dtype=dtype, device=present[0][0].device)
    for span in fragment.spans:
        views = [delta[span.offset : span.stop] for delta, _ in present]
        _merge_tensor(span, merged[span.offset : span.stop], views, shares)
    return merged


def _merge_tensor(span: TensorSpan, out: Tensor, views: Sequence[Tensor], shares: Sequence[float]) -> None:
    if len(views) == 1:
        out.copy_(views[0])
    elif span.tensor.merge == "mean" or span.tensor.numel < SMALL_TENSOR:
        _combine(out, views, shares)
    else:
        _merge_directions(out, views, shares)


def _merge_directions(out: Tensor, views: Sequence[Tensor], shares: Sequence[float]) -> None:
    """Weighted RDA (arXiv 2604.21428, section 3): (sum w_i |v_i| / sum w_i) * phi(sum w_i phi(v_i) / sum w_i), where
    phi(v) = v / |v| and phi(0) = 0.
    """
    norms = [norm(view) for view in views]
    if out.dtype == torch.float32 and not all(n == 0 or SHORT < n < LONG for n in norms):
        wide = out.double()
        _merge_directions(wide, [view.double() for view in views], shares)
        out.copy_(wide)
        return
    _combine(out, views, [share / n if n else 0.0 for share, n in zip(shares, norms, strict=True)])
    length = norm(out)
    if length < CANCELLED:
        _combine(out, views, shares)
        return
    radius = math.fsum(share * n for share, n in zip(shares, norms, strict=True))
    out.mul_(radius / length)


def _combine(out: Tensor, views: Sequence[Tensor], factors: Sequence[float]) -> None:
    """out <- sum of factor_i * view_i in the given order, one slab at a time, so that `out` stays in the cache."""
    for part in slabs(out):
        torch.mul(views[0][part], factors[0], out=out[part])
        for view, factor in zip(views[1:], factors[1:], strict=True):
            out[part].add_(view[part], alpha=factor)


def norm(vector: Tensor) -> float:
    """Euclidean norm of a flat vector, correct for all finite f32 values, however large or small."""
    length = _norm(vector, vector.dtype)
    if vector.dtype == torch.float32 and not 1e-12 < length < math.inf:  # the squares are out of f32's range
        length = _norm(vector, torch.float64)
    return length


def _norm(vector: Tensor, dtype: torch.dtype) -> float:
    """The norm with squares and sums in `dtype`, one slab at a time."""
    return math.hypot(*(float(torch.linalg.vector_norm(vector[part], dtype=dtype)) for part in slabs(vector)))
