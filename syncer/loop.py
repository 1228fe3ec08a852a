"""The syncer. Open this file first: `run` is a table of contents.

It hears learners (reception), lets the round machine decide (rounds), merges and publishes (merging), and keeps on
disk what must survive (checkpoint, writer). Everything it decides with is pure; it alone owns sockets and time.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..common.config import BEAT_SECONDS
from ..common.errors import Diverged, Malformed, SaveFailed, SettingError, Superseded
from ..common.fragments import TRAINABLE_DTYPES
from ..common.wire import Alive, Beat, Buffers, Delta, Fetch, Goodbye, Hello, Message, Plane, Seed
from . import stall_diagnosis
from .control_messages import ControlHandler
from .final_confirmations import describe_missing
from .ledger import Who
from .model_file import save_model
from .publish import Publisher
from .rejections import sender_from_topic
from .rounds import Called, Drained, Lost, Merge, Unmet
from .run_state import Components, RunState, Served
from .stall_diagnosis import StallMonitor, StallReason, stall_reason
from .startup import begin
from .telemetry import learner_rows, run_figures, write_summary

SAVE_SECONDS = 30.0
"""How long the last checkpoint may take."""
SAVED_SECONDS = 0.05
"""How often is looked whether the end is saved."""
ECHO_SECONDS = 3 * BEAT_SECONDS
"""How old the last beat of our own may be that came back through the broker."""
LINGER_SECONDS = 2.0
"""After the end, how long nobody must have fetched anything before the syncer goes."""
RETURN_SECONDS, RETURN_LINGER_SECONDS = 30.0, 10.0
"""The same for a syncer that comes back to a finished run, where the others may just be starting: how long it waits for
the first of them, and then for the next."""


class Syncer:
    """One syncer process's life."""

    def __init__(self, parts: Components) -> None:
        self.parts = parts
        self.current = RunState(parts.config.settings)
        self.reception = ControlHandler(parts, self.current)
        self.merging = Publisher(parts, self.current)
        self._takes: dict[type[Message], Callable[[Any, float], None]] = {
            Hello: self.reception.hello,
            Seed: self.reception.seed,
            Alive: self.reception.alive,
            Goodbye: self._goodbye,
            Buffers: self._buffers,
            Delta: self.merging.delta,
            Fetch: self._fetch,
            Beat: self._rival,
        }
        self._beat_at = 0.0
        self._stop_at: float | None = None
        self._finished_at: float | None = None
        self._returned = False
        """The run was finished when this syncer began."""
        self._hindrance = ""
        self._echo_at = time.monotonic()
        """When a beat of our own came back through the broker."""
        self._saved_step = 0
        self._told_buffers: tuple[Who | None, bool] = (None, False)
        """What the last beat said of the final buffers."""

    def run(self) -> None:
        """From the first look at the disk to the last save. SaveFailed if the disk does not hold the end, Diverged if
        merges gave nothing usable any more: then the disk holds what was good.
        """
        if not begin(self.parts, self.current, lambda: self._stop_at is not None):
            self.parts.writer.close(SAVE_SECONDS)
            return
        self.parts.lines.call_on_malformed(self._malformed)
        self._resumed()
        try:
            while not self._over():
                self._turn()
        except Diverged:
            self._end()
            raise
        self._end()

    def stop(self) -> None:
        """Finish the open rounds, save, and leave. Only sets the wish: safe in a signal handler."""
        if self._stop_at is None:
            self._stop_at = time.monotonic()

    @property
    def finished(self) -> bool:
        """All steps are done (as opposed to a run that was stopped, and may go on)."""
        return self._finished_at is not None

    # --- one turn ----------------------------------------------------------------------------------------------------
    def _turn(self) -> None:
        self.parts.lines.wait(self._idle_seconds())
        self.parts.clock.turn(connected=self.parts.lines.proven)
        now = self.parts.clock.now()
        for message in self.parts.lines.receive():
            self._take(message, now)
        self._look_at_stored_buffers(now)
        if self.current.served is not None and self.current.phase != "finished":
            self._rounds(self.current.served, now)
        self.merging.repair(now)
        if time.monotonic() >= self._beat_at:
            self._beat(now)

    def _idle_seconds(self) -> float:
        """Until the next thing that is due without a message."""
        now, served = self.parts.clock.now(), self.current.served
        idle = [BEAT_SECONDS, self._beat_at - time.monotonic()]
        if served is not None and self.current.phase != "finished":
            idle.append(served.rounds.next_deadline(now) - now)
            if served.rounds.state == "drained":
                idle.append(SAVED_SECONDS)
        if self.current.buffers.checking:
            idle.append(SAVED_SECONDS)
        if self.merging.repairs.due_at is not None:
            idle.append(self.merging.repairs.due_at - now)
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
            self._taken(message)

    def _taken(self, message: Message) -> None:
        """It was as it should be; of an answer only the whole shows that."""
        if not isinstance(message, Delta):
            who = getattr(message, "name", ""), getattr(message, "incarnation", 0)
            self.current.rejections.accepted(who, message.KIND)

    def _reject(self, message: Message, wrong: Malformed) -> None:
        name, fragment = getattr(message, "name", "?"), getattr(message, "fragment", -1)
        detail = str(wrong)[:200]
        self.parts.teller.reject(name, wrong.reason, message=message.KIND, fragment=fragment, detail=detail)
        self.reception.rejected(message.KIND, name, getattr(message, "incarnation", 0), wrong.reason, detail)

    def _malformed(self, topic: bytes, wrong: Malformed) -> None:
        """A message that could not be read."""
        (name, kind), detail = sender_from_topic(topic), str(wrong)[:200]
        self.parts.teller.reject(name, wrong.reason, message=kind, detail=detail)
        self.reception.rejected(kind, name, None, wrong.reason, detail)

    def _rounds(self, served: Served, now: float) -> None:
        for action in served.rounds.tick(now):
            match action:
                case Called(call):
                    self.parts.lines.send(served.rounds.wire_call(call))
                case Merge(call):
                    for name, incarnation in self.merging.merge(served, action, now):
                        self.parts.teller.reject(name, "unreported", message="delta", fragment=call.fragment)
                        self.reception.rejected(Delta.KIND, name, incarnation, "unreported", "")
                case Lost(member):
                    self.parts.teller.event("lost", learner=member.name, incarnation=member.incarnation)
                case Unmet(call):
                    self.parts.teller.warn("drain_unmet", fragment=call.fragment, attempt=call.attempt)
                case Drained():
                    self._finalize(served)
        if served.rounds.state == "draining" and self.current.phase == "running":
            self.current.phase = "draining"
        if served.rounds.state != "running":
            self._await_the_live(served)
        self._checkpoint_if_due(served)
        if self._final_is_saved(served):
            self._finish(served)

    def _goodbye(self, goodbye: Goodbye, now: float) -> None:
        self.reception.goodbye(goodbye, now)
        self._ask_for_buffers(now)

    def _buffers(self, message: Buffers, now: float) -> None:
        try:
            self.reception.buffers(message, now)
        finally:
            self._ask_for_buffers(now)

    def _look_at_stored_buffers(self, now: float) -> None:
        """What the writer's thread made of the buffers that had arrived."""
        served, stored = self.current.served, self.parts.writer.stored()
        if served is None or stored is None:
            return
        try:
            self.reception.buffers_stored(served, stored, now)
        except Malformed as wrong:
            self._reject(stored.received.last, wrong)
        self._ask_for_buffers(now)

    def _ask_for_buffers(self, now: float) -> None:
        """Choose the learner whose buffers the final model gets; a change is published at once."""
        buffers = self.current.buffers
        buffers.select_source(now)
        if (buffers.source, buffers.held) != self._told_buffers:
            self._told_buffers, self._beat_at = (buffers.source, buffers.held), 0.0

    def _fetch(self, fetch: Fetch, now: float) -> None:
        self.current.confirmations.record_request((fetch.name, fetch.incarnation), time.monotonic())
        self.merging.fetch(fetch, now)

    def _rival(self, beat: Beat, _now: float) -> None:
        if beat.syncer == self.current.number:
            self._echo_at = time.monotonic()
        elif beat.epoch > self.current.epoch:
            raise Superseded(
                f"another syncer serves run {beat.run} under epoch {beat.epoch}, mine is {self.current.epoch}; "
                "this one stops, nothing is lost"
            )

    # --- beats -------------------------------------------------------------------------------------------------------
    def _beat(self, now: float) -> None:
        self._beat_at = time.monotonic() + BEAT_SECONDS
        self._say_hindrance()
        beat = self._beat_message(now)
        self.parts.lines.send(beat, Plane.CONTROL)
        self.parts.lines.send(beat, Plane.BULK)
        self._look_whether_it_moves(now)
        self._tell(now)

    def _look_whether_it_moves(self, now: float) -> None:
        run, teller = self.current, self.parts.teller
        if run.phase in ("finished", "stopping"):
            run.block = StallMonitor()
            return
        progress = (run.served is not None, sum(run.served.rounds.versions) if run.served else 0)
        change = run.block.update(self._waits_for(now), progress, time.monotonic())
        if change is not None and change.kind == "blocked":
            teller.warn("blocked", sentence=change.text, seconds=round(change.seconds))
        elif change is not None:
            teller.event("unblocked", seconds=round(change.seconds))

    def _waits_for(self, now: float) -> StallReason | None:
        """What the run waits for beside time; None where nothing is amiss."""
        run, lines = self.current, self.parts.lines
        if not lines.proven:
            sentence = f"the broker at {self.parts.config.broker} does not answer; is it running?"
            return StallReason("broker", lines.refusal or lines.unresolved or sentence, stall_diagnosis.SURE_SECONDS)
        if time.monotonic() - self._echo_at > ECHO_SECONDS:
            sentence = (
                f"nothing comes back from the broker at {self.parts.config.broker}, not even this syncer's own beats: "
                "the way to it is cut, or it hangs; the run goes on once it answers"
            )
            return StallReason("broker", sentence, stall_diagnosis.SURE_SECONDS)
        if run.served is None:
            return self.reception.waits_for(now)
        return stall_reason(run.served.rounds, run.rejections, now)

    def _say_hindrance(self) -> None:
        """That the broker refuses us or cannot be found, once."""
        refusal, unresolved = self.parts.lines.refusal, self.parts.lines.unresolved
        hindrance = refusal or unresolved
        if hindrance and hindrance != self._hindrance:
            self.parts.teller.warn("broker_refuses" if refusal else "host_unresolved", sentence=hindrance)
        self._hindrance = hindrance

    def _beat_message(self, now: float) -> Beat:
        run, config = self.current, self.parts.config
        served, settings = run.served, run.settings
        return Beat(
            run=settings.run,
            epoch=run.epoch,
            state=run.phase,
            t=served.rounds.step(now) if served else 0,
            steps=settings.steps,
            step_seconds=served.rounds.members.typical_step_seconds() if served else 0.0,
            versions=tuple(served.state.versions) if served else (),
            calls=served.rounds.wire_calls() if served else (),
            settings=settings.to_map(),
            task=config.task.to_map() if config.task else {},
            fingerprint=served.state.plan.layout.fingerprint if served else "",
            data_hash=config.data_hash,
            model_hash=run.model_hash,
            buffer_source=run.buffers.source,
            buffers_held=run.buffers.held,
            syncer=run.number,
        )

    def _tell(self, now: float, state: str | None = None) -> None:
        """Redis as a person reads it: the run, in `state` or its own phase, and everybody in it."""
        run, teller = self.current, self.parts.teller
        state = state or run.phase
        block = {"blocked": run.block.text, "blocked_seconds": round(run.block.seconds) if run.block.text else ""}
        if run.served is None:
            teller.publish_waiting(run.settings, state, run.epoch, block)
            return
        rounds = run.served.rounds
        figures = run_figures(rounds, run.served.figures, state, now)
        writer = self.parts.writer
        saving = {"saved_at": writer.saved_at and round(writer.saved_at, 3), "save_error": writer.last_error}
        teller.publish_run(figures | block | {"model_hash": run.model_hash} | saving)
        for member in rounds.forget_oldest():
            teller.registry.forget_learner(member.name)
        for member in rounds.members.by_name.values():
            again = "" if member.state == "left" else run.rejections.repeated(member.who)
            teller.publish_learner(member, rounds, now, rejected_reason=again)

    # --- saving ------------------------------------------------------------------------------------------------------
    def _checkpoint_if_due(self, served: Served) -> None:
        every, t = self.current.settings.checkpoint_every, served.rounds.t
        if every and t - self._saved_step >= every:
            self._save(served)
        self._report_saves()

    def _report_saves(self) -> None:
        """Each checkpoint that was written; of those that fail, the first one and the end of the trouble."""
        teller = self.parts.teller
        for outcome in self.parts.writer.outcomes():
            if outcome.error:
                if not outcome.failed:
                    teller.warn("checkpoint_failed", step=outcome.t, error=outcome.error)
                continue
            if outcome.failed:
                seconds = round(outcome.failing_seconds, 1)
                teller.event("checkpoint_recovered", step=outcome.t, failed=outcome.failed, seconds=seconds)
            teller.event(
                "checkpoint", step=outcome.t, number=outcome.number, bytes=outcome.bytes,
                seconds=round(outcome.seconds, 3),
            )  # fmt: skip

    def _save(self, served: Served, **later: str) -> None:
        """`later`: what the bookkeeping says otherwise than it is now."""
        self._saved_step = served.rounds.t
        self.parts.writer.submit(served.state.snapshot(), served.bookkeeping(self.current) | later, t=served.rounds.t)

    # --- the end -----------------------------------------------------------------------------------------------------
    def _resumed(self) -> None:
        """A run that had ended is served until everybody knows."""
        served = self.current.served
        if served is not None:
            self._saved_step = served.rounds.t
            if self.current.phase == "finished":
                self._returned = True
                self._mark_finished(served)

    def _finalize(self, served: Served) -> None:
        """Every fragment had its last round: the final version is Theta + e. Nobody hears of it before it is saved."""
        served.state.finalize()
        served.digests = [{} for _ in served.digests]
        self._save(served, phase="finished")

    def _final_is_saved(self, served: Served) -> bool:
        """Or a disk that takes nothing is told of at the end, which does not wait for it."""
        return served.rounds.state == "drained" and self.parts.writer.settled

    def _finish(self, served: Served) -> None:
        self._mark_finished(served)
        self.parts.teller.event("finished", step=self.current.settings.steps, model_hash=self.current.model_hash)
        self._beat_at = 0.0

    def _mark_finished(self, served: Served) -> None:
        self.current.phase = "finished"
        self.current.model_hash = served.state.model_hash()
        served.rounds.ended(self.current.model_hash)
        self._finished_at = time.monotonic()

    def _over(self) -> bool:
        """Finished and known to all, or asked to stop with nothing open any more."""
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

    def _await_the_live(self, served: Served) -> None:
        self.current.confirmations.expect(member.who for member in served.rounds.members.live())

    def _known_to_all(self, served: Served, finished_at: float, real: float) -> bool:
        """Each learner that was here at the end has the final model, or has been awaited for as long as is allowed."""
        now, confirmations = self.parts.clock.now(), self.current.confirmations
        served.rounds.members.silent(now)
        self._await_the_live(served)
        asked_at = max(self.merging.repairs.asked_at, self.reception.asked_at)
        linger = LINGER_SECONDS
        if self._returned:
            linger = RETURN_SECONDS if math.isinf(asked_at) else RETURN_LINGER_SECONDS
        quiet = real - finished_at >= linger and now - asked_at >= linger
        self._ask_for_buffers(now)
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
            self._look_at_stored_buffers(parts.clock.now())
            try:
                self._export(served)
            except (SettingError, OSError) as wrong:
                parts.teller.warn("export_failed", error=str(wrong))
                saved = False
        else:
            parts.writer.close(SAVE_SECONDS)
        self._say_unconfirmed()
        self._say_buffers(served)
        parts.teller.event("syncer_stopped", state="finished" if self.finished else "stopped", saved=saved)
        self._tell(parts.clock.now(), state=None if self.finished else "stopped")
        if not saved:
            error = parts.writer.last_error or "see the log"
            where = parts.config.directory
            raise SaveFailed(f"the end of the run could not be saved into {where}: {error}")

    @property
    def _unconfirmed(self) -> dict[str, str]:
        return self.current.confirmations.missing if self.finished else {}

    def _say_unconfirmed(self) -> None:
        if self._unconfirmed:
            names, config = describe_missing(self._unconfirmed), self.parts.config
            folder = shlex.quote(str(config.directory.parent))
            sentence = (
                f"{names} had not confirmed the final model when the syncer ended, which waits "
                f"{config.drain_seconds:g} s after the end or a learner's last Hello or Fetch, and "
                f"{config.drain_most_seconds:g} s at most; the model is saved, and "
                f"`diloco syncer --broker {config.broker} --dir {folder}` gives it to learners that still train"
            )
            self.parts.teller.warn("unconfirmed", learners=names, count=len(self._unconfirmed), sentence=sentence)

    def _say_buffers(self, served: Served | None) -> None:
        """Whose buffers the exported model has, where they may not be what the learners trained with."""
        state, buffers = served.state if served else None, self.current.buffers
        if state is None or state.static_origin is not None:
            return
        live = [s.name for s in state.plan.layout.static if s.kind == "buffer" and s.dtype in TRAINABLE_DTYPES]
        if (self.finished and (buffers.offered or (live and self._unconfirmed))) or (live and not self.finished):
            why = self._without_buffers() if self.finished else "the run was stopped"
            self.parts.teller.warn(
                "buffers_of_version_0",
                sentence=f"model.safetensors has the buffers of version 0, because {why}; what training made of them "
                f"is in the learners alone (first of {len(live)}: {', '.join(live[:1]) or 'frozen parameters'})",
            )  # fmt: skip

    def _without_buffers(self) -> str:
        buffers = self.current.buffers
        if buffers.checking:
            return f"those of {buffers.checking.last.name} were not stored in time"
        failed = "; ".join(buffers.failed[:3])
        return f"no learner could give its own ({failed})" if failed else "no learner could give its own"

    def _last_beat(self) -> None:
        """No call is open any more: whoever leaves now need not wait for its answers to be taken."""
        self.current.phase = "stopping"
        last = replace(self._beat_message(self.parts.clock.now()), calls=())
        self.parts.lines.send(last, Plane.CONTROL)

    def _export(self, served: Served) -> None:
        """model.safetensors and summary.json, in the run's folder. SettingError or OSError if that fails."""
        run, where = self.current, self.parts.config.directory.parent
        save_model(served.state, where / "model.safetensors")
        state = run.phase if run.phase == "finished" else "stopped"
        summary = run_figures(served.rounds, served.figures, state, self.parts.clock.now())
        write_summary(
            where / "summary.json",
            summary
            | {
                "steps": run.settings.steps,
                "t": served.rounds.t,
                "model_hash": served.state.model_hash(),
                "learners": learner_rows(served.rounds),
                "rejected": self.parts.teller.rejection_counts(),
                "messages_dropped": self.parts.lines.dropped,
                "unconfirmed": self._unconfirmed,
                **_buffers_summary(served),
                "buffers_failed": self.current.buffers.failed,
                "messages_missed": self.parts.lines.gaps,
                "syncer_bytes_up": self.parts.lines.bytes_up,
                "syncer_bytes_down": self.parts.lines.bytes_down,
            },
        )


def _buffers_summary(served: Served) -> dict[str, Any]:
    """Which learner the static values of the exported model come from; None = from version 0."""
    origin = served.state.static_origin
    names = origin.names if origin else ()
    return {"buffers_from": origin.learner if origin else None, "buffers": len(names), "buffers_first": names[:3]}
