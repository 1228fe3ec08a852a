"""Discovery of the run's epoch and versions: before a syncer publishes, it receives what its peers hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..common.report_intervals import Silence
from ..common.wire import Alive, Beat
from .transport import Transport

WAIT_SECONDS = 0.1
ABSENT_SECONDS = 5.0
"""Time after which an absent broker is reported, and again each time that this time has doubled."""
LEAP = 2**32
"""Most by which epochs and versions can exceed those on disk. Larger ones are ignored: no message could hold more."""
SENDERS = 10_000
"""Most learners whose versions are kept."""


@dataclass
class KnownEpochs:
    """The epochs and versions that the syncer and the learners of the run published."""

    rival: Beat | None = None
    """A Beat of another syncer of this run."""
    _reports: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """Sender -> (epoch, versions) of its last message; '' is the syncer."""

    def take(self, message: object) -> None:
        if isinstance(message, Beat):
            self.rival = message
            self._reports[""] = (message.epoch, message.versions)
        elif isinstance(message, Alive) and (message.name in self._reports or len(self._reports) < SENDERS):
            self._reports[message.name] = (message.epoch, message.versions)

    @property
    def knows_merges(self) -> bool:
        """Whether any of them holds more than version 0."""
        return any(version for _, versions in self._reports.values() for version in versions)

    def epoch(self, known: int) -> int:
        """The highest epoch received, at least `known`; epochs beyond it by more than LEAP are ignored."""
        return max([known, *(epoch for epoch, _ in self._reports.values() if epoch <= known + LEAP)])

    def version(self, fragment: int, known: int) -> int:
        """The same for the version of a fragment."""
        reported = (versions[fragment] for _, versions in self._reports.values() if fragment < len(versions))
        return max([known, *(version for version in reported if version <= known + LEAP)])


class EpochDiscovery:
    """Receives messages of the run in a thread of its own from its creation on, while the program imports torch. The
    transport belongs to that thread until `survey` or `close` returns.
    """

    def __init__(self, transport: Transport, seconds: float, absent: Callable[[float], None]) -> None:
        """`absent` is called with the seconds without a broker: after 5 s, and then at growing intervals."""
        self._transport, self._seconds, self._absent = transport, seconds, absent
        self._survey = KnownEpochs()
        self._wanted, self._closed = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="epoch-discovery", daemon=True)
        self._thread.start()

    def survey(self, stopped: Callable[[], bool]) -> KnownEpochs:
        """The epochs and versions received so far, after at least `seconds` with a broker; earlier if `stopped`."""
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
            self._transport.wait(WAIT_SECONDS)
            now = time.monotonic()
            if not self._transport.proven:
                heard_since = None
                if silence.report_due(now - began):
                    self._absent(now - began)
                continue
            silence.end()
            began, heard_since = now, heard_since or now
            for message in self._transport.receive():
                self._survey.take(message)
            if self._wanted.is_set() and now - heard_since >= self._seconds:
                break
