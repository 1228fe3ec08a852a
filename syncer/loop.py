"""The syncer's loop. Open this file first: `Syncer.run` is a table of contents.

It receives messages of learners (control_messages), lets `rounds` decide, merges and publishes (publish), and saves the
run (checkpoint_writer). The parts that decide are pure; the loop alone owns sockets and time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..common.config import BEAT_SECONDS
from ..common.errors import Diverged, Malformed, SaveFailed, SettingError, Superseded
from ..common.wire import Alive, Beat, Buffers, Delta, Fetch, Goodbye, Hello, Message, Plane, Seed
from . import stall_diagnosis
from .beat import beat_message, publish_status
from .control_messages import ControlHandler
from .final_results import export, warn_buffers, warn_unconfirmed
from .ledger import Who
from .publish import Publisher
from .rejections import sender_from_topic
from .round_events import Called, Drained, Lost, Merge, Unmet
from .run_state import Components, RunState, TrainingState
from .stall_diagnosis import StallMonitor, StallReason, stall_reason
from .startup import begin

SAVE_SECONDS = 30.0
"""Longest time for the last checkpoint."""
SAVED_SECONDS = 0.05
"""Interval at which the loop checks whether the end is saved."""
ECHO_SECONDS = 3 * BEAT_SECONDS
"""Longest time without one of the syncer's own beats, which return through the broker."""
LINGER_SECONDS = 2.0
"""After the end, the time without a request before the syncer ends."""
RETURN_SECONDS, RETURN_LINGER_SECONDS = 30.0, 10.0
"""The same for a syncer restarted on a finished run, whose learners may be starting: the wait for the first request,
and for each further one."""


class Syncer:
    """One syncer process, from its start to the last save."""

    def __init__(self, components: Components) -> None:
        self.components = components
        self.current = RunState(components.config.settings)
        self.control = ControlHandler(components, self.current)
        self.publisher = Publisher(components, self.current)
        self._takes: dict[type[Message], Callable[[Any, float], None]] = {
            Hello: self.control.hello,
            Seed: self.control.seed,
            Alive: self.control.alive,
            Goodbye: self._goodbye,
            Buffers: self._buffers,
            Delta: self.publisher.delta,
            Fetch: self._fetch,
            Beat: self._check_beat,
        }
        self._beat_at = 0.0
        self._stop_at: float | None = None
        self._finished_at: float | None = None
        self._returned = False
        """The run was finished before this syncer started."""
        self._connection_problem = ""
        self._echo_at = time.monotonic()
        """Time of the last own beat that returned through the broker."""
        self._saved_step = 0
        self._published_buffers: tuple[Who | None, bool] = (None, False)
        """State of the final buffers in the last beat."""

    def run(self) -> None:
        """Serve the run until it ends or a stop is requested. SaveFailed if the end could not be saved, Diverged if
        merges stay unusable: the last good state is saved then.
        """
        if not begin(self.components, self.current, lambda: self._stop_at is not None):
            self.components.writer.close(SAVE_SECONDS)
            return
        self.components.transport.call_on_malformed(self._malformed)
        self._resumed()
        try:
            while not self._over():
                self._turn()
        except Diverged:
            self._end()
            raise
        self._end()

    def stop(self) -> None:
        """Request a stop: open rounds are finished and the run is saved. Sets a flag only: safe in signal handlers."""
        if self._stop_at is None:
            self._stop_at = time.monotonic()

    @property
    def finished(self) -> bool:
        """All global steps are done; a stopped run is not finished and can be resumed."""
        return self._finished_at is not None

    # --- one turn ----------------------------------------------------------------------------------------------------
    def _turn(self) -> None:
        self.components.transport.wait(self._idle_seconds())
        self.components.clock.turn(connected=self.components.transport.proven)
        now = self.components.clock.now()
        for message in self.components.transport.receive():
            self._take(message, now)
        self._take_stored_buffers(now)
        if self.current.training is not None and self.current.phase != "finished":
            self._rounds(self.current.training, now)
        self.publisher.retransmit(now)
        if time.monotonic() >= self._beat_at:
            self._beat(now)

    def _idle_seconds(self) -> float:
        """Seconds until the next action that is due without a message."""
        now, training = self.components.clock.now(), self.current.training
        idle = [BEAT_SECONDS, self._beat_at - time.monotonic()]
        if training is not None and self.current.phase != "finished":
            idle.append(training.rounds.next_deadline(now) - now)
            if training.rounds.state == "drained":
                idle.append(SAVED_SECONDS)
        if self.current.buffers.checking:
            idle.append(SAVED_SECONDS)
        if self.publisher.retransmissions.due_at is not None:
            idle.append(self.publisher.retransmissions.due_at - now)
        return max(0.0, min(idle))

    def _take(self, message: Message, now: float) -> None:
        take = self._takes.get(type(message))
        try:
            if message.run != self.current.settings.run or take is None:
                raise Malformed("run", f"a {message.KIND} of {message.run}")
            take(message, now)
        except Malformed as wrong:
            self._reject(message, wrong)
        else:
            self._accept(message)

    def _accept(self, message: Message) -> None:
        if not isinstance(message, Delta):  # a chunk of a delta: only the complete delta shows whether it is valid
            who = getattr(message, "name", ""), getattr(message, "incarnation", 0)
            self.current.rejections.accepted(who, message.KIND)

    def _reject(self, message: Message, wrong: Malformed) -> None:
        name, fragment = getattr(message, "name", "?"), getattr(message, "fragment", -1)
        detail = str(wrong)[:200]
        self.components.telemetry.reject(name, wrong.reason, message=message.KIND, fragment=fragment, detail=detail)
        self.control.rejected(message.KIND, name, getattr(message, "incarnation", 0), wrong.reason, detail)

    def _malformed(self, topic: bytes, wrong: Malformed) -> None:
        """A message that could not be decoded."""
        (name, kind), detail = sender_from_topic(topic), str(wrong)[:200]
        self.components.telemetry.reject(name, wrong.reason, message=kind, detail=detail)
        self.control.rejected(kind, name, None, wrong.reason, detail)

    def _rounds(self, training: TrainingState, now: float) -> None:
        for action in training.rounds.tick(now):
            match action:
                case Called(call):
                    self.components.transport.send(training.rounds.wire_call(call))
                case Merge(call):
                    for name, incarnation in self.publisher.merge(training, action, now):
                        self.components.telemetry.reject(name, "unreported", message="delta", fragment=call.fragment)
                        self.control.rejected(Delta.KIND, name, incarnation, "unreported", "")
                case Lost(member):
                    self.components.telemetry.event("lost", learner=member.name, incarnation=member.incarnation)
                case Unmet(call):
                    self.components.telemetry.warn("drain_unmet", fragment=call.fragment, attempt=call.attempt)
                case Drained():
                    self._finalize(training)
        if training.rounds.state == "draining" and self.current.phase == "running":
            self.current.phase = "draining"
        if training.rounds.state != "running":
            self._await_live_learners(training)
        self._checkpoint_if_due(training)
        if self._final_is_saved(training):
            self._finish(training)

    def _goodbye(self, goodbye: Goodbye, now: float) -> None:
        self.control.goodbye(goodbye, now)
        self._select_buffer_source(now)

    def _buffers(self, message: Buffers, now: float) -> None:
        try:
            self.control.buffers(message, now)
        finally:
            self._select_buffer_source(now)

    def _take_stored_buffers(self, now: float) -> None:
        """Take the writer thread's result for buffers that have arrived."""
        training, stored = self.current.training, self.components.writer.stored()
        if training is None or stored is None:
            return
        try:
            self.control.buffers_stored(training, stored, now)
        except Malformed as wrong:
            self._reject(stored.received.last, wrong)
        self._select_buffer_source(now)

    def _select_buffer_source(self, now: float) -> None:
        """Select the learner whose buffers the final model gets; a change is published at once."""
        buffers = self.current.buffers
        buffers.select_source(now)
        if (buffers.source, buffers.held) != self._published_buffers:
            self._published_buffers, self._beat_at = (buffers.source, buffers.held), 0.0

    def _fetch(self, fetch: Fetch, now: float) -> None:
        self.current.confirmations.record_request((fetch.name, fetch.incarnation), time.monotonic())
        self.publisher.fetch(fetch, now)

    def _check_beat(self, beat: Beat, _now: float) -> None:
        """An own beat shows that the broker forwards; one of a higher epoch supersedes this syncer."""
        if beat.syncer == self.current.number:
            self._echo_at = time.monotonic()
        elif beat.epoch > self.current.epoch:
            raise Superseded(
                f"another syncer serves run {beat.run} under epoch {beat.epoch}, and this one has epoch "
                f"{self.current.epoch}; this one ends, nothing is lost"
            )

    # --- beats -------------------------------------------------------------------------------------------------------
    def _beat(self, now: float) -> None:
        self._beat_at = time.monotonic() + BEAT_SECONDS
        self._report_connection()
        beat = beat_message(self.current, self.components.config, now)
        self.components.transport.send(beat, Plane.CONTROL)
        self.components.transport.send(beat, Plane.BULK)
        self._report_stall(now)
        publish_status(self.components, self.current, now)

    def _report_stall(self, now: float) -> None:
        run, telemetry = self.current, self.components.telemetry
        if run.phase in ("finished", "stopping"):
            run.stall_monitor = StallMonitor()
            return
        progress = (run.training is not None, sum(run.training.rounds.versions) if run.training else 0)
        change = run.stall_monitor.update(self._stall_reason(now), progress, time.monotonic())
        if change is not None and change.kind == "blocked":
            telemetry.warn("blocked", sentence=change.text, seconds=round(change.seconds))
        elif change is not None:
            telemetry.event("unblocked", seconds=round(change.seconds))

    def _stall_reason(self, now: float) -> StallReason | None:
        """Why the run does not advance, other than by time; None if it does."""
        run, lines = self.current, self.components.transport
        if not lines.proven:
            sentence = f"the broker at {self.components.config.broker} does not answer; is it running?"
            return StallReason("broker", lines.refusal or lines.unresolved or sentence, stall_diagnosis.SURE_SECONDS)
        if time.monotonic() - self._echo_at > ECHO_SECONDS:
            sentence = (
                f"nothing returns from the broker at {self.components.config.broker}, not even this syncer's own "
                "beats: the connection is cut, or the broker hangs; the run continues once it answers"
            )
            return StallReason("broker", sentence, stall_diagnosis.SURE_SECONDS)
        if run.training is None:
            return self.control.waits_for(now)
        return stall_reason(run.training.rounds, run.rejections, now)

    def _report_connection(self) -> None:
        """Log once that the broker rejects the connection or cannot be resolved."""
        refusal, unresolved = self.components.transport.refusal, self.components.transport.unresolved
        problem = refusal or unresolved
        if problem and problem != self._connection_problem:
            self.components.telemetry.warn("broker_refuses" if refusal else "host_unresolved", sentence=problem)
        self._connection_problem = problem

    # --- saving ------------------------------------------------------------------------------------------------------
    def _checkpoint_if_due(self, training: TrainingState) -> None:
        every, t = self.current.settings.checkpoint_every, training.rounds.t
        if every and t - self._saved_step >= every:
            self._save(training)
        self._report_saves()

    def _report_saves(self) -> None:
        """Log each written checkpoint, the first failure, and the recovery."""
        telemetry = self.components.telemetry
        for outcome in self.components.writer.outcomes():
            if outcome.error:
                if not outcome.failed:
                    telemetry.warn("checkpoint_failed", step=outcome.t, error=outcome.error)
                continue
            if outcome.failed:
                seconds = round(outcome.failing_seconds, 1)
                telemetry.event("checkpoint_recovered", step=outcome.t, failed=outcome.failed, seconds=seconds)
            telemetry.event(
                "checkpoint", step=outcome.t, number=outcome.number, bytes=outcome.bytes,
                seconds=round(outcome.seconds, 3),
            )  # fmt: skip

    def _save(self, training: TrainingState, **later: str) -> None:
        """Submit a checkpoint; `later` replaces fields of its bookkeeping."""
        self._saved_step = training.rounds.t
        self.components.writer.submit(
            training.model.snapshot(), training.bookkeeping(self.current) | later, t=training.rounds.t
        )

    # --- the end -----------------------------------------------------------------------------------------------------
    def _resumed(self) -> None:
        """Serve a run that had finished before this start."""
        training = self.current.training
        if training is not None:
            self._saved_step = training.rounds.t
            if self.current.phase == "finished":
                self._returned = True
                self._mark_finished(training)

    def _finalize(self, training: TrainingState) -> None:
        """Every fragment had its last round: the final version is Theta + e (error feedback). It is published only
        after it is saved.
        """
        training.model.finalize()
        training.digests = [{} for _ in training.digests]
        self._save(training, phase="finished")

    def _final_is_saved(self, training: TrainingState) -> bool:
        """Also true if the disk fails: that is reported at the end, which does not wait for it."""
        return training.rounds.state == "drained" and self.components.writer.settled

    def _finish(self, training: TrainingState) -> None:
        self._mark_finished(training)
        self.components.telemetry.event(
            "finished", step=self.current.settings.steps, model_hash=self.current.model_hash
        )
        self._beat_at = 0.0

    def _mark_finished(self, training: TrainingState) -> None:
        self.current.phase = "finished"
        self.current.model_hash = training.model.model_hash()
        training.rounds.ended(self.current.model_hash)
        self._finished_at = time.monotonic()

    def _over(self) -> bool:
        """Whether the run has finished and all learners know it, or a stop was requested and no round is open."""
        training, real = self.current.training, time.monotonic()
        if self._finished_at is not None and training is not None:
            return self._stop_at is not None or self._known_to_all(training, self._finished_at, real)
        if self._stop_at is None:
            return False
        if training is None or not training.rounds.calls:
            return True
        self.current.phase = "stopping"
        training.rounds.pause()
        return training.rounds.hopeless() or real - self._stop_at >= self.components.config.stop_seconds

    def _await_live_learners(self, training: TrainingState) -> None:
        self.current.confirmations.expect(member.who for member in training.rounds.members.live())

    def _known_to_all(self, training: TrainingState, finished_at: float, real: float) -> bool:
        """Whether each learner that was live at the end has the final model, or the wait for it has timed out."""
        now, confirmations = self.components.clock.now(), self.current.confirmations
        training.rounds.members.silent(now)
        self._await_live_learners(training)
        asked_at = max(self.publisher.retransmissions.asked_at, self.control.asked_at)
        linger = LINGER_SECONDS
        if self._returned:
            linger = RETURN_SECONDS if math.isinf(asked_at) else RETURN_LINGER_SECONDS
        quiet = real - finished_at >= linger and now - asked_at >= linger
        self._select_buffer_source(now)
        settled = not confirmations.pending and self.current.buffers.settled
        wait, most = self.components.config.drain_seconds, self.components.config.drain_most_seconds
        return (quiet and settled) or confirmations.timed_out(finished_at, real, wait_seconds=wait, most_seconds=most)

    def _end(self) -> None:
        training, components, saved = self.current.training, self.components, True
        if self.current.phase != "finished":
            self._last_beat()
        if training is not None:
            training.rounds.close()
            if self.current.phase == "finished":
                training.rounds.ledger.close_all()
            self._save(training)
            saved = components.writer.close(SAVE_SECONDS)
            self._report_saves()
            self._take_stored_buffers(components.clock.now())
            try:
                export(components, self.current, training, self._unconfirmed)
            except (SettingError, OSError) as wrong:
                components.telemetry.warn("export_failed", error=str(wrong))
                saved = False
        else:
            components.writer.close(SAVE_SECONDS)
        warn_unconfirmed(components, self._unconfirmed)
        warn_buffers(components, self.current, self._unconfirmed)
        components.telemetry.event("syncer_stopped", state="finished" if self.finished else "stopped", saved=saved)
        publish_status(components, self.current, components.clock.now(), None if self.finished else "stopped")
        if not saved:
            error = components.writer.last_error or "see the log"
            where = components.config.directory
            raise SaveFailed(f"the end of the run could not be saved into {where}: {error}")

    @property
    def _unconfirmed(self) -> dict[str, str]:
        return self.current.confirmations.missing if self.finished else {}

    def _last_beat(self) -> None:
        """Publish that no call is open, so that a leaving learner does not wait for its answers to be accepted."""
        self.current.phase = "stopping"
        components = self.components
        last = replace(beat_message(self.current, components.config, components.clock.now()), calls=())
        self.components.transport.send(last, Plane.CONTROL)
