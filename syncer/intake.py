"""Delta chunks become complete, decoded, plausible answers. Everything is checked before memory is taken for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ..common.codec import encoded_bytes
from ..common.errors import Malformed
from ..common.wire import Assembly, Delta
from .ledger import Who
from .merge import norm
from .rounds import Answer, Rounds
from .screen import NormScreen
from .state import GlobalState

Key = tuple[Who, int]
"""(learner, fragment): one delta at a time is being assembled for each."""


@dataclass(frozen=True)
class Decoded:
    """A delta as it is merged: flat [fragment.length], f32 (f64 from codec f32), and its L2 norm."""

    delta: Tensor
    norm: float


class Intake:
    """Assembles deltas. Memory: at most one payload a member and open call."""

    def __init__(self, rounds: Rounds, state: GlobalState, screen: NormScreen) -> None:
        self._rounds, self._state, self._screen = rounds, state, screen
        self._assemblies: dict[Key, tuple[tuple[int, int], Assembly]] = {}

    def take(self, delta: Delta) -> Answer | None:
        """The answer that this chunk completes, None while chunks are missing. Malformed with the reason otherwise."""
        rounds = self._rounds
        if delta.epoch != rounds.epoch:
            raise Malformed("epoch", f"{delta.epoch}, now {rounds.epoch}")
        if delta.fragment >= len(rounds.versions):
            raise Malformed("fragment", f"{delta.fragment} of {len(rounds.versions)}")
        answer = answer_of(delta)
        reason = rounds.refusal(answer)
        if reason:
            raise Malformed(reason)
        payload = self._assemble(delta)
        return None if payload is None else self._decoded(answer, delta.codec, payload)

    def forget_closed(self) -> None:
        """Drop what belongs to calls that are no longer open."""
        for key in [k for k in self._assemblies if k[1] not in self._rounds.calls]:
            del self._assemblies[key]

    def _assemble(self, delta: Delta) -> memoryview | None:
        size = encoded_bytes(self._state.settings.codec_up, self._state.plan.fragments[delta.fragment].length)
        if delta.size != size or delta.codec != self._state.settings.codec_up:
            raise Malformed("size", f"{delta.size} bytes of {delta.codec} where {size} belong")
        key, turn = ((delta.name, delta.incarnation), delta.fragment), (delta.slot, delta.attempt)
        known = self._assemblies.get(key)
        if known is None or known[0] != turn:
            known = self._assemblies[key] = (turn, Assembly(size))
        if not known[1].add(delta):
            return None
        del self._assemblies[key]
        return known[1].payload

    def _decoded(self, answer: Answer, codec: str, payload: memoryview) -> Answer:
        vector = self._state.decode(answer.fragment, codec, payload, answer.base_version)
        length = norm(vector)
        live = [member.name for member in self._rounds.members.live()]
        if self._screen.absurd(answer.fragment, length, answer.steps, answer.who[0], live):
            raise Malformed("norm", f"{length:.3g}, over 100 times as much a step as this fragment's merges have had")
        return replace(answer, vector=Decoded(vector, length))


def answer_of(delta: Delta) -> Answer:
    """What a Delta's header says, without its payload."""
    return Answer(
        who=(delta.name, delta.incarnation),
        fragment=delta.fragment,
        slot=delta.slot,
        attempt=delta.attempt,
        base_version=delta.base_version,
        tokens_from=delta.tokens_from,
        tokens_to=delta.tokens_to,
        steps_from=delta.steps_from,
        steps_to=delta.steps_to,
    )
