"""Reporting intervals for lasting conditions such as a peer's silence: soon, then at doubling intervals. Pure."""

from __future__ import annotations

import math

FIRST_SECONDS = 8.0
"""A silence is first reported after this time, and again each time it has lasted twice as long."""
LONGEST_SECONDS = 600.0
"""But at least this often."""


class Repeats:
    """Reports of one lasting condition: the interval between two reports doubles each time."""

    def __init__(
        self, first_seconds: float, longest_seconds: float = LONGEST_SECONDS, *, due_at: float = -math.inf
    ) -> None:
        """`first_seconds`, `longest_seconds`: first and longest interval. `due_at`: time of the first report."""
        self._first, self._longest = first_seconds, longest_seconds
        self._pause, self._due_at = first_seconds, due_at

    def due(self, now: float) -> bool:
        """Whether to report it now. A condition absent for a whole interval after its report was due is a new one."""
        if now < self._due_at:
            return False
        if now >= self._due_at + self._pause:
            self._pause = self._first
        self._due_at = now + self._pause
        self._pause = min(2 * self._pause, self._longest)
        return True


class Silence:
    """Reports of one peer's silence: `report_due` is called often during a silence, `end` when something is heard."""

    def __init__(self, first_seconds: float = FIRST_SECONDS) -> None:
        self._first = first_seconds
        self._was_reported = False
        self._repeats = self._fresh()

    def report_due(self, seconds: float) -> bool:
        """Whether to report now a silence that has lasted `seconds`."""
        is_due = self._repeats.due(seconds)
        self._was_reported |= is_due
        return is_due

    def end(self) -> bool:
        """Something was heard; returns whether the silence had been reported, so that its end is reported too."""
        was_reported, self._was_reported, self._repeats = self._was_reported, False, self._fresh()
        return was_reported

    def _fresh(self) -> Repeats:
        return Repeats(self._first, due_at=self._first)
