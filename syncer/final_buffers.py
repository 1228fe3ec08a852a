"""Which learner's buffers the final model gets. Learners offer what their training has made of the static part; one of
them is asked for it, and another one when that one falls silent or sends what it must not. No socket, no clock.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from ..common.errors import Malformed
from ..common.fragments import Plan
from ..common.static_part import sizes, unpack
from ..common.wire import Assembly, Buffers
from .ledger import Who
from .members import SILENCE_SECONDS


@dataclass
class FinalBuffers:
    """Offers of the static tensors that have moved, and the one that is being taken."""

    source: Who | None = None
    """The learner that is asked for them."""
    held: bool = False
    """One learner's are here, complete and checked."""
    offered: bool = False
    """A learner said that some of its static tensors have moved."""
    _offers: dict[Who, tuple[int | None, float]] = field(default_factory=dict)
    """(how many tensors, when it was heard last); None = its training thread has not said yet."""
    _refused: set[Who] = field(default_factory=set)
    _assembly: Assembly | None = None

    @property
    def settled(self) -> bool:
        """Nothing more is to be waited for."""
        return self.held or not self._offers

    def offer(self, who: Who, tensors: int | None, now: float) -> None:
        """A learner that holds the final model says how many of its static tensors have moved."""
        if tensors == 0 or who in self._refused:
            self._offers.pop(who, None)
            return
        self.offered |= tensors is not None
        self._offers[who] = (tensors, now)

    def look(self, now: float) -> None:
        """Choose the learner that is asked: the first that offered, for as long as it is heard."""
        for who in [who for who, (_, heard_at) in self._offers.items() if now - heard_at >= SILENCE_SECONDS]:
            del self._offers[who]
        if self.source not in self._offers and not self.held:
            able = (who for who, (tensors, _) in self._offers.items() if tensors)
            self.source, self._assembly = next(able, None), None

    def take(self, message: Buffers, plan: Plan, epoch: int, now: float) -> dict[int, memoryview] | None:
        """Take one chunk; the moved tensors by index into the layout's static ones when it was the last one.

        Malformed on any misfit: of the learner that was asked, no more is taken then.
        """
        who = (message.name, message.incarnation)
        if self.held:
            return None
        if who != self.source:
            raise Malformed("stranger", "not the learner whose buffers are asked for")
        if message.epoch != epoch:
            raise Malformed("epoch", f"{message.epoch}, now {epoch}")
        try:
            return self._take(message, plan, now)
        except Malformed:
            self._refused.add(who)
            self._offers.pop(who, None)
            self.look(now)
            raise

    def _take(self, message: Buffers, plan: Plan, now: float) -> dict[int, memoryview] | None:
        if message.fragment != plan.static_index:
            raise Malformed("fragment", f"{message.fragment}, the static part is {plan.static_index}")
        if message.size not in sizes(plan.layout):
            raise Malformed("size", f"{message.size} bytes for a static part of {plan.layout.static_bytes}")
        self._offers[message.name, message.incarnation] = (1, now)
        self._assembly = self._assembly or Assembly(message.size)
        if not self._assembly.add(message):
            return None
        payload = self._assembly.payload
        if hashlib.sha256(payload).hexdigest() != message.digest:
            raise Malformed("digest", "the final buffers")
        moved = unpack(plan.layout, payload)
        _check_finite(plan, moved)
        self.held = True
        return moved


def _check_finite(plan: Plan, moved: dict[int, memoryview]) -> None:
    for index, values in moved.items():
        spec = plan.layout.static[index]
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if spec.numel and dtype.is_floating_point and not torch.isfinite(torch.frombuffer(values, dtype=dtype)).all():
            raise Malformed("nonfinite", spec.name)
