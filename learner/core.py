"""What a learner (or observer) says and hears, from the first beat to its goodbye. No socket, no clock, no thread:
messages and the time come in, messages go out, and what concerns the training thread goes to the mailbox.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from enum import Enum

from ..common.codec import digest, model_hash
from ..common.config import BEAT_SECONDS, SILENT_BEATS, LearnerConfig
from ..common.errors import DilocoError, Malformed, Orphaned
from ..common.log import get_logger
from ..common.silence import FIRST_SECONDS, Silence
from ..common.wire import (
    Beat,
    Buffers,
    Call,
    Delta,
    Fetch,
    Goodbye,
    Keyframe,
    Message,
    Plane,
    Seed,
    Update,
    Welcome,
    split,
)
from .discover import other_version
from .identity import Identity
from .join_protocol import Admitted, JoinRequest, SeedSender
from .mailbox import Arrival, Capture, Joined, Mailbox
from .outbox import LONGEST_RESEND_SECONDS, RESEND_SECONDS, EncodedDelta, Outbox, encode_answer
from .public_model import PublicFragment, PublicModel
from .status_messages import ByteCounts, alive, goodbye, orphaned

log = get_logger("learner")

ALIVE_SECONDS = 1.0
PAUSE_SECONDS = 2.0
"""Between two ticks; more, and the process itself was not running."""
FINAL_TRIES = 3
"""So often the final model is fetched before a wrong hash is an error."""
LEAVE_SECONDS = 5.0
"""How long a learner that leaves in mid-run waits for its last answers to be taken."""
BUFFERS_SECONDS = 30.0
"""How long a learner that leaves after the end waits until the final model has the buffers of one learner."""
HURRY_SECONDS = 1.0
"""The same when it leaves because of an error or Ctrl-C."""


ABSENT_SECONDS = 1.0
"""The same when no broker listens."""


class Phase(Enum):
    ASKING = "asking"
    """Hello is repeated until a Welcome comes; at the start, and again under each new epoch."""
    FOLLOWING = "following"
    """Welcomed: the public model is fetched, then followed."""
    FINISHED = "finished"
    """The run is over and its final model is here."""


class LearnerCore:
    """One learner's side of the protocol."""

    def __init__(self, config: LearnerConfig, me: Identity, mailbox: Mailbox, seeding: SeedSender) -> None:
        self.config, self.me, self.mailbox, self.seeding = config, me, mailbox, seeding
        self.admission = JoinRequest(me, mailbox, seeding)
        self.phase = Phase.ASKING
        self.epoch = -1
        self.follower: PublicModel | None = None
        """None until welcomed under this epoch."""
        self.answers = Outbox(me)
        self.rejected: Counter[str] = Counter()
        """Messages that were not what they said they are, by reason."""
        self.over = False
        """Nothing more is to be said; the link may close."""
        self._bulk: deque[Delta | Seed | Buffers] = deque()
        self._admitted: Admitted | None = None
        self._beat: Beat | None = None
        self._beat_at = self._ticked_at = self._proven_at = 0.0
        self._no_beat, self._no_way = Silence(), Silence()
        self._bulk_heard = False
        self._gathering = False
        """The whole model is being fetched; it is handed over when all of it is here."""
        self._announced = False
        """The join was told that it is over."""
        self._buffers_due, self._buffers_wait = 0.0, RESEND_SECONDS
        """When the buffers are sent again if the syncer still asks, and how long after the last time that is."""
        self._mismatches = 0
        self._final_hash = ""
        self._due: dict[str, float] = {}
        self._member = False
        """The syncer counts on us: whoever comes after the end, or only looks, reports nothing."""
        self._leaving_since: float | None = None

    # --- hearing -----------------------------------------------------------------------------------------------------
    def heard(self, message: Message, plane: Plane, now: float) -> None:
        """Take one message. What it should not contain is counted and told, and changes nothing."""
        if message.run != self.me.run:
            return
        try:
            if isinstance(message, Beat):
                self._heard_beat(message, plane, now)
            elif isinstance(message, Welcome):
                self._heard_welcome(message, now)
            elif isinstance(message, Call):
                self._heard_call(message, now)
            elif isinstance(message, Update | Keyframe) and self.follower is not None:
                self._heard_fragment(message, self.follower, now)
        except Malformed as wrong:
            self.malformed(wrong)
        except DilocoError as failure:
            self.mailbox.fail(failure)

    def malformed(self, wrong: Malformed) -> None:
        """Count a message that is not what it says; the 1st, 2nd, 4th, 8th is told, so that a flood fills no disk."""
        self.rejected[wrong.reason] += 1
        if self.rejected[wrong.reason].bit_count() == 1:
            log.warning("rejected", reason=wrong.reason, detail=str(wrong)[:200], times=self.rejected[wrong.reason])

    def _heard_beat(self, beat: Beat, plane: Plane, now: float) -> None:
        if plane is Plane.BULK:  # proves the path; what it says may be older than what the control plane said
            self._bulk_heard = True
            return
        if beat.epoch < self.epoch:
            return
        if self._no_beat.end():
            log.info("syncer_heard_again", learner=self.me.name, seconds=round(now - self._beat_at, 1))
        self._beat, self._beat_at = beat, now
        self.mailbox.heard(beat, now)
        if self.phase is Phase.FINISHED:
            self._give_buffers(beat, now)
            return  # nothing can be better than the final model
        if beat.epoch > self.epoch:
            self._enter_epoch(beat.epoch)
        if self.follower is None:
            return
        if beat.state == "finished":
            self.follower.want_final(beat.versions)
            self._conclude()
            return
        self.follower.heard_versions(beat.versions, now)
        for answer in self.answers.heard_open(beat.calls, now):
            log.info("delta_resent", fragment=answer.call.fragment, slot=answer.call.slot)
            self._bulk.extend(answer.deltas)
        self._show_calls()

    def _enter_epoch(self, epoch: int) -> None:
        """Another syncer process serves the run, from its newest checkpoint: be welcomed again, fetch everything."""
        if self.epoch >= 0:
            log.info("epoch_changed", epoch=epoch, before=self.epoch)
        self.epoch = epoch
        self._ask_anew()

    def _ask_anew(self) -> None:
        self.phase, self.follower = Phase.ASKING, None
        self._forget_work()
        self.admission.ask_anew()

    def _forget_work(self) -> None:
        """Calls, answers, and what waits for the training thread are of no use any more."""
        self.answers.drop()
        self.mailbox.drop()
        self._bulk.clear()

    def _heard_call(self, call: Call, now: float) -> None:
        if call.epoch == self.epoch and self.follower is not None:
            self.answers.heard_call(call)
            self.follower.heard_version(call.fragment, call.version, now)
            self._show_calls()

    def _show_calls(self) -> None:
        if self.me.role == "learner" and not self._gathering:
            self.mailbox.open_calls(list(self.answers.calls.values()))

    # --- joining -----------------------------------------------------------------------------------------------------
    def _heard_welcome(self, welcome: Welcome, now: float) -> None:
        if (welcome.name, welcome.incarnation) != self.me.pair or welcome.epoch != self.epoch:
            return
        if welcome.verdict == "notice":
            sentence = f"the syncer rejects what {self.me.name} sends, again and again: {welcome.reason}"
            log.warning("messages_rejected", learner=self.me.name, sentence=sentence)
            if self.phase is Phase.ASKING:
                self.mailbox.waits_for = f"its Hello to be taken ({welcome.reason})"
            return
        self.mailbox.progress_at = now
        if welcome.verdict == "reset":
            if self.phase is Phase.FOLLOWING:
                log.warning("reset_ordered", reason=welcome.reason)
                self._reset()
        elif self.phase is Phase.FOLLOWING and welcome.verdict == "wait":
            log.warning("forgotten", reason=welcome.reason)
            self._ask_anew()
        elif self._beat is not None and (self.phase is Phase.ASKING or welcome.verdict == "refused"):
            admitted = self.admission.answered(welcome, self._beat)
            if admitted is not None:
                self._follow(admitted, self._beat, now)

    def _follow(self, admitted: Admitted, beat: Beat, now: float) -> None:
        """Fetch the whole public model, and follow it from then on."""
        plan, self._admitted = admitted.plan, admitted
        static_bytes = 0 if self._announced else plan.layout.static_bytes
        self.follower = PublicModel(plan, admitted.settings.codec_down, self.epoch, static_bytes)
        self.phase, self._gathering = Phase.FOLLOWING, True
        self._due.pop("alive", None)
        self.mailbox.waits_for = "the public model"
        self._member = self.me.role == "learner" and beat.state != "finished"
        if beat.state == "finished":
            self.follower.want_final(beat.versions)
        else:
            self.follower.heard_versions(beat.versions, now)

    # --- the public model --------------------------------------------------------------------------------------------
    def _heard_fragment(self, message: Update | Keyframe, follower: PublicModel, now: float) -> None:
        self.mailbox.progress_at = now
        if isinstance(message, Update):
            public = follower.take_update(message, now)
        else:
            public = follower.take_keyframe(message, now)
        if self._gathering:
            if follower.complete:
                self._gathered(follower)
        elif public is not None:
            self.mailbox.whole = tuple(new or old for new, old in zip(follower.held, self.mailbox.whole, strict=True))
            self.mailbox.deliver([self._arrival(message.fragment, public)])
        self._conclude()

    def _arrival(self, fragment: int, public: PublicFragment) -> Arrival:
        own = public.part_of(self.me.pair)
        if self.me.pin:
            public = PublicFragment(public.version, public.vector.pin_memory(), public.digest, public.contributors)
        return Arrival(fragment, self.epoch, public, own)

    def _gathered(self, follower: PublicModel) -> None:
        """Every fragment is here: the join is over, or the model is handed over anew as a whole."""
        whole = tuple(follower.whole())
        self._gathering = False
        self._conclude()
        if self._gathering:
            return  # the final model was not what its hash says: it is fetched again
        self.mailbox.whole = whole
        if self._announced:
            self.mailbox.deliver([self._arrival(p, public) for p, public in enumerate(whole)], reset=True)
        elif self._beat is not None and self._admitted is not None:
            self._announced = True
            self.mailbox.joined(
                Joined(
                    follower.plan, self._admitted.settings, self._admitted.task, self.epoch, self._beat.t, whole,
                    follower.static or b"",
                )
            )  # fmt: skip
        self._show_calls()

    def _reset(self) -> None:
        """Take every fragment anew, and nothing of what this learner did since."""
        if self.follower is not None:
            self._forget_work()
            self.follower.want_all()
            self._gathering = True

    def _conclude(self) -> None:
        """Once the run is over and every final fragment is here: compare the hash, tell the training thread."""
        beat, follower = self._beat, self.follower
        if self.phase is not Phase.FOLLOWING or beat is None or beat.state != "finished" or follower is None:
            return
        whole = follower.whole()
        if not follower.complete or tuple(p.version for p in whole) != beat.versions:
            return
        found = model_hash([public.vector for public in whole])
        if found != beat.model_hash:
            self._mismatches += 1
            if self._mismatches >= FINAL_TRIES:
                raise DilocoError(
                    f"the final model of run {self.me.run} was fetched {FINAL_TRIES} times, and its hash "
                    f"{found[:16]} is not the {beat.model_hash[:16]} that the syncer tells"
                )
            self._reset()
            return
        log.info("finished", model_hash=found[:16])
        self.phase, self._final_hash = Phase.FINISHED, found
        self._forget_work()
        self.mailbox.whole = tuple(whole)
        self.mailbox.finish(whole)

    # --- saying ------------------------------------------------------------------------------------------------------
    def tick(self, now: float, *, control_proven: bool, bulk_proven: bool, traffic: ByteCounts) -> Iterator[Message]:
        """The control messages that are due. To be called often; one that cannot be sent comes again by itself."""
        self._leave_out_pauses(now)
        self._check_orphan(now)
        self._say_silence(now, proven=control_proven and bulk_proven)
        self._take_from_desk()
        if not control_proven:
            self._leave_unheard(now)
            return
        if self.phase is Phase.ASKING:
            yield from self._hellos(now, bulk_proven=bulk_proven)
        elif self.phase is Phase.FOLLOWING and self.follower is not None:
            if self._member:
                yield from self._alives(now, self.follower, traffic)
            for request in self.follower.requests(now):
                if not self._gathering:
                    log.info("gap", fragment=request.fragment, version=request.version, fetches=request.what)
                yield Fetch(
                    run=self.me.run, name=self.me.name, incarnation=self.me.incarnation, epoch=self.epoch,
                    what=request.what, fragment=request.fragment, version=request.version, chunks=request.chunks,
                )  # fmt: skip
        for farewell in self._goodbyes(now):
            if self._member and self.follower is not None and "last" not in self._due:
                self._due["last"] = now  # its whole traffic and time, once
                yield alive(self.me, self.epoch, self.mailbox.status, self.follower.held, traffic=traffic, now=now)
            yield farewell

    def _is_due(self, what: str, now: float, every_seconds: float) -> bool:
        if now < self._due.get(what, now):
            return False
        self._due[what] = now + every_seconds
        return True

    def _leave_out_pauses(self, now: float) -> None:
        """This process itself stood still (stopped, swapped out): what it did not hear meanwhile proves nothing."""
        if self._ticked_at and now - self._ticked_at > PAUSE_SECONDS:
            self._beat_at += now - self._ticked_at
            self._proven_at += now - self._ticked_at
        self._ticked_at = now

    def _check_orphan(self, now: float) -> None:
        limit, beat = self.config.orphan_timeout_seconds, self._beat
        if self._announced and beat is not None and self.phase is not Phase.FINISHED and now - self._beat_at > limit:
            self.mailbox.fail(Orphaned(orphaned(self.config, beat, now - self._beat_at, self.mailbox.refusal)))

    def _say_silence(self, now: float, *, proven: bool) -> None:
        """Log that no beat comes, or that the broker takes nothing: soon, seldom again, and when it is over."""
        if proven or not self._announced:
            if self._no_way.end():
                log.info("broker_takes_again", learner=self.me.name, seconds=round(now - self._proven_at, 1))
            self._proven_at = now
        if not self._announced or self.phase is Phase.FINISHED or self.mailbox.leaving:
            return
        if self._no_beat.report_due(now - self._beat_at):
            log.warning("syncer_silent", learner=self.me.name, seconds=round(now - self._beat_at, 1),
                        sentence=self._silence(now - self._beat_at))  # fmt: skip
        elif now - self._beat_at < FIRST_SECONDS and self._no_way.report_due(now - self._proven_at):
            seconds = now - self._proven_at
            why = self.mailbox.refusal or "is a port of it blocked?"
            sentence = (
                f"beats of run {self.me.run} arrive, and the broker at {self.config.broker} has taken nothing of "
                f"{self.me.name} for {seconds:.0f} s: {why}"
            )
            log.warning("broker_takes_nothing", learner=self.me.name, seconds=round(seconds, 1), sentence=sentence)

    def _silence(self, seconds: float) -> str:
        why = f" ({self.mailbox.refusal})" if self.mailbox.refusal else ""
        heard = f"no beat of run {self.me.run} has come from {self.config.broker} for {seconds:.0f} s{why}"
        if self.me.role != "learner":
            return f"{heard}; the model that is shown stays at its newest version, and follows once the syncer is heard"
        limit = self.config.orphan_timeout_seconds
        return (
            f"{heard}; {self.me.name} trains on, sends once the syncer is heard, and saves and ends after {limit:g} s"
        )

    def _hellos(self, now: float, *, bulk_proven: bool) -> Iterator[Message]:
        if self._beat is None:
            self.mailbox.waits_for = "a beat of the syncer" + other_version(self.rejected)
        elif not (bulk_proven and self._bulk_heard):
            self.mailbox.waits_for = "its path for bulk messages to be open"
        else:
            yield from self.admission.hello(now)

    def _alives(self, now: float, follower: PublicModel, traffic: ByteCounts) -> Iterator[Message]:
        status = self.mailbox.status
        if status is not None and status.step_seconds > 0 and "timed" not in self._due:
            self._due["timed"] = self._due["alive"] = now  # the first call may be waiting for this figure
        if self._is_due("alive", now, ALIVE_SECONDS):
            yield alive(self.me, self.epoch, status, follower.held, traffic=traffic, now=now)

    def _take_from_desk(self) -> None:
        if self.mailbox.take_reset_request() and self.phase is Phase.FOLLOWING:
            self._reset()
        for capture in self.mailbox.take_captures():
            try:
                self._answer(capture)
            except Malformed as wrong:
                self.malformed(wrong)
                self.mailbox.report_nonfinite()
            finally:
                self.mailbox.recycle(capture)

    def _answer(self, capture: Capture) -> None:
        """Encode what was captured, keep it, and queue its chunks."""
        if self._admitted is None or not self.answers.wanted(capture.call):
            return
        fragment = self._admitted.plan.fragments[capture.call.fragment]
        deltas = encode_answer(self.me, fragment, self._admitted.settings.codec_up, capture)
        self.answers.keep(EncodedDelta(capture.call, deltas))
        self._bulk.extend(deltas)
        if "timed" not in self._due:  # the syncer does not know our pace yet, and so not that we can have done this
            self._due.pop("alive", None)

    # --- bulk --------------------------------------------------------------------------------------------------------
    @property
    def busy(self) -> bool:
        """Bulk messages wait to be sent."""
        return bool(self._bulk) or self.seeding.sending

    def next_bulk(self) -> Delta | Seed | Buffers | None:
        """The next bulk message to send, or None. `sent` is to be told when it went out; `unsent` puts it back."""
        while self._bulk:
            message = self._bulk.popleft()
            if not isinstance(message, Delta) or self.answers.keeps(message.slot, message.attempt):
                return message
        return self.seeding.next()

    def unsent(self, message: Delta | Seed | Buffers) -> None:
        self._bulk.appendleft(message)

    def sent(self, message: Message, now: float) -> None:
        if isinstance(message, Delta) and message.chunk == message.chunks - 1:
            self.answers.sent(message.slot, message.attempt, now)
        elif isinstance(message, Seed | Buffers):
            self.mailbox.progress_at = now
        elif isinstance(message, Goodbye) and self.mailbox.leaving:
            self.over = not self._buffers_wanted(now)

    # --- leaving -----------------------------------------------------------------------------------------------------
    def _goodbyes(self, now: float) -> Iterator[Message]:
        """After the end of the run each second; else once, when the last answers were taken or the time is up."""
        reason, status = self.mailbox.leaving, self.mailbox.status
        if self.me.role != "learner" or self._admitted is None:
            self.over |= bool(reason)
        elif self.phase is Phase.FINISHED:
            moved = self.mailbox.moved
            news = moved is not None and bool(moved.count) and "moved" not in self._due
            if news or self._is_due("goodbye", now, ALIVE_SECONDS) or (reason and not self._buffers_wanted(now)):
                self._due |= {"moved": now} if news else {}
                known = 0 if reason else None
                yield goodbye(self.me, "finished", status, self._final_hash, known if moved is None else moved.count)
        elif reason and (now >= self._leaves_by(now) or not self._awaited(reason)):
            yield goodbye(self.me, reason, status, "")

    def _give_buffers(self, beat: Beat, now: float) -> None:
        """Queue what training has made of the static part, if the syncer asks this learner for it; again if it still
        does some time later.
        """
        moved = self.mailbox.moved
        if moved is None or beat.buffers_held or beat.buffer_source != self.me.pair or self._bulk:
            return
        if now < self._buffers_due:
            return
        self._buffers_wait = min(LONGEST_RESEND_SECONDS, 2 * self._buffers_wait)
        self._buffers_due = now + self._buffers_wait
        told, fragment = digest(moved.payload), len(beat.versions)
        self._bulk.extend(
            Buffers(
                run=self.me.run, name=self.me.name, incarnation=self.me.incarnation, epoch=beat.epoch,
                fragment=fragment, digest=told, **part,
            )
            for part in split(moved.payload)
        )  # fmt: skip

    def _buffers_wanted(self, now: float) -> bool:
        """The syncer may still ask for this learner's buffers, so that it does not leave yet."""
        moved, beat = self.mailbox.moved, self._beat
        if moved is None or not moved.count or beat is None or (beat.state == "finished" and beat.buffers_held):
            return False
        self._leaving_since = now if self._leaving_since is None else self._leaving_since
        heard = now - self._beat_at < SILENT_BEATS * BEAT_SECONDS
        if heard and now - self._leaving_since < BUFFERS_SECONDS:
            self.mailbox.progress_at = now
            return True
        if "not_taken" not in self._due:
            self._due["not_taken"] = now
            log.warning("buffers_not_taken", learner=self.me.name, tensors=moved.count)
        return False

    def _leave_unheard(self, now: float) -> None:
        """No broker listens: a goodbye waits for one for a short while only."""
        if self.mailbox.leaving and now >= self._leaves_by(now, ABSENT_SECONDS):
            if self._admitted is not None and self.me.role == "learner":
                log.warning("goodbye_not_sent", learner=self.me.name, answers_unconfirmed=self.answers.unconfirmed)
            self.over = True

    def _awaited(self, reason: str) -> bool:
        """Something is still to be sent; or, without hurry, to be taken."""
        return bool(self._bulk) or (reason == "left" and self.answers.unconfirmed > 0)

    def _leaves_by(self, now: float, most_seconds: float = LEAVE_SECONDS) -> float:
        if self._leaving_since is None:
            self._leaving_since = now
        patience = LEAVE_SECONDS if self.mailbox.leaving == "left" else HURRY_SECONDS
        return self._leaving_since + min(patience, most_seconds)
