"""Before a syncer speaks it listens: which epoch and which versions does the wire know already?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..common.silence import Silence
from ..common.wire import Alive, Beat
from .transport import Transport

WAIT_SECONDS = 0.1
ABSENT_SECONDS = 5.0
"""How soon an absent broker is reported; then each time that it has been absent for twice as long."""
LEAP = 2**32
"""No run gets so far beyond what is on the disk. Whoever states more could drive it to where no message can go."""
SENDERS = 10_000
"""Of so many learners is kept what they hold."""


@dataclass
class KnownEpochs:
    """What syncer and learners of the run said of its epoch and of the versions that they hold."""

    rival: Beat | None = None
    """A Beat of another syncer of this run."""
    _said: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """Sender -> (epoch, versions), each the last; '' is the syncer."""

    def take(self, message: object) -> None:
        if isinstance(message, Beat):
            self.rival = message
            self._said[""] = (message.epoch, message.versions)
        elif isinstance(message, Alive) and (message.name in self._said or len(self._said) < SENDERS):
            self._said[message.name] = (message.epoch, message.versions)

    @property
    def knows_merges(self) -> bool:
        """Somebody holds more than version 0."""
        return any(version for _, versions in self._said.values() for version in versions)

    def epoch(self, known: int) -> int:
        """The highest epoch heard, `known` at least; what leads beyond it by more than LEAP is not believed."""
        return max([known, *(epoch for epoch, _ in self._said.values() if epoch <= known + LEAP)])

    def version(self, fragment: int, known: int) -> int:
        """The same for the version of a fragment."""
        heard = (versions[fragment] for _, versions in self._said.values() if fragment < len(versions))
        return max([known, *(version for version in heard if version <= known + LEAP)])


class EpochDiscovery:
    """Hears the run from the moment it is made, in a thread of its own: the program has better things to do meanwhile,
    such as loading torch. The lines are the thread's until `survey` or `close` returns.
    """

    def __init__(self, lines: Transport, seconds: float, absent: Callable[[float], None]) -> None:
        """`absent` is called with how long the broker has been missing: after 5 s, and again ever more seldom."""
        self._lines, self._seconds, self._absent = lines, seconds, absent
        self._survey = KnownEpochs()
        self._wanted, self._closed = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="listening", daemon=True)
        self._thread.start()

    def survey(self, stopped: Callable[[], bool]) -> KnownEpochs:
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
        began, silence = time.monotonic(), Silence(ABSENT_SECONDS)
        heard_since: float | None = None
        while not self._closed.is_set():
            self._lines.wait(WAIT_SECONDS)
            now = time.monotonic()
            if not self._lines.proven:
                heard_since = None
                if silence.report_due(now - began):
                    self._absent(now - began)
                continue
            silence.end()
            began, heard_since = now, heard_since or now
            for message in self._lines.receive():
                self._survey.take(message)
            if self._wanted.is_set() and now - heard_since >= self._seconds:
                break
