"""Before a syncer speaks it listens: which epoch and which versions does the wire know already?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..common.wire import Alive, Beat
from .lines import Lines

ABSENT_SECONDS = 5.0
"""How often an absent broker is told of."""
FAR = 2**48
"""No run comes to such an epoch or version. Whoever states one would drive ours, for ever, to where no message can."""


@dataclass
class Survey:
    """The highest epoch heard, and per fragment the highest version that any learner holds."""

    epoch: int = 0
    versions: dict[int, int] = field(default_factory=dict)
    rival: Beat | None = None
    """A Beat of another syncer of this run."""

    def take(self, message: object) -> None:
        if isinstance(message, Beat):
            self.rival = message
            self._versions(message.epoch, message.versions)
        elif isinstance(message, Alive):
            self._versions(message.epoch, message.versions)

    def _versions(self, epoch: int, versions: tuple[int, ...]) -> None:
        if max((epoch, *versions)) > FAR:
            return
        self.epoch = max(self.epoch, epoch)
        for p, version in enumerate(versions):
            self.versions[p] = max(self.versions.get(p, 0), version)


def listen(lines: Lines, seconds: float, stopped: Callable[[], bool], absent: Callable[[float], None]) -> Survey:
    """Hear the run for `seconds`, once the broker is there; `absent` is told every 5 s how long it has been missing."""
    survey, began = Survey(), time.monotonic()
    told, heard_since = began, None
    while not stopped():
        lines.wait(0.1)
        now = time.monotonic()
        if not lines.proven:
            heard_since = None
            if now - told >= ABSENT_SECONDS:
                told = now
                absent(now - began)
            continue
        heard_since = heard_since or now
        for message in lines.receive():
            survey.take(message)
        if now - heard_since >= seconds:
            break
    return survey
