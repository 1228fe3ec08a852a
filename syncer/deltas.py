"""Delta chunks, assembled, decoded and checked before memory is taken for them; deltas that are well formed
and finite but far beyond the usual norm are filtered out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from statistics import median

from torch import Tensor

from ..common.codec import encoded_bytes
from ..common.errors import Malformed
from ..common.wire import Assembly, Delta
from .aggregate import norm
from .global_model import GlobalModel
from .ledger import Who
from .round_events import Answer
from .rounds import Rounds

NORM_FACTOR = 100.0
NORM_WINDOW = 32
NORM_AFTER = 8
"""Merged deltas before the filter judges: at the start the usual norm is unknown."""
PERSISTENT_AFTER = 8
"""Consecutive rejections of one learner at one fragment after which its norms count as persistent: more than
twice those that lead to its reset."""


class NormFilter:
    """Filters deltas by norm. For each fragment it keeps the norms of the last 32 merged deltas, divided by the inner
    steps that they cover: the first ones cover a step or two, later ones H.

    The usual norm may change for all learners at once (a restarted schedule, an unfrozen layer, an outer step that
    overshoots). So rejections are counted, and if more than half of the learners are rejected persistently, their norms
    become the usual ones: otherwise that fragment would never be merged again, and the run would never end.
    """

    def __init__(self, fragments: int, most_steps: int) -> None:
        """most_steps: upper bound of the steps used for a delta, since a larger claim would permit a larger norm."""
        self._most_steps = most_steps
        self._norms: list[deque[float]] = [deque(maxlen=NORM_WINDOW) for _ in range(fragments)]
        self._refused: list[dict[str, tuple[int, float]]] = [{} for _ in range(fragments)]
        """For each fragment, since its last merge: learner -> (rejections, norm of the last one)."""

    def is_implausible(self, fragment: int, norm: float, steps: int, name: str, live: Collection[str]) -> bool:
        """Whether the norm of `name`'s delta over `steps` exceeds 100 times the median, among the `live` learners.
        False while the median is 0.
        """
        norm = self._a_step(norm, steps)
        known = self._norms[fragment]
        usual = median(known) if len(known) >= NORM_AFTER else 0.0
        if not usual or norm <= NORM_FACTOR * usual:
            return False
        refused = self._refused[fragment]
        refused[name] = (refused.get(name, (0, 0.0))[0] + 1, norm)
        persistent = [last for who, (times, last) in refused.items() if who in live and times >= PERSISTENT_AFTER]
        if 2 * len(persistent) <= len(live):
            return True
        known.clear()
        known.extend([median(persistent)] * NORM_AFTER)
        refused.clear()
        return norm > NORM_FACTOR * median(persistent)

    def merged(self, fragment: int, norm: float, steps: int) -> None:
        self._norms[fragment].append(self._a_step(norm, steps))
        self._refused[fragment].clear()

    def _a_step(self, norm: float, steps: int) -> float:
        return norm / min(max(1, steps), self._most_steps)


Key = tuple[Who, int]
"""(learner, fragment): one delta at a time is assembled for each."""


@dataclass(frozen=True)
class DecodedDelta:
    """A decoded delta, flat [fragment.length], f32 (f64 from codec f32), and its L2 norm."""

    delta: Tensor
    norm: float


class DeltaAssembler:
    """Assembles deltas from chunks. Memory: at most one payload for each member and open call."""

    def __init__(self, rounds: Rounds, model: GlobalModel, norm_filter: NormFilter) -> None:
        self._rounds, self._model, self._norm_filter = rounds, model, norm_filter
        self._assemblies: dict[Key, tuple[tuple[int, int], Assembly]] = {}

    def take(self, delta: Delta) -> Answer | None:
        """The answer that this chunk completes; None while chunks are missing. Malformed if the chunk is invalid."""
        rounds = self._rounds
        if delta.epoch != rounds.epoch:
            raise Malformed("epoch", f"{delta.epoch}, now {rounds.epoch}")
        if delta.fragment >= len(rounds.versions):
            raise Malformed("fragment", f"{delta.fragment} of {len(rounds.versions)}")
        answer = _answer_of(delta)
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
        size = encoded_bytes(self._model.settings.codec_up, self._model.plan.fragments[delta.fragment].length)
        if delta.size != size or delta.codec != self._model.settings.codec_up:
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
        vector = self._model.decode(answer.fragment, codec, payload, answer.base_version)
        length = norm(vector)
        live = [member.name for member in self._rounds.members.live()]
        if self._norm_filter.is_implausible(answer.fragment, length, answer.steps, answer.who[0], live):
            raise Malformed("norm", f"{length:.3g}, over 100 times as much a step as this fragment's merges have had")
        return replace(answer, vector=DecodedDelta(vector, length))


def _answer_of(delta: Delta) -> Answer:
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
