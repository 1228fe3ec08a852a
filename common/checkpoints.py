"""Names and age of a run's checkpoint folders, for the syncer that writes them and for the monitor."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

CHECKPOINT = "checkpoint-"
"""Prefix of a checkpoint folder's name, before its number."""


def saved_at(directory: Path) -> float | None:
    """Unix time at which the newest checkpoint in `directory` was written; None if there is none."""
    times = []
    with suppress(OSError):
        for state in directory.glob(f"{CHECKPOINT}*/state.json"):
            with suppress(OSError):  # the oldest one may be removed meanwhile
                times.append(state.stat().st_mtime)
    return max(times, default=None)
