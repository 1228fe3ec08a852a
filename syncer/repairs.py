"""Fetch requests, gathered for 100 ms and answered once for all who ask. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..common.wire import Fetch

GATHER_SECONDS = 0.1


@dataclass(frozen=True)
class Repair:
    """Send these chunks of this fragment once: its last update, its keyframe, or version 0."""

    what: str
    fragment: int
    chunks: tuple[int, ...]


@dataclass
class Repairs:
    """What is wanted and not sent yet. Memory: one set of chunk numbers a fragment and kind."""

    asked_at: float = float("-inf")
    """When the last Fetch came."""
    due_at: float | None = None
    """When the gathered requests are answered; None while there are none."""
    _wanted: dict[tuple[str, int], set[int]] = field(default_factory=dict)

    def ask(self, fetch: Fetch, now: float) -> None:
        self.asked_at = now
        self._wanted.setdefault((fetch.what, fetch.fragment), set()).update(fetch.chunks)
        if self.due_at is None:
            self.due_at = now + GATHER_SECONDS

    def due(self, now: float) -> list[Repair]:
        """What to send now, each chunk once, in order of kind and fragment."""
        if self.due_at is None or now < self.due_at:
            return []
        wanted, self._wanted, self.due_at = self._wanted, {}, None
        return [Repair(what, fragment, tuple(sorted(chunks))) for (what, fragment), chunks in sorted(wanted.items())]
