"""Deltas that are finite and well formed, yet absurd: a norm far beyond what this fragment's merges have had."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from statistics import median

NORM_FACTOR = 100.0
NORM_WINDOW = 32
NORM_AFTER = 8
"""Judged only after so many merged deltas: at the start nothing is known of what is usual."""
INSISTS_AFTER = 8
"""Refusals of one learner at one fragment, more than twice as many as lead to its reset, after which it insists."""


class NormScreen:
    """Per fragment, the norms of the last 32 merged deltas, for each inner step that they cover: the first ones cover a
    step or two, at the lowest learning rate, and later ones H of them.

    What is usual may change at once for everybody (a schedule that starts again, a layer that thaws, an outer step that
    overshoots). So who is refused again and again is counted, and where that becomes more than half of the learners it
    is they who say what is usual: otherwise that fragment would never be merged again, and the run would never end.
    """

    def __init__(self, fragments: int, most_steps: int) -> None:
        """most_steps: so many are believed at most, since who states more would be allowed more."""
        self._most_steps = most_steps
        self._norms: list[deque[float]] = [deque(maxlen=NORM_WINDOW) for _ in range(fragments)]
        self._refused: list[dict[str, tuple[int, float]]] = [{} for _ in range(fragments)]
        """Per fragment, since its last merge: learner -> (refusals, the norm of the last one)."""

    def absurd(self, fragment: int, norm: float, steps: int, name: str, live: Collection[str]) -> bool:
        """True if `norm`, over `steps`, of `name` among the `live` learners, is over 100 times the median (0 judges
        nothing).
        """
        norm = self._a_step(norm, steps)
        known = self._norms[fragment]
        usual = median(known) if len(known) >= NORM_AFTER else 0.0
        if not usual or norm <= NORM_FACTOR * usual:
            return False
        refused = self._refused[fragment]
        refused[name] = (refused.get(name, (0, 0.0))[0] + 1, norm)
        insist = [last for who, (times, last) in refused.items() if who in live and times >= INSISTS_AFTER]
        if 2 * len(insist) <= len(live):
            return True
        known.clear()
        known.extend([median(insist)] * NORM_AFTER)
        refused.clear()
        return norm > NORM_FACTOR * median(insist)

    def merged(self, fragment: int, norm: float, steps: int) -> None:
        self._norms[fragment].append(self._a_step(norm, steps))
        self._refused[fragment].clear()

    def _a_step(self, norm: float, steps: int) -> float:
        return norm / min(max(1, steps), self._most_steps)
