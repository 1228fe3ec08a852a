"""Step counter: a session call counts as an inner step only if an optimizer step was made before it. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor

TRUSTED_CALLS = 64
"""After this many calls without an optimizer step reported by torch (or before the first), values are compared."""
WINDOW_CALLS = 32
"""Calls in a window."""
UNSTEPPED_CALLS = 8
"""Calls without an optimizer step, in one window, that cause a warning."""
EMPTY_STEPS = 8
"""Steps in a row on no tokens that cause a warning."""
SAMPLED_TENSORS, SAMPLED_ELEMENTS = 8, 16
_version = attrgetter("_version")


class StepCounter:
    """Counts tokens with the optimizer step that learns from them."""

    def __init__(self, sources: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """sources: tensors that optimizers step. parameters: tensors that may have gradients; with masters, both."""
        self.pending_tokens = 0
        """Tokens of calls since the last optimizer step whose gradients are still there."""
        self._parameters = parameters
        self._sampled = _spread(sources)
        self._sample: Tensor | None = self._take_sample()
        self._writable = [source for source in sources if not source.is_inference()]
        self._writes: int | None = self._count_writes()
        """In-place writes as of the last call; None after a step that torch reported."""
        self._written = False
        """A manual step was made before other weights were written into the model."""
        self._since_seen = TRUSTED_CALLS
        """Calls since an optimizer step was seen; initially none has been."""
        self._moving = 0
        """Calls in a row after which the values had changed although no optimizer step was seen."""
        self._calls = self._unstepped = self._without_gradients = self._empty = 0
        self._warned: set[str] = set()

    def called(self, tokens: int, *, stepped: bool) -> int | None:
        """A session call on `tokens` tokens. Returns the tokens of the inner step that has ended; None if none has."""
        written, self._written = self._was_written(), False
        self._writes = None if stepped else 0
        self._since_seen = 0 if stepped or written else self._since_seen + 1
        self._note_window()
        if stepped or written or self._moved():
            counted, self.pending_tokens = self.pending_tokens + tokens, 0
            self._empty = self._empty + 1 if not counted else 0
            return counted
        self._unstepped += 1
        if _gradients_live(self._parameters):
            self.pending_tokens += tokens
        else:
            self._without_gradients += 1
            self.pending_tokens = 0
        return None

    def left(self) -> None:
        """The call ends; adoptions are written."""
        if self._writes is not None:
            self._writes = self._count_writes()
        self._sample = self._take_sample() if self._watches_values() else None

    def before_swap(self) -> None:
        """Other weights are about to be written into the model for a while."""
        self._written = self._was_written()

    def after_swap(self) -> None:
        """The learner's own weights are back."""
        if self._writes is not None:
            self._writes = self._count_writes()

    def warnings(self) -> list[tuple[str, str]]:
        """(event, sentence) of the warnings to log now, each once."""
        if self._unstepped < UNSTEPPED_CALLS and self._empty < EMPTY_STEPS:
            return []
        return list(self._due_warnings())

    def _due_warnings(self) -> Iterable[tuple[str, str]]:
        if self._unstepped >= UNSTEPPED_CALLS:
            skipped = 2 * self._without_gradients >= self._unstepped
            event = "steps_skipped" if skipped else "calls_without_step"
            yield from self._once(event, (_SKIPPED if skipped else _MICRO).format(self._unstepped, self._calls))
        if self._empty >= EMPTY_STEPS:
            yield from self._once("no_tokens", _EMPTY.format(self._empty))

    def _once(self, event: str, sentence: str) -> Iterable[tuple[str, str]]:
        if event not in self._warned:
            self._warned.add(event)
            yield event, sentence

    def _note_window(self) -> None:
        if self._calls == WINDOW_CALLS:
            self._calls = self._unstepped = self._without_gradients = 0
        self._calls += 1

    # --- steps that no hook reports ----------------------------------------------------------------------------------
    def _was_written(self) -> bool:
        """Whether tensors were written in place since the last call. Torch counts writes, so this does not wait for the
        device.

        It detects a step whose hooks were removed (torch.compile does so in some versions of torch) and a manual step,
        however few values it changed.
        """
        return self._written or (self._writes is not None and self._writes != self._count_writes())

    def _count_writes(self) -> int:
        return sum(map(_version, self._writable))

    def _watches_values(self) -> bool:
        return self._since_seen >= TRUSTED_CALLS and self._moving < WINDOW_CALLS

    def _moved(self) -> bool:
        """Whether the model has changed without a counted write: through `.data`, or by a replayed graph.

        Once it has changed WINDOW_CALLS times in a row, each call counts as a step: comparing waits for the device.
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
    """Functions that read some elements of some of the tensors."""
    full = [source for source in sources if source.numel()]
    some = full[:: max(1, -(-len(full) // SAMPLED_TENSORS))]

    def reader(tensor: Tensor) -> Callable[[], Tensor]:
        last, count = tensor.numel() - 1, min(SAMPLED_ELEMENTS, tensor.numel())
        indices = [last * i // max(1, count - 1) for i in range(count)]
        places = torch.tensor(indices, dtype=torch.int64, device=tensor.device)
        return lambda: tensor.detach().reshape(-1)[places].to("cpu", torch.float64)

    return [reader(tensor) for tensor in some]


def _gradients_live(parameters: Iterable[Tensor]) -> bool:
    """Whether there are gradients, all finite and not all zero, from which a later optimizer step may learn.

    Waits once for each device.
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
    "scaler skipped the step, or it was not made): they are not counted and their tokens are not merged; lower the "
    "loss scale, or train in bf16"
)
_MICRO = (
    "{0} of the last {1} calls of session.step() had no optimizer step before them: they are not counted as steps, and "
    "their tokens are counted with the next step; call session.step() once for each optimizer step, with the tokens of "
    "all its micro-batches"
)
_EMPTY = (
    "the last {0} steps were on tokens=0, so nothing of this learner is merged; pass session.step(tokens=...) the "
    "number of tokens (or samples) that the step was trained on"
)
