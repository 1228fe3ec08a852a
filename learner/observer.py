"""Looking at a run without taking part: an observer hears and fetches the public model, and has no vote."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import nn

from ..common.config import RunSettings, TaskSettings
from ..common.errors import DilocoError
from ..common.fragments import Plan
from ..common.wire import Beat
from .discover import discover
from .identity import Owner, identify, layout_to_send
from .join_wait import await_joined, member
from .link import Link
from .mailbox import Mailbox
from .model_layout import inventory
from .replica import Replica, outside_inference_mode
from .timing import Progress

__all__ = ["Observer", "discover"]

CLOSE_SECONDS = 3.0


class Observer:
    """The public model of a live run, kept up to date in a thread of its own.

        with Observer("tcp://HOST:5550", model) as seen:
            versions = seen.load()      # now `model` holds the newest public weights

    `model` must have the layout of the run's model; it is written by `load` alone. Raises in the making what `join`
    raises: SettingError, Refused, PeerLost. `key`: a key file of role observer or learner, for a broker with keys.
    """

    @outside_inference_mode
    def __init__(
        self,
        address: str,
        model: nn.Module,
        *,
        run: str = "",
        name: str | None = None,
        key: Path | str | None = None,
        join_timeout_seconds: float = 60.0,
    ) -> None:
        entries = inventory(model)
        layout = layout_to_send(entries)
        config = member(address, run, name, key, ("observer", "learner"), join_timeout_seconds=join_timeout_seconds)
        self._mailbox = Mailbox()
        self._link = Link(config, identify(config.run, config.name, entries, layout, observer=True), self._mailbox)
        joined = await_joined(self._link)
        self.plan: Plan = joined.plan
        self.settings: RunSettings = joined.settings
        self.task: TaskSettings | None = joined.task
        self._replica = Replica(model, joined.plan)
        self._replica.load_static(joined.static)
        self._owner = Owner(f"observer {config.name}")

    @property
    def beat(self) -> Beat:
        """What the syncer told last. Raises what the link failed with."""
        self.check()
        if self._mailbox.beat is None:
            raise DilocoError("no beat was heard")
        return self._mailbox.beat

    @property
    def progress(self) -> Progress:
        self._owner.check("progress")
        return self._mailbox.progress(time.monotonic())

    @property
    def finished(self) -> bool:
        """The run is over, and what `load` writes is its final model."""
        return self._mailbox.final

    @property
    def versions(self) -> tuple[int, ...]:
        """The newest version of each fragment that is here."""
        return tuple(public.version for public in self._mailbox.whole)

    def load(self) -> tuple[int, ...]:
        """Write the newest public model into the model; the version of each fragment."""
        self.check()
        whole = self._mailbox.whole
        self._replica.show([public.vector for public in whole])
        return tuple(public.version for public in whole)

    def check(self) -> None:
        """Raise what the link failed with, if it did; DilocoError in a process that was forked from this one."""
        self._owner.check("a look at the run")
        failure = self._mailbox.failure
        if failure is not None:
            raise failure

    def close(self) -> None:
        if not self._owner.here:
            return
        self._link.leave("left")
        if not self._link.join_thread(CLOSE_SECONDS):
            self._link.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
