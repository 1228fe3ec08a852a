"""The syncer's steady clock: seconds in which it could listen. What it slept through is nobody else's lateness."""

from __future__ import annotations

import time

PAUSE_SECONDS = 2.0
"""A turn of the loop that took longer than this was a pause (suspended, swapped out, a very long merge)."""


class SteadyClock:
    """Monotonic seconds that stand still while this process was paused or had no broker."""

    def __init__(self) -> None:
        self._turned_at = time.monotonic()
        self._forgiven = 0.0
        self._last = 0.0

    def now(self) -> float:
        """Seconds since an arbitrary moment; never less than before."""
        self._last = max(self._last, time.monotonic() - self._forgiven)
        return self._last

    def turn(self, *, connected: bool) -> float:
        """Once a turn of the loop: forgive what it took if nothing could be heard. Seconds forgiven."""
        real = time.monotonic()
        took, self._turned_at = real - self._turned_at, real
        pause = took if not connected else took - PAUSE_SECONDS / 2 if took > PAUSE_SECONDS else 0.0
        self._forgiven += pause
        return pause
