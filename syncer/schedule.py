"""Schedule of fragments, moving averages, and the grace window (arXiv 2604.21428, equation 3). Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

EMA_SHARE = 0.25
"""Weight of the newest measurement; the paper gives no value."""


@dataclass(frozen=True)
class Schedule:
    """Slot k opens at global step floor(k H / P) and calls fragment (s + c) mod P, with s = k mod P, c = k div P.

    The rotation by c prevents that a learner at half speed always gets the same fragments.
    """

    H: int
    P: int
    T: int

    def step_of(self, slot: int) -> int:
        return slot * self.H // self.P

    def fragment_of(self, slot: int) -> int:
        cycle, s = divmod(slot, self.P)
        return (s + cycle) % self.P

    def cycle_of(self, slot: int) -> int:
        return slot // self.P

    @property
    def steps_between(self) -> float:
        """H / P: typical inner steps from one slot to the next."""
        return self.H / self.P


@dataclass
class Ema:
    """An exponential moving average; None until the first measurement."""

    value: float | None = None

    def take(self, measured: float) -> None:
        self.value = measured if self.value is None else self.value + EMA_SHARE * (measured - self.value)


def grace_seconds(
    *, tau: int, step: float, quorum: float | None, sync: float | None, gamma: float, limit: float
) -> float:
    """Seconds that a round waits for further answers after its quorum (arXiv 2604.21428, equation 3).

    gamma (tau xi_step - xi_quorum - xi_sync), at least 0 and at most `limit`; `limit` until all three are known.
    """
    if quorum is None or sync is None or step <= 0:
        return limit
    return min(max(gamma * (tau * step - quorum - sync), 0.0), limit)
