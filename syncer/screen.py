"""Deltas that are finite and well formed, yet absurd: a norm far beyond what this fragment's merges have had."""

from __future__ import annotations

from collections import deque
from statistics import median

NORM_FACTOR = 100.0
NORM_WINDOW = 32
NORM_AFTER = 8
"""Judged only after so many merged deltas: at the start nothing is known of what is usual."""


class NormScreen:
    """Per fragment, the norms of the last 32 merged deltas."""

    def __init__(self, fragments: int) -> None:
        self._norms: list[deque[float]] = [deque(maxlen=NORM_WINDOW) for _ in range(fragments)]

    def absurd(self, fragment: int, norm: float) -> bool:
        """True if `norm` is over 100 times the median (a median of 0 judges nothing)."""
        known = self._norms[fragment]
        usual = median(known) if len(known) >= NORM_AFTER else 0.0
        return usual > 0 and norm > NORM_FACTOR * usual

    def merged(self, fragment: int, norm: float) -> None:
        self._norms[fragment].append(norm)
