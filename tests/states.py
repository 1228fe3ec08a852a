"""A small global model with every odd tensor in it, for tests of the syncer's state and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from decoupled_diloco.common.codec import encode_delta
from decoupled_diloco.common.config import RunSettings
from decoupled_diloco.common.fragments import Fragment, Layout, Plan, TensorSpec, balanced_plan
from decoupled_diloco.syncer.checkpoint import Checkpoints
from decoupled_diloco.syncer.global_model import GlobalModel, cast_through
from torch import Tensor

LAYOUT = Layout(
    (
        TensorSpec(name="embedding.weight", shape=(40, 16), dtype="float32", merge="mean", tied=("head.weight",)),
        TensorSpec(name="hidden.weight", shape=(48, 16), dtype="bfloat16"),
        TensorSpec(name="narrow.weight", shape=(16, 48), dtype="float16"),
        TensorSpec(name="prime", shape=(131,), dtype="float32"),
        TensorSpec(name="scalar", shape=(), dtype="float32"),
        TensorSpec(name="one", shape=(1,), dtype="bfloat16"),
        TensorSpec(name="nothing", shape=(0, 8), dtype="float32"),
        TensorSpec(name="frozen.weight", shape=(5, 3), dtype="bfloat16", kind="frozen"),
        TensorSpec(name="mask", shape=(3,), dtype="bool", kind="buffer"),
        TensorSpec(name="count", shape=(), dtype="int64", kind="buffer"),
    )
)
PLAN = balanced_plan(LAYOUT, 3)
STATIC = bytes(range(30)) + bytes([1, 0, 1]) + (77).to_bytes(8, "little")


def settings(**changes: Any) -> RunSettings:
    return RunSettings(**{"run": "tiny", "fragments": 3, "sync_every": 6, **changes})


def vector(part: Fragment, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    """Random flat f32 values as parameters hold them, zero in the holes."""
    flat = torch.zeros(part.length)
    for span in part.spans:
        flat[span.offset : span.stop] = torch.randn(span.tensor.numel, generator=generator) * scale
    return cast_through(part, flat)


def vectors(plan: Plan = PLAN, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [vector(part, generator) for part in plan.fragments]


def fresh(**changes: Any) -> GlobalModel:
    return GlobalModel.from_version_zero(PLAN, settings(**changes), vectors(), STATIC)


def delta(state: GlobalModel, fragment: int, generator: torch.Generator, scale: float = 0.02) -> Tensor:
    """What the syncer decodes from a learner that went a random way from the current version."""
    part = state.plan.fragments[fragment]
    anchor = cast_through(part, state.public[fragment])
    theta = cast_through(part, anchor + vector(part, generator, scale))
    codec = state.settings.codec_up
    payload = encode_delta(codec, anchor, theta).numpy().tobytes()
    return state.decode(fragment, codec, payload, state.versions[fragment])


def advance(state: GlobalModel, rounds: int = 1, seed: int = 0) -> None:
    """Merge two learners' deltas into every fragment, `rounds` times."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(rounds):
        for fragment in range(state.plan.P):
            state.merge(fragment, [delta(state, fragment, generator) for _ in range(2)], [1.0, 3.0])


@contextmanager
def seeded(directory: Path) -> Iterator[Checkpoints]:
    """A locked directory with version 0 in it."""
    store = Checkpoints(directory)
    store.lock()
    store.write_version_zero(LAYOUT, PLAN, settings(), vectors(), STATIC)
    yield store
    store.unlock()
