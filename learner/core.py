"""Protocol core of a learner or observer, from its first Hello to its goodbye. No socket, no clock, no thread: received
messages and the time go in, messages to send come out, and what concerns the training thread goes into the mailbox.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from enum import Enum

from ..common.codec import model_hash
from ..common.config import LearnerConfig
from ..common.errors import DilocoError, Malformed
from ..common.log import get_logger
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
)
from .alive_and_goodbye import ByteCounts, alive
from .departure import Departure
from .discover import other_version
from .identity import Identity
from .join_protocol import Admitted, JoinRequest, SeedSender
from .mailbox import Arrival, Capture, Joined, Mailbox
from .outbox import EncodedDelta, Outbox, encode_answer
from .public_model import PublicFragment, PublicModel
from .syncer_contact import SyncerContact

log = get_logger("learner")

ALIVE_SECONDS = 1.0
"""Between two Alive messages."""
FINAL_TRIES = 3
"""Times that the final model is fetched before a wrong hash is an error."""


class Phase(Enum):
    JOINING = "joining"
    """Hello is repeated until a Welcome comes; at the start, and again under each new epoch."""
    FOLLOWING = "following"
    """Welcomed: the public model is fetched, then followed."""
    FINISHED = "finished"
    """The run is over and this process holds its final model."""


class LearnerCore:
    """One learner's side of the protocol."""

    def __init__(self, config: LearnerConfig, me: Identity, mailbox: Mailbox, seed_sender: SeedSender) -> None:
        self.config, self.me, self.mailbox, self.seed_sender = config, me, mailbox, seed_sender
        self.join_request = JoinRequest(me, mailbox, seed_sender)
        self.phase = Phase.JOINING
        self.epoch = -1
        self.public_model: PublicModel | None = None
        """None until welcomed under this epoch."""
        self.outbox = Outbox(me)
        self.rejected: Counter[str] = Counter()
        """Received messages that were not valid, by reason."""
        self.over = False
        """Nothing more is to be sent; the link may close."""
        self._contact = SyncerContact(config, me, mailbox)
        self._departure = Departure(me, mailbox, self._contact, self.outbox)
        self._bulk: deque[Delta | Seed | Buffers] = deque()
        self._admitted: Admitted | None = None
        self._bulk_path_open = False
        """A beat came on the bulk plane."""
        self._fetching_all = False
        """The whole model is being fetched; it is handed over once all of it is here."""
        self._joined = False
        """The mailbox has the result of the join."""
        self._mismatches = 0
        self._final_hash = ""
        self._alive_due = 0.0
        self._has_reported_speed = self._has_reported_end = False
        self._is_member = False
        """The syncer counts on this process: an observer, or a learner that joined after the end, sends no Alive."""

    # --- receiving ---------------------------------------------------------------------------------------------------
    def receive(self, message: Message, plane: Plane, now: float) -> None:
        """Take one message. An invalid one is counted and logged, and changes nothing."""
        if message.run != self.me.run:
            return
        try:
            if isinstance(message, Beat):
                self._on_beat(message, plane, now)
            elif isinstance(message, Welcome):
                self._on_welcome(message, now)
            elif isinstance(message, Call):
                self._on_call(message, now)
            elif isinstance(message, Update | Keyframe) and self.public_model is not None:
                self._on_fragment(message, self.public_model, now)
        except Malformed as error:
            self.reject(error)
        except DilocoError as failure:
            self.mailbox.fail(failure)

    def reject(self, error: Malformed) -> None:
        """Count an invalid message. Only the 1st, 2nd, 4th, 8th, ... is logged, so a flood cannot fill the disk."""
        self.rejected[error.reason] += 1
        if self.rejected[error.reason].bit_count() == 1:
            log.warning("rejected", reason=error.reason, detail=str(error)[:200], times=self.rejected[error.reason])

    def _on_beat(self, beat: Beat, plane: Plane, now: float) -> None:
        if plane is Plane.BULK:  # proves the path; its content may be older than that of the control plane
            self._bulk_path_open = True
            return
        if beat.epoch < self.epoch:
            return
        self._contact.receive(beat, now)
        self.mailbox.post_beat(beat, now)
        if self.phase is Phase.FINISHED:
            if not self._bulk:
                self._bulk.extend(self._departure.buffers(beat, now))
            return  # nothing is newer than the final model
        if beat.epoch > self.epoch:
            self._enter_epoch(beat.epoch)
        if self.public_model is None:
            return
        if beat.state == "finished":
            self.public_model.want_final(beat.versions)
            self._conclude()
            return
        self.public_model.note_versions(beat.versions, now)
        for answer in self.outbox.update_open_calls(beat.calls, now):
            log.info("delta_resent", fragment=answer.call.fragment, slot=answer.call.slot)
            self._bulk.extend(answer.deltas)
        self._publish_calls()

    def _enter_epoch(self, epoch: int) -> None:
        """Another syncer process serves the run, from its newest checkpoint: join again, fetch everything."""
        if self.epoch >= 0:
            log.info("epoch_changed", epoch=epoch, before=self.epoch)
        self.epoch = epoch
        self._join_again()

    def _join_again(self) -> None:
        self.phase, self.public_model = Phase.JOINING, None
        self._drop_work()
        self.join_request.restart()

    def _drop_work(self) -> None:
        """Drop calls, answers, and what waits for the training thread: all are obsolete."""
        self.outbox.drop()
        self.mailbox.drop()
        self._bulk.clear()

    def _on_call(self, call: Call, now: float) -> None:
        if call.epoch == self.epoch and self.public_model is not None:
            self.outbox.add_call(call)
            self.public_model.note_version(call.fragment, call.version, now)
            self._publish_calls()

    def _publish_calls(self) -> None:
        if self.me.role == "learner" and not self._fetching_all:
            self.mailbox.open_calls(list(self.outbox.calls.values()))

    # --- joining -----------------------------------------------------------------------------------------------------
    def _on_welcome(self, welcome: Welcome, now: float) -> None:
        if (welcome.name, welcome.incarnation) != self.me.pair or welcome.epoch != self.epoch:
            return
        if welcome.verdict == "notice":
            sentence = f"the syncer repeatedly rejects messages of {self.me.name}: {welcome.reason}"
            log.warning("messages_rejected", learner=self.me.name, sentence=sentence)
            if self.phase is Phase.JOINING:
                self.mailbox.waits_for = f"its Hello to be accepted ({welcome.reason})"
            return
        self.mailbox.progress_at = now
        beat = self._contact.beat
        if welcome.verdict == "reset":
            if self.phase is Phase.FOLLOWING:
                log.warning("reset_ordered", reason=welcome.reason)
                self._reset()
        elif self.phase is Phase.FOLLOWING and welcome.verdict == "wait":
            log.warning("membership_lost", reason=welcome.reason)
            self._join_again()
        elif beat is not None and (self.phase is Phase.JOINING or welcome.verdict == "refused"):
            admitted = self.join_request.receive(welcome, beat)
            if admitted is not None:
                self._follow(admitted, beat, now)

    def _follow(self, admitted: Admitted, beat: Beat, now: float) -> None:
        """Fetch the whole public model, and follow it from then on."""
        plan, self._admitted = admitted.plan, admitted
        static_bytes = 0 if self._joined else plan.layout.static_bytes
        self.public_model = PublicModel(plan, admitted.settings.codec_down, self.epoch, static_bytes)
        self.phase, self._fetching_all = Phase.FOLLOWING, True
        self._alive_due = 0.0
        self.mailbox.waits_for = "the public model"
        self._is_member = self.me.role == "learner" and beat.state != "finished"
        if beat.state == "finished":
            self.public_model.want_final(beat.versions)
        else:
            self.public_model.note_versions(beat.versions, now)

    # --- the public model --------------------------------------------------------------------------------------------
    def _on_fragment(self, message: Update | Keyframe, public_model: PublicModel, now: float) -> None:
        self.mailbox.progress_at = now
        if isinstance(message, Update):
            public = public_model.take_update(message, now)
        else:
            public = public_model.take_keyframe(message, now)
        if self._fetching_all:
            if public_model.complete:
                self._complete_fetch(public_model)
        elif public is not None:
            held = zip(public_model.held, self.mailbox.public, strict=True)
            self.mailbox.public = tuple(new or old for new, old in held)
            self.mailbox.deliver([self._arrival(message.fragment, public)])
        self._conclude()

    def _arrival(self, fragment: int, public: PublicFragment) -> Arrival:
        own = public.part_of(self.me.pair)
        if self.me.pin:
            public = PublicFragment(public.version, public.vector.pin_memory(), public.digest, public.contributors)
        return Arrival(fragment, self.epoch, public, own)

    def _complete_fetch(self, public_model: PublicModel) -> None:
        """Every fragment is here: the join is complete, or the whole model is handed over again."""
        fragments = tuple(public_model.fragments())
        self._fetching_all = False
        self._conclude()
        if self._fetching_all:
            return  # the final model did not match its hash and is fetched again
        self.mailbox.public = fragments
        beat = self._contact.beat
        if self._joined:
            self.mailbox.deliver([self._arrival(p, public) for p, public in enumerate(fragments)], reset=True)
        elif beat is not None and self._admitted is not None:
            self._joined = True
            self.mailbox.post_joined(
                Joined(
                    public_model.plan, self._admitted.settings, self._admitted.task, self.epoch, beat.t, fragments,
                    public_model.static or b"",
                )
            )  # fmt: skip
        self._publish_calls()

    def _reset(self) -> None:
        """Fetch every fragment again, and keep nothing of what this learner has done since."""
        if self.public_model is not None:
            self._drop_work()
            self.public_model.want_all()
            self._fetching_all = True

    def _conclude(self) -> None:
        """Once the run is over and every final fragment is here: compare the hash, hand over the final model."""
        beat, public_model = self._contact.beat, self.public_model
        if self.phase is not Phase.FOLLOWING or beat is None or beat.state != "finished" or public_model is None:
            return
        fragments = public_model.fragments()
        if not public_model.complete or tuple(p.version for p in fragments) != beat.versions:
            return
        own_hash = model_hash([public.vector for public in fragments])
        if own_hash != beat.model_hash:
            self._mismatches += 1
            if self._mismatches >= FINAL_TRIES:
                raise DilocoError(
                    f"the final model of run {self.me.run} was fetched {FINAL_TRIES} times, and its hash "
                    f"{own_hash[:16]} is not the {beat.model_hash[:16]} that the syncer reports"
                )
            self._reset()
            return
        log.info("finished", model_hash=own_hash[:16])
        self.phase, self._final_hash = Phase.FINISHED, own_hash
        self._drop_work()
        self.mailbox.public = tuple(fragments)
        self.mailbox.finish(fragments)

    # --- sending -----------------------------------------------------------------------------------------------------
    def tick(self, now: float, *, control_proven: bool, bulk_proven: bool, traffic: ByteCounts) -> Iterator[Message]:
        """The control messages that are due. Call it often; one that cannot be sent is due again later.

        *_proven: whether the broker accepts messages on that plane.
        """
        self._contact.exclude_pause(now)
        self._check_contact(now, proven=control_proven and bulk_proven)
        self._take_from_mailbox()
        is_learner = self.me.role == "learner" and self._admitted is not None
        if not control_proven:
            self.over |= self._departure.gives_up(now, is_member=is_learner)
            return
        if self.phase is Phase.JOINING:
            yield from self._hellos(now, bulk_proven=bulk_proven)
        elif self.phase is Phase.FOLLOWING and self.public_model is not None:
            if self._is_member:
                yield from self._alives(now, self.public_model, traffic)
            for request in self.public_model.requests(now):
                if not self._fetching_all:
                    log.info("gap", fragment=request.fragment, version=request.version, fetches=request.what)
                yield Fetch(
                    run=self.me.run, name=self.me.name, incarnation=self.me.incarnation, epoch=self.epoch,
                    what=request.what, fragment=request.fragment, version=request.version, chunks=request.chunks,
                )  # fmt: skip
        if not is_learner:
            self.over |= bool(self.mailbox.leaving)
            return
        farewell = self._goodbye(now)
        if farewell is None:
            return
        if self._is_member and self.public_model is not None and not self._has_reported_end:
            self._has_reported_end = True  # its whole traffic and time, once
            held = self.public_model.held
            yield alive(self.me, self.epoch, self.mailbox.status, held, traffic=traffic, now=now)
        yield farewell

    def _check_contact(self, now: float, *, proven: bool) -> None:
        is_following = self._joined and self.phase is not Phase.FINISHED
        if is_following and (orphan := self._contact.orphan_error(now)) is not None:
            self.mailbox.fail(orphan)
        if proven or not self._joined:
            self._contact.note_proof(now)
        if is_following and not self.mailbox.leaving:
            self._contact.log_silence(now)

    def _hellos(self, now: float, *, bulk_proven: bool) -> Iterator[Message]:
        if self._contact.beat is None:
            self.mailbox.waits_for = "a beat of the syncer" + other_version(self.rejected)
        elif not (bulk_proven and self._bulk_path_open):
            self.mailbox.waits_for = "its path for bulk messages to be open"
        else:
            yield from self.join_request.hello(now)

    def _alives(self, now: float, public_model: PublicModel, traffic: ByteCounts) -> Iterator[Message]:
        status = self.mailbox.status
        if status is not None and status.step_seconds > 0 and not self._has_reported_speed:
            self._has_reported_speed, self._alive_due = True, now  # the first call may be waiting for this figure
        if now >= self._alive_due:
            self._alive_due = now + ALIVE_SECONDS
            yield alive(self.me, self.epoch, status, public_model.held, traffic=traffic, now=now)

    def _goodbye(self, now: float) -> Goodbye | None:
        if self.phase is Phase.FINISHED:
            return self._departure.after_the_end(self._final_hash, now)
        return self._departure.in_mid_run(now, unsent=bool(self._bulk))

    def _take_from_mailbox(self) -> None:
        if self.mailbox.take_reset_request() and self.phase is Phase.FOLLOWING:
            self._reset()
        for capture in self.mailbox.take_captures():
            try:
                self._answer(capture)
            except Malformed as error:
                self.reject(error)
                self.mailbox.report_nonfinite()
            finally:
                self.mailbox.recycle(capture)

    def _answer(self, capture: Capture) -> None:
        """Encode a capture, keep it, and queue its chunks."""
        if self._admitted is None or not self.outbox.wanted(capture.call):
            return
        fragment = self._admitted.plan.fragments[capture.call.fragment]
        deltas = encode_answer(self.me, fragment, self._admitted.settings.codec_up, capture)
        self.outbox.keep(EncodedDelta(capture.call, deltas))
        self._bulk.extend(deltas)
        if not self._has_reported_speed:  # the syncer does not know yet that this learner is fast enough to answer
            self._alive_due = 0.0

    # --- bulk --------------------------------------------------------------------------------------------------------
    @property
    def busy(self) -> bool:
        """Bulk messages wait to be sent."""
        return bool(self._bulk) or self.seed_sender.sending

    def next_bulk(self) -> Delta | Seed | Buffers | None:
        """The next bulk message to send, or None. Report its fate by `sent`, or put it back by `unsent`."""
        while self._bulk:
            message = self._bulk.popleft()
            if not isinstance(message, Delta) or self.outbox.keeps(message.slot, message.attempt):
                return message
        return self.seed_sender.next()

    def unsent(self, message: Delta | Seed | Buffers) -> None:
        self._bulk.appendleft(message)

    def sent(self, message: Message, now: float) -> None:
        if isinstance(message, Delta) and message.chunk == message.chunks - 1:
            self.outbox.sent(message.slot, message.attempt, now)
        elif isinstance(message, Seed | Buffers):
            self.mailbox.progress_at = now
        elif isinstance(message, Goodbye) and self.mailbox.leaving:
            self.over = not self._departure.awaits_buffers(now)
