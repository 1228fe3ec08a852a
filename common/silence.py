"""When something that lasts is reported: soon, then ever more seldom, and once more when it ends. Pure."""

from __future__ import annotations

import math

FIRST_SECONDS = 8.0
"""A silence is reported for the first time after so long, and again each time that it has lasted twice as long."""
LONGEST_SECONDS = 600.0
"""But at least this often."""


class Repeats:
    """Reports of one thing that goes on: the pause between two of them doubles each time."""

    def __init__(
        self, first_seconds: float, longest_seconds: float = LONGEST_SECONDS, *, due_at: float = -math.inf
    ) -> None:
        """`first_seconds`, `longest_seconds`: the first pause and the longest. `due_at`: time of the first report."""
        self._first, self._longest = first_seconds, longest_seconds
        self._pause, self._due_at = first_seconds, due_at

    def due(self, now: float) -> bool:
        """Whether it is reported now. A thing that was absent for a whole pause after its report was due is new."""
        if now < self._due_at:
            return False
        if now >= self._due_at + self._pause:
            self._pause = self._first
        self._due_at = now + self._pause
        self._pause = min(2 * self._pause, self._longest)
        return True


class Silence:
    """One peer's silence. To be looked at often while nothing is heard, and to be ended by what is."""

    def __init__(self, first_seconds: float = FIRST_SECONDS) -> None:
        self._first = first_seconds
        self._was_said = False
        self._repeats = self._anew()

    def look(self, seconds: float) -> bool:
        """Whether a silence that has lasted `seconds` is to be reported now."""
        is_due = self._repeats.due(seconds)
        self._was_said |= is_due
        return is_due

    def end(self) -> bool:
        """Something was heard; whether the end is to be reported, since the silence was."""
        was_said, self._was_said, self._repeats = self._was_said, False, self._anew()
        return was_said

    def _anew(self) -> Repeats:
        return Repeats(self._first, due_at=self._first)
