"""A session of a test's own model without a network: what it adopts and is called for is laid on its mailbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from decoupled_diloco.common.codec import digest
from decoupled_diloco.common.config import LearnerConfig, RunSettings
from decoupled_diloco.common.fragments import Layout, balanced_plan
from decoupled_diloco.common.wire import Call
from decoupled_diloco.learner.identity import Identity
from decoupled_diloco.learner.mailbox import Arrival, Capture, Joined, Mailbox
from decoupled_diloco.learner.model_layout import Optimizers, inventory
from decoupled_diloco.learner.public_model import PublicFragment
from decoupled_diloco.learner.replica import Replica
from decoupled_diloco.learner.session import Session
from decoupled_diloco.simulator.virtual_learner import VirtualLink
from torch import Tensor, nn


class Lone:
    """A session that has joined with its own model as the run's, of one fragment."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizers, masters: Mapping[str, Tensor] | None = None, *, t: int = 0
    ) -> None:
        layout = Layout(tuple(entry.spec() for entry in inventory(model, optimizer, masters)))
        plan = balanced_plan(layout, 1)
        replica = Replica(model, plan, masters)
        self.mailbox = Mailbox()
        self.fragment, self.replica = plan.fragments[0], replica
        self.version = 1
        settings = RunSettings(run="r", fragments=1, overlap=1, codec_up="f32", codec_down="f32")
        joined = Joined(plan, settings, None, 1, t, (self._public(),), replica.static_bytes())
        me = Identity(run="r", name="me", incarnation=1, layout=layout)
        self.session = Session(
            VirtualLink(LearnerConfig(broker="tcp://nowhere:1", name="me"), me, self.mailbox),
            joined,
            replica,
            optimizer,
        )

    def call(self, slot: int) -> None:
        """What it is called for from its next step on."""
        self.mailbox.open_calls([Call(run="r", epoch=1, slot=slot, t=0, fragment=0, version=self.version, attempt=1)])

    def answers(self) -> Sequence[Capture]:
        """What it has captured since the last time."""
        return self.mailbox.take_captures()

    def merge(self, by: float = 0.0) -> None:
        """A next version waits for it: its own weights, moved."""
        self.version += 1
        self.mailbox.deliver([Arrival(0, 1, self._public(by))])

    def show_global_weights(self) -> None:
        """Look at the global model, here one moved far from its own, for a moment."""
        self.mailbox.public = (self._public(10.0),)
        with self.session.global_weights():
            pass

    def _public(self, by: float = 0.0) -> PublicFragment:
        vector = self.replica.vector(self.fragment) + by
        return PublicFragment(self.version, vector, digest(vector))


def train(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """One training step, on a loss that moves every trainable parameter."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    backward(model)
    for optimizer in optimizers:
        optimizer.step()


def backward(model: nn.Module, scale: float = 1.0) -> None:
    """Gradients of `scale` for every trainable parameter, added to what is there."""
    loss = sum((p.float().sum() * scale for p in model.parameters() if p.requires_grad), torch.zeros(()))
    torch.autograd.backward(loss)
