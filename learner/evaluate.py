"""Judging a model: nats per byte on fixed windows of the held-out text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .text import Corpus, generator, windows
from .transformer import loss_of

SMALL_TOKENS = 2**13
FULL_TOKENS = 2**15
AT_ONCE_TOKENS = 2**12
"""Tokens of one forward pass: enough to keep a core busy, little enough to stay in its cache."""


@dataclass(frozen=True)
class Windows:
    """A fixed set of windows: a function of the run's seed, the text, and their number."""

    part: str
    """A or B."""
    size: str
    """small or full."""
    inputs: Tensor
    """int64 [windows, sequence_length]"""
    targets: Tensor
    """int64 [windows, sequence_length]"""


def validation_windows(corpus: Corpus, part: str, size: str, *, sequence_length: int, seed: int) -> Windows:
    """The windows of held-out part `part` that every evaluation of this size in this run uses."""
    text = corpus.part(part)
    count = max(1, (SMALL_TOKENS if size == "small" else FULL_TOKENS) // sequence_length)
    starts = generator("validation", seed, part).integers(0, len(text) - sequence_length, size=count)
    return Windows(part, size, *windows(text, starts, sequence_length))


@torch.no_grad()
def evaluate(model: nn.Module, judged: Windows) -> float:
    """Mean nats per byte over all of `judged`; the model is left as it was."""
    device = next(model.parameters()).device
    rows = max(1, AT_ONCE_TOKENS // judged.inputs.shape[1])
    total = 0.0
    for first in range(0, len(judged.inputs), rows):
        inputs, targets = (part[first : first + rows].to(device) for part in (judged.inputs, judged.targets))
        total += float(loss_of(model, inputs, targets)) * len(inputs)
    return total / len(judged.inputs)
