"""Public API of a training script: join(), and the Session whose step() is called after each optimizer step.

At each step boundary the training thread counts, adopts the fragments that have arrived, and copies those called for.
It never waits for the network.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from ..common.config import RunSettings, TaskSettings
from ..common.errors import DilocoError, Diverged, Orphaned, SettingError
from ..common.fragments import MergeKind, Plan
from ..common.log import get_logger
from ..common.wire import MAX_COUNT, Call
from .boundary import ModelExchange
from .counters import Counters
from .departure import HURRY_SECONDS, LEAVE_SECONDS
from .identity import Owner, identify, layout_to_send
from .join_wait import await_joined, member
from .journal import LearnerJournal
from .link import Link, SessionLink
from .mailbox import Boundary, Joined, Mailbox, TrainingStatus
from .model_layout import Optimizers, as_list, inventory, live_buffers
from .replica import Replica, outside_inference_mode
from .static_tensor_changes import StaticChanges, StaticChecksums, own_statistics
from .step_checks import StepChecks
from .timing import Progress, StepTimer
from .training_checks import AdoptionCheck, LossWatch, heal_moments, moments_of

log = get_logger("learner")

RAMP_STEPS = 20
"""Inner steps over which a learner that joined without optimizer moments warms up its learning rate."""
FORGIVEN_AFTER_STEPS = 100
"""A learner that is not finite again within this many steps after a reset has diverged."""
_REPLACED = (
    "these frozen parameters and buffers held other values and now hold the run's; load values that only this learner "
    "is to have, such as an EMA teacher, after join()"
)
GRACE_SECONDS = 3.0
"""Time that closing may take beyond the wait for answers: the sockets' linger time."""


@outside_inference_mode
def join(
    address: str,
    model: nn.Module,
    optimizer: Optimizers,
    *,
    name: str | None = None,
    run: str = "",
    masters: Mapping[str, Tensor] | None = None,
    merge: Mapping[str, MergeKind] | None = None,
    data_hash: str = "",
    key: Path | str | None = None,
    join_timeout_seconds: float = 60.0,
    orphan_timeout_seconds: float = 600.0,
    directory: Path | str | None = None,
    tape: Path | str | None = None,
) -> Session:
    """Join the run at `address` (tcp://HOST:PORT). On return the model holds the run's global weights.

    Call it once, before the training loop, in the process that trains. It blocks until the model has arrived.

        with decoupled_diloco.join("tcp://10.0.0.5:5550", model, optimizer) as session:
            for inputs, targets in batches:
                lr = peak * decay(session.progress.fraction) * session.ramp
                loss = train_one_step(model, optimizer, inputs, targets, lr)
                if not session.step(tokens=targets.numel(), loss=loss):
                    break
        # the model holds the final global weights

    model: the module to train, of at most 100,000 tensors.
    optimizer: the optimizer, or a sequence of them. Each trainable parameter must be in their groups, and nothing else.
        One that is made later for the same parameters is detected. None = optimizers are not watched, and each call of
        step() counts as a step.
    name: this learner's name, [a-z0-9-]; None = made from the key's name, the host name and four random characters.
    run: the run's name; '' = the key's run, else the only one at the address.
    masters: parameter name -> f32 tensor that the optimizer steps instead of a bf16 or f16 parameter.
    merge: parameter name -> "rda" or "mean", to override the default (mean for embeddings, rda for all others).
    data_hash: SHA-256 of the data set, if the run compares it.
    key: key file, for a broker that requires keys (see diloco keys new).
    join_timeout_seconds: longest time without progress before PeerLost is raised.
    orphan_timeout_seconds: longest time without a beat of the syncer; then step() saves the parameters and raises.
    directory: folder in which step() saves the parameters then; None = the current one.
    tape: folder in which an event tape of this learner is written (see docs/tapes.md); None = no tape.

    Raises SettingError (an argument or the model is invalid), Refused (the run rejects this learner), PeerLost (no
    broker or syncer answers for `join_timeout_seconds`), LimitReached (sockets or threads are exhausted).
    """
    entries = inventory(model, optimizer, masters, merge)
    layout = layout_to_send(entries)
    config = member(
        address, run, name, key, ("learner",), join_timeout_seconds=join_timeout_seconds,
        orphan_timeout_seconds=orphan_timeout_seconds, directory=None if directory is None else Path(directory),
        tape=None if tape is None else Path(tape),
    )  # fmt: skip
    me = identify(config.run, config.name, entries, layout, data_hash=data_hash)
    link = Link(config, me, Mailbox(), lambda plan: Replica(model, plan, masters))
    joined = await_joined(link)
    replica = Replica(model, joined.plan, masters)
    try:
        session = Session(link, joined, replica, optimizer)
    except BaseException:
        link.leave("failed")
        raise
    if live := live_buffers(entries):
        sentence = "buffers are not merged: each learner keeps its own, and the final model gets those of one learner"
        log.info("buffers_stay_local", buffers=len(live), first=live[0], sentence=sentence)
    return session


class Session:
    """One learner's membership in a run, from join() to close(). Made by join().

    Call everything here from the training thread, in the process that joined; other processes get DilocoError.
    """

    exchange_kind: type[ModelExchange] = ModelExchange
    """How fragments are adopted and captured; a simulator may override it."""

    def __init__(self, link: SessionLink, joined: Joined, replica: Replica, optimizer: Optimizers) -> None:
        self.name, self.incarnation, self.run = link.me.name, link.me.incarnation, link.me.run
        self.plan: Plan = joined.plan
        self.settings: RunSettings = joined.settings
        self.task: TaskSettings | None = joined.task
        self.finished = False
        """bool: the run is over, and the model holds the final global weights."""
        self._owner = Owner(f"session of {self.name}")
        self._link, self._mailbox, self._replica = link, link.mailbox, replica
        self._journal = LearnerJournal.of(link.config.tape, link.me, joined)
        self._counters = Counters(link.me.pair, joined.plan.P)
        self._exchange = self.exchange_kind(link.mailbox, joined, replica, self._counters)
        self._losses = LossWatch()
        self._without_moments = joined.t > 0 and not any(moments_of(o) for o in as_list(optimizer))
        self._resetting = False
        self._reset_at: int | None = None
        self._closed = False
        self._swapped = False
        largest = max(joined.plan.fragments[0].spans, key=lambda span: span.tensor.numel).tensor.name
        adoption = AdoptionCheck(replica.source(largest))
        own = () if self._mailbox.final else own_statistics(replica)
        if own:
            log.info("statistics_kept", learner=self.name, buffers=len(own), first=own[0])
        if replaced := self._exchange.begin(joined, own):
            log.info("static_from_run", learner=self.name, tensors=len(replaced), first=replaced[0], sentence=_REPLACED)
        self._static: StaticChecksums | None = None  # None: a learner that joins a finished run trains nothing
        if not self._mailbox.final:
            self._static = StaticChecksums(self.plan.layout, replica.static_tensors())
        self._checks = StepChecks(
            self.name, replica, optimizer, time.monotonic(), in_mid_run=joined.t > 0, adoption=adoption
        )
        pending = self._mailbox.boundary()  # merges since the welcome
        if not self._conclude(pending):
            self._adopt(pending)
            self._journal.boundary(self._counters.now, pending.arrivals, reset=pending.reset)
        self._checks.first_adopted()
        self._checks.left()
        self._timer = StepTimer(time.monotonic())
        self._report_status()

    # --- public ---------------------------------------------------------------------------------------------------
    @outside_inference_mode
    def step(self, tokens: int, loss: float | Tensor | None = None) -> bool:
        """Call after each optimizer step. Returns False once the run is over; then the model is the final one.

        A call without an optimizer step since the last one (a micro-batch, or a step that a gradient scaler skipped)
        does not count as a step; the tokens of micro-batches are counted with the step that learns from them.

        tokens: number of tokens (or samples) that this step was trained on, 0 or more.
        loss: the step's loss, a float or a tensor of one element; None if not at hand. For the run's displays, and to
            detect at once that it is not finite. A tensor on an accelerator is not waited for.

        Raises SettingError (an invalid argument, or a change after join() that only this learner would train), Diverged
        (loss or parameters are not finite, again after a reset), Orphaned (no beat for the orphan timeout; the
        parameters were saved), DilocoError (the session is closed, its network thread failed, or this is another
        process).
        """
        self._owner.check("step()")
        if self._closed or self._swapped:
            raise DilocoError(
                f"session of {self.name}: step() after close(); call join() again to continue"
                if self._closed
                else f"session of {self.name}: step() inside global_weights(); leave that block first"
            )
        if self.finished:  # at the join, or the loop went on: undo what it has trained since
            self._exchange.conclude(self._exchange.public)
            return False
        now = time.monotonic()
        counted = self._checks.called(_tokens(tokens, self._counters.now.tokens + self._checks.pending_tokens), now)
        self._timer.enter(now, stepped=counted is not None)
        if counted is not None:
            self._counters.count(counted)
        pending = self._mailbox.boundary()
        if pending.failure is not None:
            self._fail(pending.failure)
        finite, was_resetting = self._losses.take(loss) and not pending.nonfinite, self._resetting
        if not self._conclude(pending):
            if counted is not None:
                self._checks.check_adoption()
            self._adopt(pending)
            if not finite and not was_resetting:
                self._on_nonfinite()
            self._report_status()
            answered = self._answer(pending.calls)
            if counted is not None or pending.arrivals or answered:
                self._journal.boundary(self._counters.now, pending.arrivals, reset=pending.reset, answered=answered)
        self._checks.left()
        self._timer.leave(time.monotonic())
        return not self.finished

    @property
    def progress(self) -> Progress:
        """Progress of the run: `.step` of `.steps` global steps, `.fraction` from 0 to 1. Advances between beats, too.

        Compute the learning rate from it, so that all learners follow one schedule.
        """
        self._owner.check("progress")
        self._checks.progress_read()
        return self._journal.note_progress(self._mailbox.progress(time.monotonic()))

    @property
    def ramp(self) -> float:
        """Factor from 0 to 1 for the learning rate. Below 1 only in the first 20 steps of a learner that joined in
        mid-run without optimizer moments.
        """
        return min(1.0, (self._counters.now.steps + 1) / RAMP_STEPS) if self._without_moments else 1.0

    @property
    def local_steps(self) -> int:
        """Inner steps since join()."""
        return self._counters.now.steps

    @property
    def tokens(self) -> int:
        """Tokens that those steps were trained on."""
        return self._counters.now.tokens

    @property
    def versions(self) -> tuple[int, ...]:
        """The adopted version of each fragment."""
        return tuple(public.version for public in self._exchange.public)

    @contextmanager
    def global_weights(self) -> Iterator[tuple[int, ...]]:
        """Context manager. In its block the model holds the newest public global weights, for an evaluation; afterwards
        its own again, bit for bit. Yields the version of each fragment.

        Needs memory for a second copy of the trainable parameters on their device. The time in the block counts as
        neither training nor waiting. Raises DilocoError inside such a block, after close(), and in another process.
        """
        self._owner.check("global_weights()")
        if self._closed or self._swapped:
            raise DilocoError(
                f"session of {self.name}: global_weights() {'twice' if self._swapped else 'after close()'}"
            )
        entered = time.monotonic()
        public = self._mailbox.public
        kept = self._replica.keep_parameters()
        self._swapped = True
        self._checks.before_swap()
        shown = time.monotonic()
        try:
            self._replica.show([fragment.vector for fragment in public])
            yield tuple(fragment.version for fragment in public)
        finally:
            if self._owner.here:  # a process forked inside the block may share the parameters' memory
                hiding = time.monotonic()
                self._replica.put_back(kept)
                self._checks.after_swap()
                self._swapped = False
                left = time.monotonic()
                self._timer.leave_out(left - entered, ours=shown - entered + left - hiding)

    @outside_inference_mode
    def close(self, reason: str = "left") -> None:
        """Leave the run. Call it at the end, or use the session as a context manager.

        reason: "left", "stopped", "diverged" or "failed". With "left" in mid-run, open calls are answered once more.
        Takes 5 s at most, less for the other reasons, and 2 s if no broker answers. After the end of a run in which
        training has changed buffers, it also waits, 30 s at most, until the syncer has those of one learner.

        Closing twice has no effect, nor has closing in a process that was forked from the one that joined.
        """
        if self._closed or not self._owner.here:
            return
        self._closed = True
        self._checks.close()
        if reason == "left" and not self.finished:
            pending = self._mailbox.boundary()
            if pending.failure is None and pending.final is None:
                self._journal.boundary(self._counters.now, (), answered=self._answer(pending.calls))
        self._link.leave("finished" if self.finished else reason)
        patience = (LEAVE_SECONDS if reason == "left" and not self.finished else HURRY_SECONDS) + GRACE_SECONDS
        progress_at = self._mailbox.progress_at
        while not self._link.join_thread(patience):
            if self._mailbox.progress_at == progress_at:
                self._link.abandon()
                break
            progress_at = self._mailbox.progress_at  # its buffers are being sent
        self._journal.close(finished=self.finished)
        log.info("left", learner=self.name, reason="finished" if self.finished else reason,
                 local_steps=self.local_steps, tokens=self.tokens)  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            self.close("stopped")
        else:
            self.close("diverged" if isinstance(error, Diverged) else "failed")

    # --- at a step boundary ------------------------------------------------------------------------------------------
    def _conclude(self, pending: Boundary) -> bool:
        """Take the final model, if it has arrived; whether it has."""
        if pending.final is not None:
            self._exchange.conclude(pending.final)
            self.finished = True
            self._mailbox.static_changes = self._static.changes() if self._static is not None else StaticChanges(0, b"")
            self._link.wake()
        return self.finished

    def _adopt(self, pending: Boundary) -> None:
        self._checks.adopting(pending.arrivals)
        self._exchange.adopt(pending.arrivals, reset=pending.reset)
        self._checks.adopted(pending.arrivals)
        if pending.reset and self._resetting:
            self._resetting, self._reset_at = False, self.local_steps
            healed = heal_moments(self._checks.optimizers.all)
            self._losses.forget_pending()
            log.warning("reset", learner=self.name, local_steps=self.local_steps, moments_cleared=healed)

    def _answer(self, calls: tuple[Call, ...]) -> list[Call]:
        answered = [] if self._resetting else self._exchange.answer(calls)
        if answered:
            self._link.wake()
        return answered

    # --- failures ----------------------------------------------------------------------------------------------------
    def _on_nonfinite(self) -> None:
        """Request a reset from the global model; raise Diverged if the last one was only a short time ago."""
        now = self._counters.now.steps
        if self._reset_at is not None and now - self._reset_at <= FORGIVEN_AFTER_STEPS:
            raise Diverged(
                f"{self.name} has diverged: loss or parameters are not finite at its step {now}, "
                f"{now - self._reset_at} steps after a reset from the global model; lower the inner learning rate"
            )
        log.warning("not_finite", learner=self.name, local_steps=now, loss=self._losses.value)
        self._resetting = True
        self._mailbox.request_reset()
        self._link.wake()

    def _fail(self, failure: DilocoError) -> None:
        if isinstance(failure, Orphaned):
            path = (self._link.config.directory or Path()) / f"{self.run}-{self.name}-orphan.safetensors"
            try:
                self._replica.save(path)
            except OSError as wrong:
                raise Orphaned(f"{failure}; saving to {path} failed as well: {wrong}") from wrong
            raise Orphaned(f"{failure}; its parameters are in {path}")
        raise failure

    def _report_status(self) -> None:
        timer = self._timer
        self._mailbox.status = TrainingStatus(
            counts=self._counters.now,
            step_seconds=timer.step_seconds,
            last_step_at=timer.last_step_at,
            inner_seconds=timer.inner_seconds,
            session_seconds=timer.session_seconds,
            started_at=timer.started_at,
            loss=self._losses.value,
            versions=self._exchange.reported[1],
            versions_epoch=self._exchange.reported[0],
        )


def _tokens(tokens: Any, before: int) -> int:
    try:
        count = operator.index(tokens)
    except TypeError:
        raise SettingError(f"tokens must be a whole number, not {tokens!r}") from None
    if not 0 <= count <= MAX_COUNT - before:
        raise SettingError(f"tokens must be a whole number from 0 on, below 2^53 in total, not {count}")
    return count
