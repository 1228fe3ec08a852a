"""A source of fragments, and a learner's public model that follows it."""

from __future__ import annotations

import torch
from decoupled_diloco.common.codec import digest, encode_step
from decoupled_diloco.common.fragments import Layout, Plan, TensorSpec, balanced_plan
from decoupled_diloco.common.wire import Keyframe, Update, split
from decoupled_diloco.learner.public_model import (
    PublicModel,
    Request,
)
from torch import Tensor

CHUNK = 2**20 // 4
"""Elements of a chunk of a keyframe."""


def plan_of(*sizes: int) -> Plan:
    layout = Layout(tuple(TensorSpec(name=f"t{i}", shape=(n,), dtype="float32") for i, n in enumerate(sizes)))
    return balanced_plan(layout, len(sizes))


class Source:
    """The syncer's side of one fragment: its versions, and the messages that carry them."""

    def __init__(self, plan: Plan, fragment: int = 0, *, codec: str = "f32", version: int = 5) -> None:
        self.codec, self.fragment, self.version = codec, fragment, version
        self.public = torch.randn(plan.fragments[fragment].length)

    def keyframe(self, version: int | None = None, *, epoch: int = 1) -> list[Keyframe]:
        content = self.public.numpy().data.cast("B")
        return [
            Keyframe(
                run="r", epoch=epoch, t=0, fragment=self.fragment, digest=digest(content),
                version=self.version if version is None else version, **part,
            )
            for part in split(content)
        ]  # fmt: skip

    def update(self) -> list[Update]:
        payload, self.public = encode_step(self.codec, self.public, self.public + torch.randn(len(self.public)))
        self.version += 1
        return [
            Update(
                run="r", epoch=1, slot=0, t=0, fragment=self.fragment, version=self.version,
                base_version=self.version - 1, codec=self.codec, digest=digest(self.public),
                contributors=(("a", 1, 2, 3),), **part,
            )
            for part in split(payload.numpy().data)
        ]  # fmt: skip


def follower_of(plan: Plan, codec: str = "f32") -> PublicModel:
    return PublicModel(plan, codec, epoch=1)


def held(follower: PublicModel, fragment: int = 0) -> tuple[int, Tensor]:
    public = follower.held[fragment]
    assert public is not None
    return public.version, public.vector


def asked(follower: PublicModel, now: float) -> list[Request]:
    return list(follower.requests(now))
