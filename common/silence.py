"""When a silence is to be said: soon, then ever more seldom, and once more when it ends. Pure."""

from __future__ import annotations

FIRST_SECONDS = 8.0
"""A silence is said for the first time after so long, and again each time that it has lasted twice as long."""
LONGEST_SECONDS = 600.0
"""But at least this often."""


class Silence:
    """One peer's silence. To be looked at often while nothing is heard, and to be ended by what is."""

    def __init__(self, first_seconds: float = FIRST_SECONDS) -> None:
        self._first = self._due = first_seconds
        self._was_said = False

    def look(self, seconds: float) -> bool:
        """Whether a silence that has lasted `seconds` is to be said now."""
        if seconds < self._due:
            return False
        self._was_said = True
        self._due = seconds + min(seconds, LONGEST_SECONDS)
        return True

    def end(self) -> bool:
        """Something was heard; whether the end is to be said, since the silence was."""
        was_said, self._was_said, self._due = self._was_said, False, self._first
        return was_said
