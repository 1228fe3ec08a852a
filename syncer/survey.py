"""Before a syncer speaks it listens: which epoch and which versions does the wire know already?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..common.wire import Alive, Beat
from .lines import Lines

WAIT_SECONDS = 0.1
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


class Listening:
    """Hears the run from the moment it is made, in a thread of its own: the program has better things to do meanwhile,
    such as loading torch. The lines are the thread's until `survey` or `close` returns.
    """

    def __init__(self, lines: Lines, seconds: float, absent: Callable[[float], None]) -> None:
        """`absent` is told every 5 s how long the broker has been missing."""
        self._lines, self._seconds, self._absent = lines, seconds, absent
        self._survey = Survey()
        self._wanted, self._closed = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="listening", daemon=True)
        self._thread.start()

    def survey(self, stopped: Callable[[], bool]) -> Survey:
        """All that was heard: for `seconds` with a broker at least, and up to now. Less if `stopped`."""
        self._wanted.set()
        while self._thread.is_alive() and not stopped():
            self._thread.join(WAIT_SECONDS)
        self.close()
        if self._failure is not None:
            raise self._failure
        return self._survey

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._listen()
        except BaseException as failure:  # noqa: BLE001 raised where the survey is asked for
            self._failure = failure

    def _listen(self) -> None:
        told = began = time.monotonic()
        heard_since: float | None = None
        while not self._closed.is_set():
            self._lines.wait(WAIT_SECONDS)
            now = time.monotonic()
            if not self._lines.proven:
                heard_since = None
                if now - told >= ABSENT_SECONDS:
                    told = now
                    self._absent(now - began)
                continue
            heard_since = heard_since or now
            for message in self._lines.receive():
                self._survey.take(message)
            if self._wanted.is_set() and now - heard_since >= self._seconds:
                break
