"""Where a run's checkpoints are, for the syncer that writes them and for those who only look."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

CHECKPOINT = "checkpoint-"
"""What the folder of a checkpoint is called, before its number."""


def saved_at(directory: Path) -> float | None:
    """When the newest checkpoint in `directory` was written, in unix seconds; None where none is seen."""
    times = []
    with suppress(OSError):
        for place in directory.glob(f"{CHECKPOINT}*/state.json"):
            with suppress(OSError):  # the oldest, which is being removed
                times.append(place.stat().st_mtime)
    return max(times, default=None)
