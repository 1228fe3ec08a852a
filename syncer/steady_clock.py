"""Steady clock of the syncer. It excludes time in which the process was suspended or disconnected, so that peers are
not timed out for it.
"""

from __future__ import annotations

import time

PAUSE_SECONDS = 2.0
"""A turn of the loop that took longer than this was a pause (suspended, swapped out, a very long merge)."""


class SteadyClock:
    """Monotonic seconds, without the time in which this process was paused or had no broker."""

    def __init__(self) -> None:
        self._turned_at = time.monotonic()
        self._forgiven = 0.0
        self._last = 0.0

    def now(self) -> float:
        """Seconds since an arbitrary moment; never decreases."""
        self._last = max(self._last, time.monotonic() - self._forgiven)
        return self._last

    def turn(self, *, connected: bool) -> float:
        """Call once in each turn of the loop. Returns the seconds excluded since the last call."""
        real = time.monotonic()
        took, self._turned_at = real - self._turned_at, real
        pause = took if not connected else took - PAUSE_SECONDS / 2 if took > PAUSE_SECONDS else 0.0
        self._forgiven += pause
        return pause
