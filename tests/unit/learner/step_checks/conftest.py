"""A small model in a session without a syncer; each step looks at the whole model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from checked_model import Model, Optimizer
from decoupled_diloco.learner import model_changes, optimizer_watch
from lone_session import Lone


@pytest.fixture(autouse=True)
def _always_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model is looked at in each step, not once a second."""
    monkeypatch.setattr(model_changes, "WHOLE_SECONDS", 0.0)
    monkeypatch.setattr(optimizer_watch, "WHOLE_SECONDS", 0.0)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def optimizer(model: Model) -> Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


@pytest.fixture
def lone(model: Model, optimizer: Optimizer) -> Iterator[Lone]:
    joined = Lone(model, optimizer)
    yield joined
    joined.session.close("stopped")
