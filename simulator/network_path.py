"""Network path between a virtual learner and the syncer: latency and bandwidth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NetworkPath:
    """Properties of the path between each learner and the syncer."""

    latency_seconds: float = 0.01
    """One-way latency."""
    megabit: float = 0.0
    """Mbit/s in each direction of a learner's link; 0 = no limit."""

    def seconds(self, size: int) -> float:
        """Transfer time of `size` bytes."""
        return size * 8 / (self.megabit * 1e6) if self.megabit else 0.0
