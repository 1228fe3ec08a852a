"""Event journal of a session: the fragments its model adopted at each step boundary, and the progress its loop read.

The file is one of the run's tapes (docs/tapes.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..common.journal import JournalWriter
from ..common.wire import Call
from .counters import Counts
from .identity import Identity
from .mailbox import Arrival, Joined
from .timing import Progress


class LearnerJournal:
    """The journal of one session. Without a folder it writes nothing."""

    def __init__(self, writer: JournalWriter | None) -> None:
        self._writer = writer
        self._progress: float | None = None

    @classmethod
    def of(cls, folder: Path | None, me: Identity, joined: Joined) -> LearnerJournal:
        """The journal of a session that begins with `joined`. Raises SettingError if it cannot be written."""
        if folder is None:
            return cls(None)
        return cls(
            JournalWriter(
                folder, f"{me.name}-{me.incarnation}", of="learner", run=me.run, learner=me.name,
                incarnation=me.incarnation, epoch=joined.epoch, t=joined.t,
                versions=[public.version for public in joined.public], fingerprint=me.layout.fingerprint,
                data_hash=me.data_hash, threads=torch.get_num_threads(), torch=torch.__version__,
            )
        )  # fmt: skip

    def note_progress(self, progress: Progress) -> Progress:
        """The loop reads the run's progress; its learning rate may depend on that."""
        self._progress = progress.exact
        return progress

    def boundary(
        self, now: Counts, arrivals: Sequence[Arrival], *, reset: bool = False, answered: Sequence[Call] = ()
    ) -> None:
        """At this step boundary the model adopted `arrivals`, and then was captured for the calls `answered`."""
        if self._writer is None:
            return
        row: dict[str, Any] = {"steps": now.steps, "tokens": now.tokens}
        if self._progress is not None:
            row["progress"], self._progress = self._progress, None
        if arrivals:
            row["adopted"] = [[a.fragment, a.epoch, a.public.version, int(a.own is not None)] for a in arrivals]
        if reset:
            row["reset"] = True
        if answered:
            row["captured"] = [[call.slot, call.attempt, call.fragment] for call in answered]
        self._writer.write("boundary", **row)

    def close(self, *, finished: bool) -> None:
        if self._writer is not None:
            self._writer.write("close", finished=finished)
            self._writer.close()
            self._writer = None
