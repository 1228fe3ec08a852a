"""Ablations: variants of the algorithm that comparisons try and that are not settings of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..common.config import RunSettings
from ..common.errors import SettingError
from ..common.fragments import MergeKind


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """The defaults are what a run does."""

    merge: MergeKind = "rda"
    """mean: the weighted mean for every tensor, instead of RDA where it applies."""
    feedback: bool = True
    """False: what the code of the way down could not carry is forgotten."""
    keeps: bool = False
    """With adopt = rebase: who had no part in a merge keeps what it has done since it adopted the fragment last."""
    outer_lr_end: float | None = None
    """The outer learning rate at the end of the run, to which it goes in a straight line."""
    momentum_warmup: float = 0.0
    """Share of the run over which the outer momentum rises in a straight line from none to its setting."""
    sync_every_end: int | None = None
    """H at the end of the run, to which it grows in a straight line; of the synchronous method only."""
    warm_steps: int = 0
    """Steps that a lone learner has taken before: every method begins with its model."""
    warm_lr: float = 0.0
    """Its learning rate."""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum_warmup <= 1:
            raise SettingError(f"momentum_warmup is a share of the run from 0 to 1, not {self.momentum_warmup}")
        if (self.warm_steps > 0) != (self.warm_lr > 0) or self.warm_steps < 0:
            raise SettingError(f"warm_steps and warm_lr go together, not {self.warm_steps} with {self.warm_lr}")
        if self.sync_every_end is not None and self.sync_every_end < 1:
            raise SettingError(f"sync_every_end must be at least 1, not {self.sync_every_end}")

    def outer(self, settings: RunSettings, fraction: float) -> RunSettings:
        """`settings` with the outer learning rate and momentum as they are when `fraction` of the run is over."""
        rate, momentum = settings.outer_lr, settings.outer_momentum
        if self.outer_lr_end is not None:
            rate += (self.outer_lr_end - rate) * fraction
        if self.momentum_warmup:
            momentum *= min(1.0, fraction / self.momentum_warmup)
        if (rate, momentum) == (settings.outer_lr, settings.outer_momentum):
            return settings
        return replace(settings, outer_lr=rate, outer_momentum=momentum)

    def sync_every(self, settings: RunSettings, fraction: float) -> int:
        """H when `fraction` of the run is over."""
        end = settings.sync_every if self.sync_every_end is None else self.sync_every_end
        return round(settings.sync_every + (end - settings.sync_every) * fraction)


USUAL = Ablation()
