"""The outer optimizer (arXiv 2604.21428, section 3): SGD with Nesterov momentum on merged outer gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.codec import slabs


@torch.no_grad()
def outer_step(start: Tensor, delta: Tensor, momentum: Tensor | None, lr: float, mu: float) -> Tensor:
    """One outer step: b <- mu b + d; returns start - lr (d + mu b) as a new flat f32 vector.

    start: flat f32, the public fragment plus the error feedback e. delta: flat f32 or f64, the merged anchor - theta,
    which points uphill like a gradient. momentum: flat f32, updated in place; None with mu = 0. A f64 delta is computed
    in f64 and rounded once, so that lr 1 without momentum returns a lone learner's parameters exactly.
    """
    if momentum is None and mu:
        raise ValueError(f"outer momentum {mu} needs a momentum vector")
    target = torch.empty_like(start, dtype=torch.float32)
    for part in slabs(start):
        step, begin = delta[part], start[part].to(delta.dtype)
        if momentum is not None:
            velocity = momentum[part].to(delta.dtype).mul_(mu).add_(step)  # in place if the dtypes are equal
            momentum[part].copy_(velocity)
            step = step.add(velocity, alpha=mu)
        target[part] = begin.sub(step, alpha=lr)
    return target
