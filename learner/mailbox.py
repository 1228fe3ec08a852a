"""What the training thread and the link's thread lay down for one another. Every call is short; nobody waits here,
except a join for its end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..common.config import RunSettings, TaskSettings
from ..common.errors import DilocoError
from ..common.fragments import Plan
from ..common.wire import Beat, Call
from .counters import Counts
from .public_model import PublicFragment
from .static_tensors import Moved
from .timing import Progress, RunClock


@dataclass(frozen=True)
class Joined:
    """What a welcome brought: all that a session must know before its first step."""

    plan: Plan
    settings: RunSettings
    task: TaskSettings | None
    """None where learners bring their own model."""
    epoch: int
    t: int
    """Global step at the welcome."""
    whole: tuple[PublicFragment, ...]
    static: bytes


@dataclass(frozen=True)
class Arrival:
    """A public fragment that waits to be adopted at the next step boundary."""

    fragment: int
    epoch: int
    public: PublicFragment
    own: Counts | None = None
    """Counters of the learner's own capture that was merged into it."""


@dataclass(frozen=True)
class Capture:
    """A fragment as the training thread copied it, to be encoded and sent by the link."""

    call: Call
    base_version: int
    public: Tensor
    """The published vector that was adopted last: the delta is measured from it."""
    theta: Tensor
    """Flat f32 host buffer, holes undefined."""
    since: Counts
    until: Counts
    ready: tuple[torch.cuda.Event, ...]
    """To be waited for before `theta` is read."""
    reusable: bool
    """The link gives the buffer back when it has encoded it."""


@dataclass(frozen=True)
class TrainingStatus:
    """The training thread's own figures, for Alive."""

    counts: Counts = field(default_factory=Counts)
    step_seconds: float = 0.0
    last_step_at: float = 0.0
    inner_seconds: float = 0.0
    session_seconds: float = 0.0
    started_at: float = 0.0
    loss: float | None = None
    versions: tuple[int, ...] = ()
    versions_epoch: int = 0


@dataclass(frozen=True)
class Boundary:
    """All that waits for the training thread at a step boundary."""

    arrivals: tuple[Arrival, ...]
    calls: tuple[Call, ...]
    reset: bool
    """The arrivals are the whole model: everything of the learner's own is to be overwritten at once."""
    nonfinite: bool
    """A capture held values that are not finite."""
    final: tuple[PublicFragment, ...] | None
    """The final model, once the run is over and its hash was verified."""
    failure: DilocoError | None


class Mailbox:
    """Two trays. Methods above the line are the link's, below it the training thread's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrivals: dict[int, Arrival] = {}
        self._calls: tuple[Call, ...] = ()
        self._reset = self._nonfinite = self._wants_reset = False
        self._final: tuple[PublicFragment, ...] | None = None
        self._failure: DilocoError | None = None
        self._joined: Joined | None = None
        self._clock = RunClock()
        self._captures: deque[Capture] = deque()
        self._spare: list[Tensor] = []
        self.status: TrainingStatus | None = None
        """Set by the training thread at each boundary; None before it has joined."""
        self.moved: Moved | None = None
        """The static tensors that training has changed; set by the training thread once it holds the final model."""
        self.whole: tuple[PublicFragment, ...] = ()
        """The newest public model, set by the link."""
        self.beat: Beat | None = None
        self.waits_for = "a connection to the broker"
        """What a join is waiting for, in words."""
        self.refusal = ""
        """Why the broker takes no connection or cannot be found, in a sentence; '' while it does, or is not there."""
        self.progress_at = 0.0
        """When the join last came a step further."""
        self.leaving = ""
        """Why the session leaves; '' while it does not."""

    # --- the link's side ---------------------------------------------------------------------------------------------
    def joined(self, joined: Joined) -> None:
        with self._changed:
            self._joined, self.whole = joined, joined.whole
            self._changed.notify_all()

    def fail(self, failure: DilocoError) -> None:
        """The link cannot go on; the session's next call raises `failure`."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def heard(self, beat: Beat, now: float) -> None:
        with self._changed:
            self.beat = beat
            self._clock.heard(beat, now)

    def deliver(self, arrivals: Sequence[Arrival], *, reset: bool = False) -> None:
        with self._changed:
            self._arrivals.update({arrival.fragment: arrival for arrival in arrivals})
            self._reset |= reset

    def open_calls(self, calls: Sequence[Call]) -> None:
        self._calls = tuple(calls)

    def drop(self) -> None:
        """Nothing that waits is of use any more (another epoch, a reset)."""
        with self._changed:
            self._arrivals.clear()
            self._captures.clear()
            self._calls, self._reset = (), False

    def report_nonfinite(self) -> None:
        self._nonfinite = True

    def finish(self, final: Sequence[PublicFragment]) -> None:
        with self._changed:
            self._final = tuple(final)
            self._changed.notify_all()

    def take_captures(self) -> list[Capture]:
        with self._changed:
            captures = list(self._captures)
            self._captures.clear()
            return captures

    def recycle(self, capture: Capture) -> None:
        """The capture's buffer may be written again."""
        if capture.reusable:
            self._spare.append(capture.theta)

    def take_reset_request(self) -> bool:
        with self._changed:
            wish, self._wants_reset = self._wants_reset, False
            return wish

    # --- the training thread's side ----------------------------------------------------------------------------------
    def wait_joined(self, seconds: float) -> Joined | None:
        """What the welcome brought, or None after so many seconds. Raises what the link failed with."""
        with self._changed:
            self._changed.wait_for(lambda: self._joined or self._failure, seconds)
            if self._failure is not None:
                raise self._failure
            return self._joined

    def boundary(self) -> Boundary:
        """Take all that waits."""
        with self._changed:
            taken = Boundary(
                tuple(self._arrivals.values()),
                self._calls,
                self._reset,
                self._nonfinite,
                self._final,
                self._failure,
            )
            self._arrivals = {}
            self._reset = self._nonfinite = False
            return taken

    @property
    def failure(self) -> DilocoError | None:
        return self._failure

    @property
    def final(self) -> bool:
        """The final model is here."""
        return self._final is not None

    def progress(self, now: float) -> Progress:
        with self._changed:
            return self._clock.progress(now)

    def put_capture(self, capture: Capture) -> None:
        with self._changed:
            self._captures.append(capture)

    def request_reset(self) -> None:
        """Have every fragment fetched anew."""
        with self._changed:
            self._wants_reset = True

    def spare_buffer(self, length: int, keep: int) -> Tensor | None:
        """A buffer of at least `length` elements that is free again; no more than `keep` stay in reserve."""
        with self._changed:
            fitting = [i for i, buffer in enumerate(self._spare) if len(buffer) >= length]
            buffer = self._spare.pop(min(fitting, key=lambda i: len(self._spare[i]))) if fitting else None
            del self._spare[keep:]
            return buffer
