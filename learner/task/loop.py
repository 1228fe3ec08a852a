"""Training loop of the built-in learner: uses only the public session API, as a user's own script would."""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor, nn

from ...common.log import get_logger
from ..session import Session
from .text import Batches
from .transformer import Transformer, loss_of

log = get_logger("learner")

LOG_SECONDS = 10.0
"""Interval of progress log lines."""
RAMP_STEPS = 20
"""A learner's first steps, with immature Adam moments: its learning rate rises over them, whenever it joins."""
CLIP_NORM = 1.0
EMBEDDING_LR_FACTOR = 5.0
"""Learning rate of embeddings, head and gains relative to the blocks' matrices: each of their rows sees few bytes."""


def train(
    session: Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    *,
    inner_lr: float,
    stop: threading.Event,
) -> None:
    """Train until the run is over or `stop` is set; the session determines the model's final content."""
    logged_at = time.monotonic()
    for local_step, (inputs, targets) in enumerate(batches):
        loss = train_on(session, model, optimizer, inputs, targets, local_step=local_step, inner_lr=inner_lr)
        if session.finished or stop.is_set():
            return
        if time.monotonic() - logged_at >= LOG_SECONDS:
            logged_at, run = time.monotonic(), session.progress
            log.info("training", step=run.step, steps=run.steps, loss=round(loss, 3), local_steps=session.local_steps)


def train_on(
    session: Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
    *,
    local_step: int,
    inner_lr: float,
) -> float:
    """One inner step and its session call; returns the loss before the step, in nats per byte."""
    rate = inner_lr * schedule(session.progress.fraction, local_step)
    loss = inner_step(model, optimizer, inputs, targets, rate)
    session.step(tokens=targets.numel(), loss=loss)
    return loss


def schedule(fraction: float, local_step: int) -> float:
    """Share of the peak learning rate; falls linearly to zero over the run's global steps.

    `fraction`: share of the global steps that are done; `local_step`: the learner's own, from 0.
    """
    return max(0.0, min(1.0 - fraction, (local_step + 1) / RAMP_STEPS))


def make_optimizer(model: Transformer) -> torch.optim.AdamW:
    """AdamW with weight decay for the blocks' matrices only; embeddings, head and gains have a higher learning rate."""
    inner = {id(m.weight) for m in model.blocks.modules() if isinstance(m, nn.Linear)}
    matrices = [p for p in model.parameters() if id(p) in inner]
    others = [p for p in model.parameters() if id(p) not in inner]
    groups = [
        {"params": matrices, "weight_decay": 0.1, "share": 1.0},
        {"params": others, "weight_decay": 0.0, "share": EMBEDDING_LR_FACTOR},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def inner_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, rate: float
) -> float:
    """One step, at `rate`, of an optimizer from make_optimizer, on int64 [sequences, length].

    Returns the loss before the step, in nats per byte.
    """
    device = next(model.parameters()).device
    loss = loss_of(model, inputs.to(device), targets.to(device))
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["share"]
    optimizer.step()
    return float(loss.detach())
