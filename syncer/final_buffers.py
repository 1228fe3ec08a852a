"""Final buffers: selects the learner whose static tensors the final model gets, and assembles its chunks.

Learners offer static tensors that their training has changed. One of them is asked for them; another is asked if it
falls silent, stalls or sends invalid data. No socket, clock or disk: complete payloads are checked and stored by the
checkpoint writer's thread.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from ..common.errors import Malformed
from ..common.fragments import Plan
from ..common.static_tensor_format import sizes, unpack
from ..common.wire import Assembly, Buffers
from .ledger import Who
from .membership import SILENCE_SECONDS

STALL_SECONDS = 8.0
"""A selected learner that sends no new chunk for this long is replaced, even if it is heard."""


@dataclass(frozen=True, kw_only=True)
class ReceivedBuffers:
    """A complete payload of one learner, not checked yet."""

    last: Buffers
    """The chunk that completed it."""
    payload: memoryview


@dataclass
class FinalBuffers:
    """Offers of static tensors that have changed, and the transfer in progress."""

    source: Who | None = None
    """The learner that is asked for them."""
    held: bool = False
    """The buffers of one learner are complete and checked."""
    checking: ReceivedBuffers | None = None
    """A complete payload that is being checked and stored."""
    offered: bool = False
    """A learner reported that some of its static tensors have changed."""
    _offers: dict[Who, tuple[int | None, float]] = field(default_factory=dict)
    """(number of tensors, when it was last heard); None = its training thread has not reported it yet."""
    _rejected: set[Who] = field(default_factory=set)
    _failed: dict[Who, str] = field(default_factory=dict)
    _assembly: Assembly | None = None
    _progress_at: float = 0.0
    """When the source was selected, or its last new chunk arrived."""

    @property
    def settled(self) -> bool:
        """There is nothing left to wait for."""
        return self.held or not (self._offers or self.checking)

    @property
    def failed(self) -> list[str]:
        """One sentence for each selected learner that failed to deliver."""
        return [f"{name} {why}" for (name, _), why in self._failed.items()]

    def offer(self, who: Who, tensors: int | None, now: float) -> None:
        """A learner that holds the final model reports how many of its static tensors have changed."""
        if tensors == 0 or who in self._rejected:
            self._offers.pop(who, None)
            return
        self.offered |= tensors is not None
        self._offers[who] = (tensors, now)

    def select_source(self, now: float) -> None:
        """Select the first learner that made an offer, for as long as it is heard and sends new chunks."""
        if self.held or self.checking:
            return
        for who in [who for who, (_, heard_at) in self._offers.items() if now - heard_at >= SILENCE_SECONDS]:
            del self._offers[who]
            if who == self.source:
                self._failed[who] = "fell silent"
        if self.source is not None and self.source in self._offers and now - self._progress_at >= STALL_SECONDS:
            self._reject(self.source, f"sent nothing new for {STALL_SECONDS:g} s")
        if self.source not in self._offers:
            able = (who for who, (tensors, _) in self._offers.items() if tensors)
            self.source, self._assembly, self._progress_at = next(able, None), None, now

    def add_chunk(self, message: Buffers, plan: Plan, epoch: int, now: float) -> ReceivedBuffers | None:
        """Add one chunk; returns the complete payload, still to be checked, after the last one.

        Malformed if the chunk is invalid; if it came from the selected learner, that learner is rejected.
        """
        who = (message.name, message.incarnation)
        if self.held:
            return None
        if who != self.source:
            raise Malformed("stranger", "not the learner that was asked for its buffers")
        if message.epoch != epoch:
            raise Malformed("epoch", f"{message.epoch}, now {epoch}")
        if self.checking:
            return None
        try:
            self.checking = self._add(message, plan, now)
        except Malformed as error:
            self._reject(who, f"sent invalid buffers ({error})")
            self.select_source(now)
            raise
        return self.checking

    def record_check(self, refused: str, now: float) -> None:
        """Record the result of the check: '' = accepted; otherwise why not, and another learner is asked."""
        received, self.checking = self.checking, None
        self.held = not refused
        if received is not None and refused:
            self._reject((received.last.name, received.last.incarnation), refused)
            self.select_source(now)

    def _reject(self, who: Who, why: str) -> None:
        self._rejected.add(who)
        self._failed[who] = why
        self._offers.pop(who, None)

    def _add(self, message: Buffers, plan: Plan, now: float) -> ReceivedBuffers | None:
        if message.fragment != plan.static_index:
            raise Malformed("fragment", f"{message.fragment}, the static part is {plan.static_index}")
        if message.size not in sizes(plan.layout):
            raise Malformed("size", f"{message.size} bytes for a static part of {plan.layout.static_bytes}")
        self._offers[message.name, message.incarnation] = (1, now)
        self._assembly = self._assembly or Assembly(message.size)
        before = len(self._assembly.missing)
        complete = self._assembly.add(message)
        if len(self._assembly.missing) < before:
            self._progress_at = now
        return ReceivedBuffers(last=message, payload=self._assembly.payload) if complete else None


def check(plan: Plan, received: ReceivedBuffers) -> dict[int, memoryview]:
    """The changed tensors by index into the layout's static ones. Malformed if the digest differs or a value is not
    finite.
    """
    if hashlib.sha256(received.payload).hexdigest() != received.last.digest:
        raise Malformed("digest", "the final buffers")
    moved = unpack(plan.layout, received.payload)
    for index, values in moved.items():
        spec = plan.layout.static[index]
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if spec.numel and dtype.is_floating_point and not torch.isfinite(torch.frombuffer(values, dtype=dtype)).all():
            raise Malformed("nonfinite", spec.name)
    return moved
