"""A training script's side of a run: join(), and the Session whose step() is called after each optimizer step.

The training thread counts, adopts what waits and copies what is called for. It waits for nobody.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor, nn

from ..common.config import LearnerConfig, RunSettings, TaskSettings
from ..common.errors import DilocoError, Diverged, Orphaned, SettingError
from ..common.fragments import MergeKind, Plan
from ..common.log import get_logger
from ..common.wire import MAX_COUNT, Call
from .boundary import ModelExchange
from .core import HURRY_SECONDS, LEAVE_SECONDS
from .counters import Counters
from .identity import Identity, Owner, identify, layout_to_send
from .join_wait import await_joined, member
from .journal import LearnerJournal
from .link import Link
from .mailbox import Boundary, Joined, Mailbox, TrainingStatus
from .model_layout import Optimizers, as_list, inventory, live_buffers
from .replica import Replica, outside_inference_mode
from .static_tensors import Moved, StaticPart, own_statistics
from .step_checks import StepChecks
from .timing import Progress, StepTimer
from .training_checks import AdoptionCheck, LossWatch, heal_moments, moments_of

log = get_logger("learner")

RAMP_STEPS = 20
"""Inner steps over which a joiner without optimizer moments raises its learning rate."""
FORGIVEN_AFTER_STEPS = 100
"""A learner that is not finite again within so many steps after a reset has diverged."""
_REPLACED = (
    "these frozen parameters and buffers held other values and now hold the run's; load what must stay this learner's "
    "own, such as an EMA teacher, after join()"
)
GRACE_SECONDS = 3.0
"""What closing may take beyond the waiting for answers: the sockets' linger time."""


class SessionLink(Protocol):
    """What a session needs of the way to its run: a Link, or a simulator's own."""

    config: LearnerConfig
    me: Identity
    mailbox: Mailbox

    def wake(self) -> None:
        """Something lies on the mailbox."""

    def leave(self, reason: str) -> None:
        """Say goodbye and end."""

    def abandon(self) -> None:
        """End at once."""

    def join_thread(self, seconds: float) -> bool:
        """Wait for the end; False if it does not come."""


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
    """Join the run at `address` (tcp://HOST:PORT); afterwards the model holds the run's global weights.

        with decoupled_diloco.join("tcp://10.0.0.5:5550", model, optimizer) as session:
            for inputs, targets in batches:
                lr = peak * decay(session.progress.fraction) * session.ramp
                loss = train_one_step(model, optimizer, inputs, targets, lr)
                if not session.step(tokens=targets.numel(), loss=loss):
                    break
        # the model holds the final global weights

    model: of at most 100,000 tensors.
    optimizer: the optimizer, or several; each trainable parameter must be in their groups, and nothing else. One that
    is made later for the same parameters is noticed. None = they are not looked at, and each call of step() is a step.
    name: of this learner, [a-z0-9-]; None = the machine's name and four random characters, after the key's name.
    run: which run; '' = the only one at the address.
    masters: parameter name -> f32 tensor that the optimizer steps instead of a bf16 or f16 parameter.
    merge: parameter name -> "rda" or "mean" where the default (mean for embeddings, rda for all else) is not wanted.
    data_hash: sha256 of the data set, where the run compares it.
    key: the key file, for a broker that asks for keys (see diloco keys new); it says which run as well.
    directory: where parameters are saved if no beat is heard for `orphan_timeout_seconds`; None = the current one.
    tape: folder into which an event tape of this learner is written (see docs/tapes.md); None = none is.

    Raises SettingError (an argument or the model is not as it must be), Refused (the run does not take this learner),
    PeerLost (nobody answers for `join_timeout_seconds`).
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
        sentence = "buffers are not merged: each learner has its own, and the final model gets those of one"
        log.info("buffers_stay_local", buffers=len(live), first=live[0], sentence=sentence)
    return session


class Session:
    """One learner's membership in a run, from join() to close(). Everything here is called by the training thread."""

    exchange_kind: type[ModelExchange] = ModelExchange
    """How it adopts and captures; a simulator may put another rule in its place."""

    def __init__(self, link: SessionLink, joined: Joined, replica: Replica, optimizer: Optimizers) -> None:
        self.name, self.incarnation, self.run = link.me.name, link.me.incarnation, link.me.run
        self.plan: Plan = joined.plan
        self.settings: RunSettings = joined.settings
        self.task: TaskSettings | None = joined.task
        self.finished = False
        """The run is over, and the model holds the final global weights."""
        self._owner = Owner(f"session of {self.name}")
        self._link, self._mailbox, self._replica = link, link.mailbox, replica
        self._tape = LearnerJournal.of(link.config.tape, link.me, joined)
        self._counters = Counters(link.me.pair, joined.plan.P)
        self._exchange = self.exchange_kind(link.mailbox, joined, replica, self._counters)
        self._losses = LossWatch()
        self._without_moments = joined.t > 0 and not any(moments_of(o) for o in as_list(optimizer))
        self._resetting = False
        self._reset_at: int | None = None
        self._closed = False
        self._looking = False
        largest = max(joined.plan.fragments[0].slots, key=lambda slot: slot.tensor.numel).tensor.name
        self._stick: AdoptionCheck | None = AdoptionCheck(replica.source(largest))
        own = () if self._mailbox.final else own_statistics(replica)
        if own:
            log.info("statistics_kept", learner=self.name, buffers=len(own), first=own[0])
        if replaced := self._exchange.begin(joined, own):
            log.info("static_from_run", learner=self.name, tensors=len(replaced), first=replaced[0], sentence=_REPLACED)
        self._static: StaticPart | None = None  # a learner of a finished run has trained nothing
        if not self._mailbox.final:
            self._static = StaticPart(self.plan.layout, replica.static_tensors())
        self._checks = StepChecks(self.name, replica, optimizer, time.monotonic(), in_mid_run=joined.t > 0)
        waits = self._mailbox.boundary()  # what was merged since the welcome
        if not self._conclude(waits):
            self._adopt(waits)
            self._tape.boundary(self._counters.now, waits.arrivals, reset=waits.reset)
        self._stick.adopted()
        self._checks.left()
        self._pace = StepTimer(time.monotonic())
        self._report()

    # --- what a training loop calls ----------------------------------------------------------------------------------
    @outside_inference_mode
    def step(self, tokens: int, loss: float | Tensor | None = None) -> bool:
        """To be called after each optimizer step; False when the run is over, and then the model is the final one.

        A call without an optimizer step since the last one (a micro-batch, a step that a gradient scaler skipped) is
        none; the tokens of micro-batches are booked with the step that learns from them.

        tokens: how many this step was trained on. loss: the step's loss, if it is at hand (for the run's displays, and
        to notice at once when it is not finite; a tensor on an accelerator is not waited for).

        Raises SettingError (something was changed after join() that would train this learner alone), Diverged (loss or
        parameters not finite, again after a reset), Orphaned (the syncer is gone for long; the parameters were saved),
        DilocoError (the session is closed, its link failed, or this is another process).
        """
        self._owner.check("step()")
        if self._closed or self._looking:
            raise DilocoError(
                f"session of {self.name}: step() after close(); join again to go on"
                if self._closed
                else f"session of {self.name}: step() inside global_weights(); leave that block first"
            )
        if self.finished:  # it was when this session joined, or the loop went on: what it has done since must not stay
            self._exchange.conclude(self._exchange.public)
            return False
        now = time.monotonic()
        booked = self._checks.called(_tokens(tokens, self._counters.now.tokens + self._checks.pending_tokens), now)
        self._pace.enter(now, stepped=booked is not None)
        if booked is not None:
            self._counters.count(booked)
        waits = self._mailbox.boundary()
        if waits.failure is not None:
            self._fail(waits.failure)
        fine, was_resetting = self._losses.take(loss) and not waits.nonfinite, self._resetting
        if not self._conclude(waits):
            if booked is not None:
                self._check_stuck()
            self._adopt(waits)
            if not fine and not was_resetting:
                self._not_finite()
            self._report()
            answered = self._answer(waits.calls)
            if booked is not None or waits.arrivals or answered:
                self._tape.boundary(self._counters.now, waits.arrivals, reset=waits.reset, answered=answered)
        self._checks.left()
        self._pace.leave(time.monotonic())
        return not self.finished

    @property
    def progress(self) -> Progress:
        """How far the run is: `.step` of `.steps` global steps, `.fraction` from 0 to 1, moving between beats too."""
        self._owner.check("progress")
        self._checks.progress_asked()
        return self._tape.told(self._mailbox.progress(time.monotonic()))

    @property
    def ramp(self) -> float:
        """From 0 to 1: what to multiply the learning rate by. Below 1 only in the first 20 steps of a learner that
        joined in mid-run without optimizer moments.
        """
        return min(1.0, (self._counters.now.steps + 1) / RAMP_STEPS) if self._without_moments else 1.0

    @property
    def local_steps(self) -> int:
        return self._counters.now.steps

    @property
    def tokens(self) -> int:
        return self._counters.now.tokens

    @property
    def versions(self) -> tuple[int, ...]:
        """The adopted version of each fragment."""
        return tuple(public.version for public in self._exchange.public)

    @contextmanager
    def global_weights(self) -> Iterator[tuple[int, ...]]:
        """Inside the block the model holds the newest public global weights; afterwards its own again, bit for bit.

        Gives the version of each fragment. Costs a second copy of the trainable parameters on their device. Time in
        the block counts as neither training nor waiting.
        """
        self._owner.check("global_weights()")
        if self._closed or self._looking:
            raise DilocoError(
                f"session of {self.name}: global_weights() {'twice' if self._looking else 'after close()'}"
            )
        entered = time.monotonic()
        whole = self._mailbox.whole
        kept = self._replica.keep_parameters()
        self._looking = True
        self._checks.before_looking()
        shown = time.monotonic()
        try:
            self._replica.show([public.vector for public in whole])
            yield tuple(public.version for public in whole)
        finally:
            if self._owner.here:  # a process that was forked inside the block may share the parameters' memory
                hiding = time.monotonic()
                self._replica.put_back(kept)
                self._checks.after_looking()
                self._looking = False
                left = time.monotonic()
                self._pace.leave_out(left - entered, ours=shown - entered + left - hiding)

    @outside_inference_mode
    def close(self, reason: str = "left") -> None:
        """Leave the run. In mid-run open calls are answered once more; takes 5 s at most, and 2 s where nobody listens.

        reason: left, stopped, diverged or failed; anything but `left` is in a hurry. Closing twice is harmless, and so
        is closing in a process that was forked from the one that joined: nothing happens there. After the end of a run
        whose buffers were changed by training it also waits, 30 s at most, until the run has those of one learner.
        """
        if self._closed or not self._owner.here:
            return
        self._closed = True
        self._checks.close()
        if reason == "left" and not self.finished:
            waits = self._mailbox.boundary()
            if waits.failure is None and waits.final is None:
                self._tape.boundary(self._counters.now, (), answered=self._answer(waits.calls))
        self._link.leave("finished" if self.finished else reason)
        patience = (LEAVE_SECONDS if reason == "left" and not self.finished else HURRY_SECONDS) + GRACE_SECONDS
        began = self._mailbox.progress_at
        while not self._link.join_thread(patience):
            if self._mailbox.progress_at == began:
                self._link.abandon()
                break
            began = self._mailbox.progress_at  # its buffers are on their way
        self._tape.close(finished=self.finished)
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
    def _conclude(self, waits: Boundary) -> bool:
        """Take the final model, if it is here: then True."""
        if waits.final is not None:
            self._exchange.conclude(waits.final)
            self.finished = True
            self._mailbox.moved = self._static.moved() if self._static is not None else Moved(0, b"")
            self._link.wake()
        return self.finished

    def _adopt(self, waits: Boundary) -> None:
        self._checks.adopting(waits.arrivals)
        self._exchange.adopt(waits.arrivals, reset=waits.reset)
        self._checks.adopted(waits.arrivals)
        if waits.reset and self._resetting:
            self._resetting, self._reset_at = False, self.local_steps
            healed = heal_moments(self._checks.optimizers.all)
            self._losses.forget_pending()
            log.warning("reset", learner=self.name, local_steps=self.local_steps, moments_cleared=healed)

    def _answer(self, calls: tuple[Call, ...]) -> list[Call]:
        answered = [] if self._resetting else self._exchange.answer(calls)
        if answered:
            self._link.wake()
        return answered

    # --- what may go wrong -------------------------------------------------------------------------------------------
    def _not_finite(self) -> None:
        """Have everything fetched anew, once; raise Diverged if that did not help for long."""
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

    def _check_stuck(self) -> None:
        if self._stick is None:
            return
        verdict = self._stick.stepped()
        first = self._checks.not_stepped()
        if verdict is False or first:
            raise SettingError(
                f"{self.name}: what was adopted did not stay in the model: "
                + (
                    f"the optimizer does not step {first} any more"
                    if first
                    else "one step later the old values were back, so the optimizer steps tensors of its own"
                )
                + "; give join() those f32 tensors by name as masters"
            )
        if verdict is not None:
            self._stick = None

    def _fail(self, failure: DilocoError) -> None:
        if isinstance(failure, Orphaned):
            path = (self._link.config.directory or Path()) / f"{self.run}-{self.name}-orphan.safetensors"
            try:
                self._replica.save(path)
            except OSError as wrong:
                raise Orphaned(f"{failure}; saving to {path} failed as well: {wrong}") from wrong
            raise Orphaned(f"{failure}; its parameters are in {path}")
        raise failure

    def _report(self) -> None:
        pace = self._pace
        self._mailbox.status = TrainingStatus(
            counts=self._counters.now,
            step_seconds=pace.step_seconds,
            last_step_at=pace.last_step_at,
            inner_seconds=pace.inner_seconds,
            session_seconds=pace.session_seconds,
            started_at=pace.started_at,
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
