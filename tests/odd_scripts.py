"""A scripted syncer and models for scripts that do unusual things."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from decoupled_diloco.common.config import RunSettings
from decoupled_diloco.learner.replica import Replica, layout_of
from decoupled_diloco.learner.session import Session, join
from scripted_syncer import ScriptedSyncer
from torch import nn


def model_of(value: float, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Three trained tensors, one bf16 and one of denormal numbers, none as long as a block; a frozen one; a buffer."""
    model = nn.Module()
    model.register_parameter("tiny", nn.Parameter(torch.full((7,), 1e-40, dtype=torch.float32, device="cpu")))
    model.register_parameter("wide", nn.Parameter(torch.full((40, 50), value, dtype=dtype, device="cpu")))
    model.register_parameter("narrow", nn.Parameter(torch.full((40,), value, dtype=torch.bfloat16, device="cpu")))
    fixed = torch.full((3,), value, dtype=torch.float32, device="cpu")
    model.register_parameter("fixed", nn.Parameter(fixed, requires_grad=False))
    model.register_buffer("mean", torch.full((2,), value, dtype=torch.float32, device="cpu"))
    return model


@contextmanager
def syncer_at(broker: str, run: str = "r", **more: Any) -> Iterator[ScriptedSyncer]:
    """A seeded run: every fragment at version 1, all values 5, the static ones 0."""
    settings = RunSettings(run=run, fragments=1, overlap=1, codec_up="int8", codec_down="int4", **more)
    layout = layout_of(model_of(0.0))
    with ScriptedSyncer(broker, settings, layout) as syncer:
        assert syncer.plan is not None
        replica = Replica(model_of(5.0), syncer.plan)
        syncer.put([replica.vector(fragment) for fragment in syncer.plan.fragments], 1, static=bytes(20))
        yield syncer


def member(broker: str, model: nn.Module, **more: Any) -> Session:
    trained = [p for p in model.parameters() if p.requires_grad]
    return join(broker, model, torch.optim.SGD(trained, lr=1.0), **({"name": "me", "run": "r"} | more))


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def move(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for name in ("wide", "narrow"):
            model.get_parameter(name).add_(by)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> None:
    """Gradients of `scale` are added, and the optimizer steps if they are finite, as under a gradient scaler."""
    sum(p.float().sum() * scale for p in trained_of(model)).backward()  # type: ignore[union-attr]
    if scale < float("inf"):
        optimizer.step()
        optimizer.zero_grad()
