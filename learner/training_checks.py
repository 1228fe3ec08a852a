"""Training checks: is the loss finite, does the optimizer keep adopted values, do 16-bit parameters move at all, does
the learning rate follow the run?
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common.errors import SettingError
from ..common.printable import printable
from .model_layout import Optimizers, as_list
from .replica import cuda_event

SAMPLE = 1024
"""Elements of a tensor that the checks compare."""
PENDING_LOSSES = 4


class LossWatch:
    """The newest known loss. A loss on an accelerator is read once its copy has arrived, without waiting."""

    def __init__(self) -> None:
        self.value: float | None = None
        """The newest finite loss; None before there was one."""
        self._pending: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def take(self, loss: float | Tensor | None) -> bool:
        """Take a loss. Returns False if it, or an earlier one that has arrived meanwhile, is not finite."""
        finite = self._arrived()
        if isinstance(loss, Tensor):
            if loss.numel() != 1 or loss.is_complex():
                raise SettingError(f"loss must be one number, not a {loss.dtype} tensor of shape {list(loss.shape)}")
            loss = loss.detach().reshape(())
            if loss.is_cuda:
                self._copy_to_host(loss)
                return finite
        return finite if loss is None else self._note(_number(loss)) and finite

    def forget_pending(self) -> None:
        """Drop losses that have not arrived: they belong to a model that was reset."""
        self._pending.clear()

    def _note(self, value: float) -> bool:
        if math.isfinite(value):
            self.value = value
        return math.isfinite(value)

    def _copy_to_host(self, loss: Tensor) -> None:
        if len(self._pending) < PENDING_LOSSES:
            host = torch.empty((), dtype=loss.dtype, device="cpu", pin_memory=True)
            host.copy_(loss, non_blocking=True)
            event = cuda_event(loss.device)
            self._pending.append((event, host))

    def _arrived(self) -> bool:
        finite = True
        while self._pending and self._pending[0][0].query():  # type: ignore[no-untyped-call]
            finite &= self._note(float(self._pending.popleft()[1]))
        return finite


def _number(loss: float | Tensor) -> float:
    """A loss of any numeric type as a float; infinity beyond the range of floats."""
    try:
        return float(loss)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        raise SettingError(f"loss must be one number, not {printable(repr(loss)[:80])}") from None


class AdoptionCheck:
    """Does the model still hold the adopted values one step later, or has something restored the old ones?

    An optimizer with hidden masters, or a wrapper that gathers parameters from elsewhere, silently undoes every
    adoption. If an adoption moved the model by far more than an inner step does, then one step later the values are
    close either to the adopted ones or to the old ones. If it did not, the check is inconclusive.
    """

    CLEAR = 10.0
    """The adoption must have moved the sample by this many inner steps."""

    def __init__(self, tensor: Tensor) -> None:
        """tensor: holds training state of a fragment that is not adopted yet."""
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
        """After each inner step. True: the adoption held, or the check is inconclusive. False: it was undone. None:
        call again after the next step.
        """
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


@dataclass
class _Unmoved:
    """A 16-bit parameter that has not moved so far."""

    name: str
    tensor: Tensor
    fragment: int
    sample: Tensor


class LowPrecisionCheck:
    """Do 16-bit parameters move, if no tensor of more bits accumulates their steps?

    A step smaller than half the distance between two numbers of the dtype changes nothing, however often it is made.
    Writes of adoptions do not count, nor do steps while the learning rate rises, since they may still grow.
    """

    STEPS = 32
    LOOKS = 32
    """Most optimizer steps at which gradients are examined; a parameter that had none by then is not reported."""

    def __init__(self, tensors: Sequence[tuple[str, Tensor, int]]) -> None:
        """tensors: (name, parameter, fragment) of the parameters that are stepped in 16 bits."""
        self._suspects = [_Unmoved(name, tensor, fragment, _sample_of(tensor)) for name, tensor, fragment in tensors]
        self._of = len(self._suspects)
        self._steps = self._looks = 0
        self._rate: float | None = None

    def adopting(self, fragments: Container[int]) -> None:
        """Before these fragments are written."""
        self._suspects = [
            s for s in self._suspects if s.fragment not in fragments or torch.equal(s.sample, _sample_of(s.tensor))
        ]

    def adopted(self, fragments: Container[int]) -> None:
        """After they were."""
        for suspect in self._suspects:
            if suspect.fragment in fragments:
                suspect.sample = _sample_of(suspect.tensor)

    @property
    def over(self) -> bool:
        """The check is complete."""
        return not self._suspects

    @property
    def wants_rate(self) -> bool:
        """Steps are still being counted."""
        return not self.over and self._steps < self.STEPS

    def stepped(self, rate: float | None) -> bool:
        """After each inner step. Returns True once, when the gradients of the unmoved parameters are to be examined.

        rate: the learning rate of this step, if it is known without waiting.
        """
        if not self.wants_rate:
            return False
        rises, self._rate = rate is not None and self._rate is not None and rate > self._rate, rate
        self._steps = 0 if rises else self._steps + 1
        if self._steps == self.STEPS:
            self._suspects = [s for s in self._suspects if torch.equal(s.sample, _sample_of(s.tensor))]
        return self._steps == self.STEPS and bool(self._suspects)

    def verdict(self, optimizer: torch.optim.Optimizer) -> str:
        """Call right after a step of `optimizer`, while its gradients exist. Returns a warning, or ''."""
        self._looks += 1
        pushed = {
            id(tensor): tensor.grad
            for group in optimizer.param_groups
            if float(group.get("lr", 1.0)) != 0
            for tensor in group["params"]
            if tensor.grad is not None
        }
        still = [
            s
            for s in self._suspects
            if (gradient := pushed.get(id(s.tensor))) is not None
            and gradient.any()
            and torch.equal(s.sample, _sample_of(s.tensor))
        ]
        if still or self._looks >= self.LOOKS:
            self._suspects = []
        if not still:
            return ""
        first, dtype = still[0], str(still[0].tensor.dtype).removeprefix("torch.")
        return (
            f"{len(still)} of {self._of} parameters in 16 bits, first {first.name} ({dtype}), have not moved in "
            f"{self.STEPS} steps though their gradients are not zero: the steps are smaller than {dtype} can hold; let "
            "the optimizer step float32 copies and give them to join(masters=...), or train the model in float32 under "
            "autocast"
        )


def _sample_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].clone()


class LearningRateCheck:
    """Does the learning rate of a learner that joined in mid-run follow its own steps instead of the run's?"""

    FALLS = 8

    def __init__(self) -> None:
        self._last: float | None = None
        self._falls = 0

    def stepped(self, rate: float | None) -> bool:
        """After each inner step, as long as the run's progress was never read. Returns True when a warning is due."""
        if rate is not None and self._last is not None and rate < self._last:
            self._falls += 1
        self._last = rate
        return self._falls >= self.FALLS


def rate_of(optimizers: Sequence[torch.optim.Optimizer]) -> float | None:
    """Sum of the learning rates of all groups; None if one is on a device, so that reading it would wait."""
    total = 0.0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group.get("lr", 0.0)
            if isinstance(rate, Tensor) and rate.device.type != "cpu":
                return None
            total += float(rate)
    return total


def moments_of(optimizer: torch.optim.Optimizer) -> Mapping[Any, Any]:
    """Tensor -> its optimizer state; empty before the first step, and for optimizers without `state`."""
    return getattr(optimizer, "state", {})


@torch.no_grad()
def heal_moments(optimizer: Optimizers) -> int:
    """Zero every optimizer state tensor that is not finite, since it would undo a reset. Returns how many."""
    healed = 0
    for each in as_list(optimizer):
        for state in moments_of(each).values():
            for value in state.values():
                if isinstance(value, Tensor) and value.is_floating_point() and not torch.isfinite(value).all():
                    with torch.inference_mode(mode=value.is_inference()):
                        value.zero_()
                    healed += 1
    return healed
