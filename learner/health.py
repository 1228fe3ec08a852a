"""Two watches of the training thread: is the loss still finite, and does the optimizer keep what was adopted?"""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor

from ..common.errors import SettingError
from ..common.printable import printable
from .inventory import Optimizers, as_list
from .replica import cuda_event

SAMPLE = 1024
"""Elements of a fragment's largest tensor that the check of adoption looks at."""
PENDING_LOSSES = 4


class LossWatch:
    """The newest loss that is known. A loss on an accelerator is looked at when it has arrived, without waiting."""

    def __init__(self) -> None:
        self.value: float | None = None
        """The newest finite loss; None before there was one."""
        self._pending: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def take(self, loss: float | Tensor | None) -> bool:
        """Note a loss; False if this one, or an earlier one that has arrived meanwhile, is not finite."""
        fine = self._arrived()
        if isinstance(loss, Tensor):
            if loss.numel() != 1 or loss.is_complex():
                raise SettingError(f"loss must be one number, not a {loss.dtype} tensor of shape {list(loss.shape)}")
            loss = loss.detach().reshape(())
            if loss.is_cuda:
                self._send_for(loss)
                return fine
        return fine if loss is None else self._note(_number(loss)) and fine

    def forget_pending(self) -> None:
        """Losses that have not arrived belong to a model that is gone."""
        self._pending.clear()

    def _note(self, value: float) -> bool:
        if math.isfinite(value):
            self.value = value
        return math.isfinite(value)

    def _send_for(self, loss: Tensor) -> None:
        if len(self._pending) < PENDING_LOSSES:
            host = torch.empty((), dtype=loss.dtype, device="cpu", pin_memory=True)
            host.copy_(loss, non_blocking=True)
            event = cuda_event(loss.device)
            self._pending.append((event, host))

    def _arrived(self) -> bool:
        fine = True
        while self._pending and self._pending[0][0].query():  # type: ignore[no-untyped-call]
            fine &= self._note(float(self._pending.popleft()[1]))
        return fine


def _number(loss: float | Tensor) -> float:
    """A loss of any numeric type as a float; one beyond all floats is not finite."""
    try:
        return float(loss)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        raise SettingError(f"loss must be one number, not {printable(repr(loss)[:80])}") from None


class StickCheck:
    """Does the model still hold what was adopted, one step later, or did something write its own values back?

    An optimizer with hidden masters, or a wrapper that gathers parameters from elsewhere, undoes every adoption
    without a word. Where an adoption moved the model by far more than an inner step does, one step later the values lie
    near what was adopted, or near what was there before. Where it did not, this adoption tells nothing.
    """

    CLEAR = 10.0
    """The adoption must have moved the sample by so many inner steps."""

    def __init__(self, tensor: Tensor) -> None:
        """tensor: where the training state of some fragment is, before it is adopted."""
        self._tensor = tensor
        count = min(SAMPLE, tensor.numel())
        steps = torch.arange(count, dtype=torch.int64, device=tensor.device)
        self._index = (
            steps * (tensor.numel() - 1) // max(1, count - 1)
        )  # in whole numbers: f32 may round up past the end
        self._before = self._sample()
        self._after: Tensor | None = None
        self._next: Tensor | None = None

    def adopted(self) -> None:
        self._after = self._sample()

    def stepped(self) -> bool | None:
        """After each inner step: True = it stuck (or nothing can be said), False = it was undone, None = ask again."""
        if self._after is None:
            return True
        if self._next is None:
            self._next = self._sample()
            return None
        moved = float((self._after - self._before).norm())
        step = float((self._sample() - self._next).norm())
        if not moved > self.CLEAR * step:
            return True
        return bool((self._next - self._after).norm() <= (self._next - self._before).norm())

    def _sample(self) -> Tensor:
        return self._tensor.detach().reshape(-1)[self._index].float().cpu()


@torch.no_grad()
def heal_moments(optimizer: Optimizers) -> int:
    """Zero every tensor of optimizer state that is not finite: kept, it would undo a reset at once. How many."""
    healed = 0
    for each in as_list(optimizer):
        for state in each.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.is_floating_point() and not torch.isfinite(value).all():
                    with torch.inference_mode(mode=value.is_inference()):
                        value.zero_()
                    healed += 1
    return healed
