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
from .end_of_run import export, warn_buffers, warn_unconfirmed
from .ledger import Who
from .publish import Publisher
from .rejections import sender_from_topic
from .round_events import Called, Drained, Lost, Merge, Unmet
from .run_state import Components, RunState, Served
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

    def __init__(self, parts: Components) -> None:
        self.parts = parts
        self.current = RunState(parts.config.settings)
        self.control = ControlHandler(parts, self.current)
        self.publisher = Publisher(parts, self.current)
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
        if not begin(self.parts, self.current, lambda: self._stop_at is not None):
            self.parts.writer.close(SAVE_SECONDS)
            return
        self.parts.transport.call_on_malformed(self._malformed)
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
        self.parts.transport.wait(self._idle_seconds())
        self.parts.clock.turn(connected=self.parts.transport.proven)
        now = self.parts.clock.now()
        for message in self.parts.transport.receive():
            self._take(message, now)
        self._take_stored_buffers(now)
        if self.current.served is not None and self.current.phase != "finished":
            self._rounds(self.current.served, now)
        self.publisher.repair(now)
        if time.monotonic() >= self._beat_at:
            self._beat(now)

    def _idle_seconds(self) -> float:
        """Seconds until the next action that is due without a message."""
        now, served = self.parts.clock.now(), self.current.served
        idle = [BEAT_SECONDS, self._beat_at - time.monotonic()]
        if served is not None and self.current.phase != "finished":
            idle.append(served.rounds.next_deadline(now) - now)
            if served.rounds.state == "drained":
                idle.append(SAVED_SECONDS)
        if self.current.buffers.checking:
            idle.append(SAVED_SECONDS)
        if self.publisher.repairs.due_at is not None:
            idle.append(self.publisher.repairs.due_at - now)
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
        self.parts.telemetry.reject(name, wrong.reason, message=message.KIND, fragment=fragment, detail=detail)
        self.control.rejected(message.KIND, name, getattr(message, "incarnation", 0), wrong.reason, detail)

    def _malformed(self, topic: bytes, wrong: Malformed) -> None:
        """A message that could not be decoded."""
        (name, kind), detail = sender_from_topic(topic), str(wrong)[:200]
        self.parts.telemetry.reject(name, wrong.reason, message=kind, detail=detail)
        self.control.rejected(kind, name, None, wrong.reason, detail)

    def _rounds(self, served: Served, now: float) -> None:
        for action in served.rounds.tick(now):
            match action:
                case Called(call):
                    self.parts.transport.send(served.rounds.wire_call(call))
                case Merge(call):
                    for name, incarnation in self.publisher.merge(served, action, now):
                        self.parts.telemetry.reject(name, "unreported", message="delta", fragment=call.fragment)
                        self.control.rejected(Delta.KIND, name, incarnation, "unreported", "")
                case Lost(member):
                    self.parts.telemetry.event("lost", learner=member.name, incarnation=member.incarnation)
                case Unmet(call):
                    self.parts.telemetry.warn("drain_unmet", fragment=call.fragment, attempt=call.attempt)
                case Drained():
                    self._finalize(served)
        if served.rounds.state == "draining" and self.current.phase == "running":
            self.current.phase = "draining"
        if served.rounds.state != "running":
            self._await_live_learners(served)
        self._checkpoint_if_due(served)
        if self._final_is_saved(served):
            self._finish(served)

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
        served, stored = self.current.served, self.parts.writer.stored()
        if served is None or stored is None:
            return
        try:
            self.control.buffers_stored(served, stored, now)
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
        beat = beat_message(self.current, self.parts.config, now)
        self.parts.transport.send(beat, Plane.CONTROL)
        self.parts.transport.send(beat, Plane.BULK)
        self._report_stall(now)
        publish_status(self.parts, self.current, now)

    def _report_stall(self, now: float) -> None:
        run, telemetry = self.current, self.parts.telemetry
        if run.phase in ("finished", "stopping"):
            run.block = StallMonitor()
            return
        progress = (run.served is not None, sum(run.served.rounds.versions) if run.served else 0)
        change = run.block.update(self._stall_reason(now), progress, time.monotonic())
        if change is not None and change.kind == "blocked":
            telemetry.warn("blocked", sentence=change.text, seconds=round(change.seconds))
        elif change is not None:
            telemetry.event("unblocked", seconds=round(change.seconds))

    def _stall_reason(self, now: float) -> StallReason | None:
        """Why the run does not advance, other than by time; None if it does."""
        run, lines = self.current, self.parts.transport
        if not lines.proven:
            sentence = f"the broker at {self.parts.config.broker} does not answer; is it running?"
            return StallReason("broker", lines.refusal or lines.unresolved or sentence, stall_diagnosis.SURE_SECONDS)
        if time.monotonic() - self._echo_at > ECHO_SECONDS:
            sentence = (
                f"nothing returns from the broker at {self.parts.config.broker}, not even this syncer's own beats: "
                "the connection is cut, or the broker hangs; the run continues once it answers"
            )
            return StallReason("broker", sentence, stall_diagnosis.SURE_SECONDS)
        if run.served is None:
            return self.control.waits_for(now)
        return stall_reason(run.served.rounds, run.rejections, now)

    def _report_connection(self) -> None:
        """Log once that the broker rejects the connection or cannot be resolved."""
        refusal, unresolved = self.parts.transport.refusal, self.parts.transport.unresolved
        problem = refusal or unresolved
        if problem and problem != self._connection_problem:
            self.parts.telemetry.warn("broker_refuses" if refusal else "host_unresolved", sentence=problem)
        self._connection_problem = problem

    # --- saving ------------------------------------------------------------------------------------------------------
    def _checkpoint_if_due(self, served: Served) -> None:
        every, t = self.current.settings.checkpoint_every, served.rounds.t
        if every and t - self._saved_step >= every:
            self._save(served)
        self._report_saves()

    def _report_saves(self) -> None:
        """Log each written checkpoint, the first failure, and the recovery."""
        telemetry = self.parts.telemetry
        for outcome in self.parts.writer.outcomes():
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

    def _save(self, served: Served, **later: str) -> None:
        """Submit a checkpoint; `later` replaces fields of its bookkeeping."""
        self._saved_step = served.rounds.t
        self.parts.writer.submit(served.state.snapshot(), served.bookkeeping(self.current) | later, t=served.rounds.t)

    # --- the end -----------------------------------------------------------------------------------------------------
    def _resumed(self) -> None:
        """Serve a run that had finished before this start."""
        served = self.current.served
        if served is not None:
            self._saved_step = served.rounds.t
            if self.current.phase == "finished":
                self._returned = True
                self._mark_finished(served)

    def _finalize(self, served: Served) -> None:
        """Every fragment had its last round: the final version is Theta + e (error feedback). It is published only
        after it is saved.
        """
        served.state.finalize()
        served.digests = [{} for _ in served.digests]
        self._save(served, phase="finished")

    def _final_is_saved(self, served: Served) -> bool:
        """Also true if the disk fails: that is reported at the end, which does not wait for it."""
        return served.rounds.state == "drained" and self.parts.writer.settled

    def _finish(self, served: Served) -> None:
        self._mark_finished(served)
        self.parts.telemetry.event("finished", step=self.current.settings.steps, model_hash=self.current.model_hash)
        self._beat_at = 0.0

    def _mark_finished(self, served: Served) -> None:
        self.current.phase = "finished"
        self.current.model_hash = served.state.model_hash()
        served.rounds.ended(self.current.model_hash)
        self._finished_at = time.monotonic()

    def _over(self) -> bool:
        """Whether the run has finished and all learners know it, or a stop was requested and no round is open."""
        served, real = self.current.served, time.monotonic()
        if self._finished_at is not None and served is not None:
            return self._stop_at is not None or self._known_to_all(served, self._finished_at, real)
        if self._stop_at is None:
            return False
        if served is None or not served.rounds.calls:
            return True
        self.current.phase = "stopping"
        served.rounds.pause()
        return served.rounds.hopeless() or real - self._stop_at >= self.parts.config.stop_seconds

    def _await_live_learners(self, served: Served) -> None:
        self.current.confirmations.expect(member.who for member in served.rounds.members.live())

    def _known_to_all(self, served: Served, finished_at: float, real: float) -> bool:
        """Whether each learner that was live at the end has the final model, or the wait for it has timed out."""
        now, confirmations = self.parts.clock.now(), self.current.confirmations
        served.rounds.members.silent(now)
        self._await_live_learners(served)
        asked_at = max(self.publisher.repairs.asked_at, self.control.asked_at)
        linger = LINGER_SECONDS
        if self._returned:
            linger = RETURN_SECONDS if math.isinf(asked_at) else RETURN_LINGER_SECONDS
        quiet = real - finished_at >= linger and now - asked_at >= linger
        self._select_buffer_source(now)
        settled = not confirmations.pending and self.current.buffers.settled
        wait, most = self.parts.config.drain_seconds, self.parts.config.drain_most_seconds
        return (quiet and settled) or confirmations.timed_out(finished_at, real, wait_seconds=wait, most_seconds=most)

    def _end(self) -> None:
        served, parts, saved = self.current.served, self.parts, True
        if self.current.phase != "finished":
            self._last_beat()
        if served is not None:
            served.rounds.close()
            if self.current.phase == "finished":
                served.rounds.ledger.close_all()
            self._save(served)
            saved = parts.writer.close(SAVE_SECONDS)
            self._report_saves()
            self._take_stored_buffers(parts.clock.now())
            try:
                export(parts, self.current, served, self._unconfirmed)
            except (SettingError, OSError) as wrong:
                parts.telemetry.warn("export_failed", error=str(wrong))
                saved = False
        else:
            parts.writer.close(SAVE_SECONDS)
        warn_unconfirmed(parts, self._unconfirmed)
        warn_buffers(parts, self.current, self._unconfirmed)
        parts.telemetry.event("syncer_stopped", state="finished" if self.finished else "stopped", saved=saved)
        publish_status(parts, self.current, parts.clock.now(), None if self.finished else "stopped")
        if not saved:
            error = parts.writer.last_error or "see the log"
            where = parts.config.directory
            raise SaveFailed(f"the end of the run could not be saved into {where}: {error}")

    @property
    def _unconfirmed(self) -> dict[str, str]:
        return self.current.confirmations.missing if self.finished else {}

    def _last_beat(self) -> None:
        """Publish that no call is open, so that a leaving learner does not wait for its answers to be accepted."""
        self.current.phase = "stopping"
        parts = self.parts
        last = replace(beat_message(self.current, parts.config, parts.clock.now()), calls=())
        self.parts.transport.send(last, Plane.CONTROL)
