"""Mailbox between the training thread and the network thread. No call blocks, except `wait_joined`."""

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
from .static_tensor_changes import StaticChanges
from .timing import Progress, RunClock


@dataclass(frozen=True)
class Joined:
    """Result of a join: everything a session needs before its first step."""

    plan: Plan
    settings: RunSettings
    task: TaskSettings | None
    """None where learners bring their own model."""
    epoch: int
    t: int
    """Global step at the welcome."""
    public: tuple[PublicFragment, ...]
    """The public model, by fragment."""
    static: bytes
    """Values of the static tensors, in layout order."""


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
    """Copy of a fragment, made by the training thread, to be encoded and sent by the network thread."""

    call: Call
    base_version: int
    public: Tensor
    """The public vector that was adopted last; the delta is the difference to it."""
    theta: Tensor
    """Flat f32 host buffer; the contents of its holes are undefined."""
    since: Counts
    until: Counts
    ready: tuple[torch.cuda.Event, ...]
    """Wait for these before reading `theta`."""
    reusable: bool
    """The buffer is recycled once it is encoded."""


@dataclass(frozen=True)
class TrainingStatus:
    """Counters and timings of the training thread, for Alive."""

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
    """Everything that waits for the training thread at a step boundary."""

    arrivals: tuple[Arrival, ...]
    calls: tuple[Call, ...]
    reset: bool
    """The arrivals are the whole model and overwrite all of the learner's own progress."""
    nonfinite: bool
    """A capture held values that are not finite."""
    final: tuple[PublicFragment, ...] | None
    """The final model, once the run is over and its hash was verified."""
    failure: DilocoError | None


class Mailbox:
    """Two directions: the first group of methods is for the network thread, the second for the training thread.

    Every public attribute is written by one thread only, as its docstring says.
    """

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
        self.static_changes: StaticChanges | None = None
        """The static tensors that training has changed; set by the training thread once it holds the final model."""
        self.public: tuple[PublicFragment, ...] = ()
        """The newest public model, by fragment; set by the network thread."""
        self.beat: Beat | None = None
        """The newest beat; set by the network thread."""
        self.waits_for = "a connection to the broker"
        """What a join is waiting for, for log lines and errors; set by the network thread."""
        self.refusal = ""
        """Why the broker rejects the connection or cannot be found, as a sentence; '' if it does not, or is absent. Set
        by the network thread.
        """
        self.progress_at = 0.0
        """When a join, or the sending of final buffers, last made progress; set by the network thread."""
        self.leaving = ""
        """Why the session leaves; '' while it does not. Set by the training thread."""

    # --- for the network thread --------------------------------------------------------------------------------------
    def post_joined(self, joined: Joined) -> None:
        with self._changed:
            self._joined, self.public = joined, joined.public
            self._changed.notify_all()

    def fail(self, failure: DilocoError) -> None:
        """The network thread cannot continue; the session's next call raises `failure`. The first failure counts."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def post_beat(self, beat: Beat, now: float) -> None:
        with self._changed:
            self.beat = beat
            self._clock.receive(beat, now)

    def deliver(self, arrivals: Sequence[Arrival], *, reset: bool = False) -> None:
        """Fragments to adopt. With `reset` they are the whole model, and nothing of the learner's own is kept."""
        with self._changed:
            self._arrivals.update({arrival.fragment: arrival for arrival in arrivals})
            self._reset |= reset

    def open_calls(self, calls: Sequence[Call]) -> None:
        """All calls that are open now."""
        self._calls = tuple(calls)

    def drop(self) -> None:
        """Drop everything that waits: it is obsolete (another epoch, a reset)."""
        with self._changed:
            self._arrivals.clear()
            self._captures.clear()
            self._calls, self._reset = (), False

    def report_nonfinite(self) -> None:
        """A capture held values that are not finite."""
        self._nonfinite = True

    def finish(self, final: Sequence[PublicFragment]) -> None:
        """Hand over the final model."""
        with self._changed:
            self._final = tuple(final)
            self._changed.notify_all()

    def take_captures(self) -> list[Capture]:
        with self._changed:
            captures = list(self._captures)
            self._captures.clear()
            return captures

    def recycle(self, capture: Capture) -> None:
        """The capture is encoded; its buffer may be used again."""
        if capture.reusable:
            self._spare.append(capture.theta)

    def take_reset_request(self) -> bool:
        with self._changed:
            wants_reset, self._wants_reset = self._wants_reset, False
            return wants_reset

    # --- for the training thread -------------------------------------------------------------------------------------
    def wait_joined(self, seconds: float) -> Joined | None:
        """The result of the join; None if it is not there after `seconds`. Raises the failure of the network thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._joined or self._failure, seconds)
            if self._failure is not None:
                raise self._failure
            return self._joined

    def boundary(self) -> Boundary:
        """Take everything that waits."""
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
        """The final model has arrived."""
        return self._final is not None

    def progress(self, now: float) -> Progress:
        with self._changed:
            return self._clock.progress(now)

    def put_capture(self, capture: Capture) -> None:
        with self._changed:
            self._captures.append(capture)

    def request_reset(self) -> None:
        """Have every fragment fetched again."""
        with self._changed:
            self._wants_reset = True

    def spare_buffer(self, length: int, keep: int) -> Tensor | None:
        """A recycled buffer of at least `length` elements, or None. No more than `keep` others stay in reserve."""
        with self._changed:
            fitting = [i for i, buffer in enumerate(self._spare) if len(buffer) >= length]
            buffer = self._spare.pop(min(fitting, key=lambda i: len(self._spare[i]))) if fitting else None
            del self._spare[keep:]
            return buffer
