"""Ablations: variants of the algorithm that comparisons try and that are not settings of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..common.config import RunSettings
from ..common.errors import SettingError
from ..common.fragments import MergeKind


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """One variant; the defaults are a usual run."""

    merge: MergeKind = "rda"
    """mean: the weighted mean for every tensor, instead of RDA where it applies."""
    feedback: bool = True
    """False: no error feedback; the downlink codec's encoding error is discarded."""
    keeps: bool = False
    """With adopt = rebase: a learner that did not contribute to a merge keeps its progress since its last adoption."""
    outer_lr_end: float | None = None
    """Outer learning rate at the end of the run; it changes linearly."""
    momentum_warmup: float = 0.0
    """Share of the run over which the outer momentum rises linearly from 0 to its setting."""
    sync_every_end: int | None = None
    """H at the end of the run; it grows linearly. Synchronous method only."""
    warm_steps: int = 0
    """Steps of a lone learner before the run; every method starts from its model."""
    warm_lr: float = 0.0
    """Learning rate of the warm steps."""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum_warmup <= 1:
            raise SettingError(f"momentum_warmup is a share of the run from 0 to 1, not {self.momentum_warmup}")
        if (self.warm_steps > 0) != (self.warm_lr > 0) or self.warm_steps < 0:
            raise SettingError(f"warm_steps and warm_lr go together, not {self.warm_steps} with {self.warm_lr}")
        if self.sync_every_end is not None and self.sync_every_end < 1:
            raise SettingError(f"sync_every_end must be at least 1, not {self.sync_every_end}")

    def outer(self, settings: RunSettings, fraction: float) -> RunSettings:
        """`settings` with the outer learning rate and momentum after `fraction` of the run."""
        rate, momentum = settings.outer_lr, settings.outer_momentum
        if self.outer_lr_end is not None:
            rate += (self.outer_lr_end - rate) * fraction
        if self.momentum_warmup:
            momentum *= min(1.0, fraction / self.momentum_warmup)
        if (rate, momentum) == (settings.outer_lr, settings.outer_momentum):
            return settings
        return replace(settings, outer_lr=rate, outer_momentum=momentum)

    def sync_every(self, settings: RunSettings, fraction: float) -> int:
        """H after `fraction` of the run."""
        end = settings.sync_every if self.sync_every_end is None else self.sync_every_end
        return round(settings.sync_every + (end - settings.sync_every) * fraction)


UNCHANGED = Ablation()
