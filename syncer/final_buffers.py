"""Which learner's buffers the final model gets. Learners offer what their training has made of the static part; one of
them is asked for it, and another one when that one falls silent, sends nothing or sends what it must not. No socket, no
clock, no disk: what has arrived whole is checked and stored by the checkpoint writer's thread.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from ..common.errors import Malformed
from ..common.fragments import Plan
from ..common.static_tensors import sizes, unpack
from ..common.wire import Assembly, Buffers
from .ledger import Who
from .membership import SILENCE_SECONDS

STALL_SECONDS = 8.0
"""A learner that is asked and sends no new chunk for so long is replaced by another one, even if it is heard."""


@dataclass(frozen=True, kw_only=True)
class ReceivedBuffers:
    """A whole payload of one learner, not checked yet."""

    last: Buffers
    """The chunk that made it whole."""
    payload: memoryview


@dataclass
class FinalBuffers:
    """Offers of the static tensors that have moved, and the one that is being taken."""

    source: Who | None = None
    """The learner that is asked for them."""
    held: bool = False
    """One learner's are here, complete and checked."""
    checking: ReceivedBuffers | None = None
    """Complete, and being checked and stored."""
    offered: bool = False
    """A learner said that some of its static tensors have moved."""
    _offers: dict[Who, tuple[int | None, float]] = field(default_factory=dict)
    """(how many tensors, when it was heard last); None = its training thread has not said yet."""
    _refused: set[Who] = field(default_factory=set)
    _failed: dict[Who, str] = field(default_factory=dict)
    _assembly: Assembly | None = None
    _progress_at: float = 0.0
    """When the source was chosen, or its last new chunk came."""

    @property
    def settled(self) -> bool:
        """Nothing more is to be waited for."""
        return self.held or not (self._offers or self.checking)

    @property
    def failed(self) -> list[str]:
        """Why each learner that was asked in vain has given nothing."""
        return [f"{name} {why}" for (name, _), why in self._failed.items()]

    def offer(self, who: Who, tensors: int | None, now: float) -> None:
        """A learner that holds the final model says how many of its static tensors have moved."""
        if tensors == 0 or who in self._refused:
            self._offers.pop(who, None)
            return
        self.offered |= tensors is not None
        self._offers[who] = (tensors, now)

    def select_source(self, now: float) -> None:
        """Choose the learner that is asked: the first that offered, for as long as it is heard and new chunks come."""
        if self.held or self.checking:
            return
        for who in [who for who, (_, heard_at) in self._offers.items() if now - heard_at >= SILENCE_SECONDS]:
            del self._offers[who]
            if who == self.source:
                self._failed[who] = "fell silent"
        if self.source is not None and self.source in self._offers and now - self._progress_at >= STALL_SECONDS:
            self._refuse(self.source, f"sent nothing new for {STALL_SECONDS:g} s")
        if self.source not in self._offers:
            able = (who for who, (tensors, _) in self._offers.items() if tensors)
            self.source, self._assembly, self._progress_at = next(able, None), None, now

    def add_chunk(self, message: Buffers, plan: Plan, epoch: int, now: float) -> ReceivedBuffers | None:
        """Take one chunk; the whole payload, still to be checked, when it was the last one.

        Malformed on any misfit: of the learner that was asked, no more is taken then.
        """
        who = (message.name, message.incarnation)
        if self.held:
            return None
        if who != self.source:
            raise Malformed("stranger", "not the learner whose buffers are asked for")
        if message.epoch != epoch:
            raise Malformed("epoch", f"{message.epoch}, now {epoch}")
        if self.checking:
            return None
        try:
            self.checking = self._take(message, plan, now)
        except Malformed as wrong:
            self._refuse(who, f"sent what is refused ({wrong})")
            self.select_source(now)
            raise
        return self.checking

    def record_check(self, refused: str, now: float) -> None:
        """The payload that was complete is taken ('') or refused, and why: then another learner is asked."""
        received, self.checking = self.checking, None
        self.held = not refused
        if received is not None and refused:
            self._refuse((received.last.name, received.last.incarnation), refused)
            self.select_source(now)

    def _refuse(self, who: Who, why: str) -> None:
        self._refused.add(who)
        self._failed[who] = why
        self._offers.pop(who, None)

    def _take(self, message: Buffers, plan: Plan, now: float) -> ReceivedBuffers | None:
        if message.fragment != plan.static_index:
            raise Malformed("fragment", f"{message.fragment}, the static part is {plan.static_index}")
        if message.size not in sizes(plan.layout):
            raise Malformed("size", f"{message.size} bytes for a static part of {plan.layout.static_bytes}")
        self._offers[message.name, message.incarnation] = (1, now)
        self._assembly = self._assembly or Assembly(message.size)
        before = len(self._assembly.missing)
        whole = self._assembly.add(message)
        if len(self._assembly.missing) < before:
            self._progress_at = now
        return ReceivedBuffers(last=message, payload=self._assembly.payload) if whole else None


def check(plan: Plan, received: ReceivedBuffers) -> dict[int, memoryview]:
    """The moved tensors by index into the layout's static ones. Malformed unless they are what was sent, and finite."""
    if hashlib.sha256(received.payload).hexdigest() != received.last.digest:
        raise Malformed("digest", "the final buffers")
    moved = unpack(plan.layout, received.payload)
    for index, values in moved.items():
        spec = plan.layout.static[index]
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if spec.numel and dtype.is_floating_point and not torch.isfinite(torch.frombuffer(values, dtype=dtype)).all():
            raise Malformed("nonfinite", spec.name)
    return moved
