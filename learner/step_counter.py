"""Inner steps, counted by what was done: an optimizer step makes one, and a call without any does not. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor

TRUSTED_CALLS = 64
"""After so many calls without an optimizer step that torch tells of (or before the first), values are looked at."""
WINDOW_CALLS = 32
"""In so many calls"""
UNSTEPPED_CALLS = 8
"""so many without an optimizer step are worth a sentence,"""
EMPTY_STEPS = 8
"""and so are so many steps in a row on no tokens."""
SAMPLED_TENSORS, SAMPLED_ELEMENTS = 8, 16
_version = attrgetter("_version")


class StepCounter:
    """Tokens on their way into an inner step. They are booked with the optimizer step that learns from them."""

    def __init__(self, sources: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """sources: what optimizers step. parameters: where gradients may lie, with masters the model's own as well."""
        self.pending_tokens = 0
        """Of calls since the last optimizer step whose gradients are still there."""
        self._parameters = parameters
        self._sampled = _spread(sources)
        self._sample: Tensor | None = self._take_sample()
        self._writable = [source for source in sources if not source.is_inference()]
        self._writes: int | None = self._count_writes()
        """Of the time of the last call, where that was no step that torch tells of; else nothing need be counted."""
        self._written = False
        """A step was made by hand before others wrote into the model."""
        self._since_seen = TRUSTED_CALLS
        """Calls since an optimizer step was seen; at first, none ever was."""
        self._moving = 0
        """Calls in a row after which the values had changed, though no optimizer step was seen."""
        self._calls = self._unstepped = self._without_gradients = self._empty = 0
        self._said: set[str] = set()

    def called(self, tokens: int, *, stepped: bool) -> int | None:
        """A session call on so many tokens; the tokens of the inner step that has ended, None if none has."""
        written, self._written = self._was_written(), False
        self._writes = None if stepped else 0
        self._since_seen = 0 if stepped or written else self._since_seen + 1
        self._note_window()
        if stepped or written or self._moved():
            booked, self.pending_tokens = self.pending_tokens + tokens, 0
            self._empty = self._empty + 1 if not booked else 0
            return booked
        self._unstepped += 1
        if gradients_live(self._parameters):
            self.pending_tokens += tokens
        else:
            self._without_gradients += 1
            self.pending_tokens = 0
        return None

    def left(self) -> None:
        """The call ends, and the model holds what was adopted."""
        if self._writes is not None:
            self._writes = self._count_writes()
        self._sample = self._take_sample() if self._watches_values() else None

    def before_swap(self) -> None:
        """Other weights are about to be written into the model, and the own ones back."""
        self._written = self._was_written()

    def after_swap(self) -> None:
        """They were."""
        if self._writes is not None:
            self._writes = self._count_writes()

    def sentences(self) -> list[tuple[str, str]]:
        """(event, sentence) for what is to be said now, each once."""
        if self._unstepped < UNSTEPPED_CALLS and self._empty < EMPTY_STEPS:
            return []
        return list(self._to_say())

    def _to_say(self) -> Iterable[tuple[str, str]]:
        if self._unstepped >= UNSTEPPED_CALLS:
            skipped = 2 * self._without_gradients >= self._unstepped
            event = "steps_skipped" if skipped else "calls_without_step"
            yield from self._once(event, (_SKIPPED if skipped else _MICRO).format(self._unstepped, self._calls))
        if self._empty >= EMPTY_STEPS:
            yield from self._once("no_tokens", _EMPTY.format(self._empty))

    def _once(self, event: str, sentence: str) -> Iterable[tuple[str, str]]:
        if event not in self._said:
            self._said.add(event)
            yield event, sentence

    def _note_window(self) -> None:
        if self._calls == WINDOW_CALLS:
            self._calls = self._unstepped = self._without_gradients = 0
        self._calls += 1

    # --- steps that no hook tells of ---------------------------------------------------------------------------------
    def _was_written(self) -> bool:
        """Whether tensors were written in place since the last call, which torch counts; nothing waits for the device.

        That is how a step shows whose hooks were taken away (torch.compile does in some versions of torch), or that was
        written by hand, however few of the values it moved.
        """
        return self._written or (self._writes is not None and self._writes != self._count_writes())

    def _count_writes(self) -> int:
        return sum(map(_version, self._writable))

    def _watches_values(self) -> bool:
        return self._since_seen >= TRUSTED_CALLS and self._moving < WINDOW_CALLS

    def _moved(self) -> bool:
        """Whether the model has changed all the same: through `.data`, by a replayed graph.

        Once that was so many times in a row, each call is taken for a step: to look at values waits for the device.
        """
        if not self._since_seen:
            self._moving = 0
            return False
        if self._since_seen < TRUSTED_CALLS:
            return False
        if self._moving < WINDOW_CALLS:
            moved = self._sample is not None and not torch.equal(self._take_sample(), self._sample)
            self._moving = self._moving + 1 if moved else 0
            return moved
        return True

    def _take_sample(self) -> Tensor:
        return torch.cat([take() for take in self._sampled])


def _spread(sources: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
    """How to read some elements of some of the tensors."""
    full = [source for source in sources if source.numel()]
    some = full[:: max(1, -(-len(full) // SAMPLED_TENSORS))]

    def reader(tensor: Tensor) -> Callable[[], Tensor]:
        last, count = tensor.numel() - 1, min(SAMPLED_ELEMENTS, tensor.numel())
        indices = [last * i // max(1, count - 1) for i in range(count)]
        places = torch.tensor(indices, dtype=torch.int64, device=tensor.device)
        return lambda: tensor.detach().reshape(-1)[places].to("cpu", torch.float64)

    return [reader(tensor) for tensor in some]


def gradients_live(parameters: Iterable[Tensor]) -> bool:
    """Whether there are gradients, all of them finite and not all zero: what a later optimizer step may learn from.

    Waits for each device once, however many parameters it holds.
    """
    largest: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            own = _largest(parameter.grad)
            largest[own.device, own.dtype].append(own)
    found: list[float] = [value for own in largest.values() for value in torch.stack(own).tolist()]
    return all(map(math.isfinite, found)) and any(found)


def _largest(gradient: Tensor) -> Tensor:
    values = gradient.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    return values.abs().max() if values.numel() else values.new_zeros(())


_SKIPPED = (
    "{0} of the last {1} calls of session.step() had no optimizer step before them and no usable gradients (a gradient "
    "scaler skipped the step, or it was not made): they count for nothing and their tokens are not merged; lower the "
    "loss scale, or train in bf16"
)
_MICRO = (
    "{0} of the last {1} calls of session.step() had no optimizer step before them: they are not counted as steps, and "
    "their tokens are booked with the next one; call session.step() once for each optimizer step, with the tokens of "
    "all its micro-batches"
)
_EMPTY = (
    "the last {0} steps were on tokens=0, so nothing of this learner is merged; pass session.step(tokens=...) the "
    "number of tokens (or samples) that the step was trained on"
)
