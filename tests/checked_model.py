"""A small model, stepped in a session without a syncer."""

from __future__ import annotations

import torch
from lone_session import Lone, train
from torch import nn

Optimizer = torch.optim.Optimizer


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.old = nn.Linear(4, 2)
        self.old.requires_grad_(requires_grad=False)


def step(lone: Lone, model: nn.Module, *optimizer_watch: Optimizer, tokens: int = 10) -> bool:
    train(model, *optimizer_watch)
    return lone.session.step(tokens=tokens)
