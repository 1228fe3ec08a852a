"""Observer of a live run: receives the public model without taking part in training."""

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
    """The public model of a live run, kept up to date by a network thread.

        with Observer("tcp://HOST:5550", model) as observer:
            versions = observer.load()      # now `model` holds the newest public weights

    address: tcp://HOST:PORT of the broker.
    model: a module with the layout of the run's model. Only the constructor (static tensors) and `load` write it.
    run, name: as of `join`. key: a key file of role observer or learner, for a broker that requires keys.
    join_timeout_seconds: longest time without progress before PeerLost is raised.

    The constructor blocks until the public model has arrived. It raises what `join` raises: SettingError, Refused,
    PeerLost, LimitReached. Every other call raises the failure of the network thread, and DilocoError in a process that
    was forked from this one.
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
        """The newest beat of the syncer."""
        self.check()
        if self._mailbox.beat is None:
            raise DilocoError("no beat has been received")
        return self._mailbox.beat

    @property
    def progress(self) -> Progress:
        """Progress of the run: `.step` of `.steps` global steps, `.fraction` from 0 to 1."""
        self._owner.check("progress")
        return self._mailbox.progress(time.monotonic())

    @property
    def finished(self) -> bool:
        """The run is over, and `load` writes its final model."""
        return self._mailbox.final

    @property
    def versions(self) -> tuple[int, ...]:
        """The newest version of each fragment that has arrived."""
        return tuple(public.version for public in self._mailbox.public)

    def load(self) -> tuple[int, ...]:
        """Write the newest public model into the model. Returns the version of each fragment."""
        self.check()
        public = self._mailbox.public
        self._replica.show([fragment.vector for fragment in public])
        return tuple(fragment.version for fragment in public)

    def check(self) -> None:
        """Raise the failure of the network thread, if it has failed; DilocoError in a forked process."""
        self._owner.check("a call of the observer")
        failure = self._mailbox.failure
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Disconnect; takes 3 s at most. Closing twice has no effect."""
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
