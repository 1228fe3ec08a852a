"""What a learner (or observer) says and hears, from the first beat to its goodbye. No socket, no clock, no thread:
messages and the time come in, messages go out, and what concerns the training thread goes to the desk.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol

import msgpack
from torch import Tensor

from ..common.codec import digest, encode_delta, model_hash
from ..common.config import LearnerConfig, RunSettings, TaskSettings
from ..common.errors import DilocoError, Malformed, Orphaned, Refused
from ..common.fragments import Layout, Plan, balanced_plan
from ..common.log import get_logger
from ..common.wire import (
    Alive,
    Beat,
    Call,
    Delta,
    Fetch,
    Goodbye,
    Hello,
    Keyframe,
    Message,
    Plane,
    Seed,
    Update,
    Welcome,
    split,
)
from .answers import Answer, Answers
from .books import Mark
from .desk import Arrival, Capture, Desk, Joined
from .follower import Follower, Public
from .replica import anchor, close_holes

log = get_logger("learner")

HELLO_SECONDS = 0.5
ALIVE_SECONDS = 1.0
SEED_PATIENCE = 3
"""So many answers in a row that name the same fragments as missing, and they are sent again."""
FINAL_TRIES = 3
LEAVE_SECONDS = 5.0
"""How long a learner that leaves in mid-run waits for its last answers to be taken."""
HURRY_SECONDS = 1.0
"""The same when it leaves because of an error or Ctrl-C."""


class Phase(Enum):
    ASKING = "asking"
    """Hello is repeated until a Welcome comes; at the start, and again under each new epoch."""
    FOLLOWING = "following"
    """Welcomed: the public model is fetched, then followed."""
    FINISHED = "finished"
    """The final model is here."""


class SeedSource(Protocol):
    """Where version 0 comes from if this learner is chosen to give it."""

    def vector(self, fragment: int) -> Tensor: ...

    def static_bytes(self) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who speaks, and for which model."""

    name: str
    incarnation: int
    layout: Layout
    role: Literal["learner", "observer"] = "learner"
    data_hash: str = ""
    device: str = ""
    host: str = ""
    pid: int = 0
    pin: bool = False
    """Vectors for the training thread are laid into pinned memory."""


class Conversation:
    """One learner's side of the protocol."""

    def __init__(
        self, config: LearnerConfig, me: Identity, desk: Desk, seed_source: Callable[[Plan], SeedSource] | None
    ) -> None:
        self.config, self.me, self.desk = config, me, desk
        self.phase = Phase.ASKING
        self.epoch = -1
        self.plan: Plan | None = None
        self.follower: Follower | None = None
        self.answers = Answers(me.name)
        self.rejected: Counter[str] = Counter()
        """Messages that were not what they said they are, by reason."""
        self.bulk: deque[Delta | Seed] = deque()
        """Chunks that wait to be sent, in order."""
        self.over = False
        """Nothing more is to be said; the link may close."""
        self._settings: RunSettings | None = None
        self._task: TaskSettings | None = None
        self._static = b""
        self._beat: Beat | None = None
        self._beat_at = 0.0
        self._bulk_heard = False
        self._gathering = False
        """The whole model is being fetched; it is handed over when all of it is here."""
        self._announced = False
        """The join was told that it is over."""
        self._mismatches = 0
        self._seed_source = seed_source
        self._seeds: Iterator[Seed] | None = None
        self._seed_missing: tuple[int, ...] = ()
        self._seed_waits = 0
        self._due: dict[str, float] = {}
        self._leave_by: float | None = None
        self._final_hash = ""

    # --- hearing -----------------------------------------------------------------------------------------------------
    def heard(self, message: Message, plane: Plane, now: float) -> None:
        """Take one message. What it should not contain is counted and told, and changes nothing."""
        if message.run != self.config.run:
            return
        try:
            match message:
                case Beat():
                    self._heard_beat(message, plane, now)
                case Welcome():
                    self._heard_welcome(message, now)
                case Call():
                    self._heard_call(message, now)
                case Update() | Keyframe() if self.follower is not None:
                    self._heard_fragment(message, self.follower, now)
                case _:
                    pass
        except Malformed as wrong:
            self.malformed(wrong)
        except DilocoError as failure:
            self.desk.fail(failure)

    def malformed(self, wrong: Malformed) -> None:
        """Count a message that is not what it says; powers of two are told, so that a flood fills no disk."""
        self.rejected[wrong.reason] += 1
        if self.rejected[wrong.reason].bit_count() == 1:
            log.warning("rejected", reason=wrong.reason, detail=str(wrong), times=self.rejected[wrong.reason])

    def _heard_beat(self, beat: Beat, plane: Plane, now: float) -> None:
        if plane is Plane.BULK:  # proves the path; what it says may be older than what the control plane said
            self._bulk_heard = True
            return
        if beat.epoch < self.epoch:
            return
        self._beat, self._beat_at = beat, now
        self.desk.heard(beat, now)
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
            self.bulk.extend(answer.deltas)
        self._show_calls()

    def _enter_epoch(self, epoch: int) -> None:
        """Another syncer process serves the run, from its newest checkpoint: be welcomed again, fetch everything."""
        if self.epoch >= 0:
            log.info("epoch_changed", epoch=epoch, before=self.epoch)
        self.epoch, self.phase, self.follower = epoch, Phase.ASKING, None
        self.answers.drop()
        self.desk.drop()
        self.bulk.clear()
        self._seeds, self._seed_missing = None, ()
        self._due.pop("hello", None)

    def _heard_welcome(self, welcome: Welcome, now: float) -> None:
        if (welcome.name, welcome.incarnation) != (self.me.name, self.me.incarnation) or welcome.epoch != self.epoch:
            return
        self.desk.progress_at = now
        if welcome.verdict == "reset":
            if self.follower is not None and self.phase is Phase.FOLLOWING:
                log.warning("reset_ordered", reason=welcome.reason)
                self._reset()
        elif self.phase is Phase.ASKING:
            match welcome.verdict:
                case "wait":
                    self.desk.waits_for = f"its turn: {welcome.reason}" if welcome.reason else "its turn"
                case "refused":
                    self.desk.fail(Refused(f"run {self.config.run} does not take {self.me.name}: {welcome.reason}"))
                case "seed":
                    self._seed(welcome)
                case _:
                    self._welcomed(welcome, now)

    def _heard_call(self, call: Call, now: float) -> None:
        if call.epoch == self.epoch and self.follower is not None:
            self.answers.heard_call(call)
            self.follower.heard_version(call.fragment, call.version, now)
            self._show_calls()

    def _show_calls(self) -> None:
        if self.me.role == "learner" and not self._gathering:
            self.desk.open_calls(list(self.answers.calls.values()))

    # --- joining -----------------------------------------------------------------------------------------------------
    def _plan(self, welcome: Welcome) -> Plan:
        """The plan that the welcome speaks of; Refused if this side derives another one."""
        plan = self.plan
        if plan is None or welcome.fragments != plan.P:
            plan = balanced_plan(self.me.layout, welcome.fragments)
        if plan.digest != welcome.plan_digest or (self.plan is not None and plan is not self.plan):
            raise Refused(
                f"run {self.config.run} cuts the model otherwise than {self.me.name} does ({welcome.fragments} "
                "fragments); use the same version of this package on both sides, and restart the learner"
            )
        return plan

    def _seed(self, welcome: Welcome) -> None:
        """Send version 0 of what is missing. What is on its way already is left to arrive first."""
        if self._seed_source is None:
            raise Malformed("verdict", "an observer cannot seed a run")
        self._seed_waits = self._seed_waits + 1 if welcome.missing == self._seed_missing else 0
        if self._seeds is not None or (self._seed_missing and self._seed_waits < SEED_PATIENCE):
            if welcome.missing != self._seed_missing and self._seed_missing:
                self._seed_missing = welcome.missing
            return
        log.info("seeding", fragments=len(welcome.missing))
        self.desk.waits_for = "its version 0 to be stored by the syncer"
        self._seed_missing, self._seed_waits = welcome.missing, 0
        self._seeds = self._seed_messages(self._plan(welcome), welcome.missing)

    def _seed_messages(self, plan: Plan, missing: Sequence[int]) -> Iterator[Seed]:
        if self._seed_source is None:
            return
        source = self._seed_source(plan)
        for index in [p for p in missing if p <= plan.static_index]:
            content = (
                source.static_bytes() if index == plan.static_index else source.vector(index).numpy().data.cast("B")
            )
            told = digest(content)
            for part in split(content):
                yield Seed(
                    run=self.config.run, name=self.me.name, incarnation=self.me.incarnation, epoch=self.epoch,
                    fragment=index, digest=told, **part,
                )  # fmt: skip

    def _welcomed(self, welcome: Welcome, now: float) -> None:
        beat = self._beat
        if beat is None:
            return
        first = self.plan is None
        self.plan = self._plan(welcome)
        try:
            self._settings = RunSettings.from_map(beat.settings)
            self._task = TaskSettings.from_map(beat.task) if beat.task else None
        except Malformed as wrong:
            raise Refused(
                f"the settings of run {self.config.run} are not understood here ({wrong}); "
                "use the same version of this package on both sides"
            ) from wrong
        self._seed_source = self._seeds = None
        static_bytes = self.me.layout.static_bytes if first else 0
        self.follower = Follower(self.plan, self._settings.codec_down, self.epoch, static_bytes)
        self.phase, self._gathering = Phase.FOLLOWING, True
        self.desk.waits_for = "the public model"
        if beat.state == "finished":
            self.follower.want_final(beat.versions)
        else:
            self.follower.heard_versions(beat.versions, now)

    # --- the public model --------------------------------------------------------------------------------------------
    def _heard_fragment(self, message: Update | Keyframe, follower: Follower, now: float) -> None:
        self.desk.progress_at = now
        if isinstance(message, Update):
            public = follower.take_update(message, now)
        else:
            public = follower.take_keyframe(message, now)
        if self._gathering:
            if follower.complete:
                self._gathered(follower)
        elif public is not None:
            self.desk.whole = tuple(p or old for p, old in zip(follower.held, self.desk.whole, strict=True))
            self.desk.deliver([self._arrival(message.fragment, public)])
        self._conclude()

    def _arrival(self, fragment: int, public: Public) -> Arrival:
        own = None
        for name, incarnation, steps, tokens in public.contributors:
            if (name, incarnation) == (self.me.name, self.me.incarnation):
                own = Mark(steps, tokens)
        if self.me.pin:
            public = Public(public.version, public.vector.pin_memory(), public.digest, public.contributors)
        return Arrival(fragment, self.epoch, public, own)

    def _gathered(self, follower: Follower) -> None:
        """Every fragment is here: the join is over, or the model is handed over anew as a whole."""
        whole = tuple(follower.whole())
        self._gathering = False
        self.desk.whole = whole
        self._conclude()
        if not self._announced and self._beat is not None and self._settings is not None:
            self._announced = True
            static = follower.static or b""
            self.desk.joined(Joined(follower.plan, self._settings, self._task, self.epoch, self._beat.t, whole, static))
        else:
            self.desk.deliver([self._arrival(p, public) for p, public in enumerate(whole)], reset=True)
        self._show_calls()

    def _reset(self) -> None:
        """Take every fragment anew, and nothing of what this learner did since."""
        if self.follower is not None:
            self.answers.drop()
            self.desk.drop()
            self.bulk.clear()
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
            follower.want_all()
            self._gathering = True
            self._mismatches += 1
            if self._mismatches > FINAL_TRIES:
                raise DilocoError(
                    f"the final model of run {self.config.run} was fetched {FINAL_TRIES} times, "
                    "and its hash was never the one that the syncer tells"
                )
            raise Malformed("digest", f"the final model's hash is {found[:16]}, the run's is {beat.model_hash[:16]}")
        log.info("finished", model_hash=found[:16])
        self.phase, self._final_hash = Phase.FINISHED, found
        self.answers.drop()
        self.bulk.clear()
        self.desk.drop()
        self.desk.finish(whole)

    # --- saying ------------------------------------------------------------------------------------------------------
    def tick(self, now: float, *, control_proven: bool, bulk_proven: bool, bytes_up: int, bytes_down: int, gaps: int
    ) -> Iterator[Message]:  # fmt: skip
        """The control messages that are due. Call it often; one that cannot be sent comes again by itself."""
        self._check_orphan(now)
        self._take_wishes()
        if not control_proven:
            return
        if self.phase is Phase.ASKING:
            if bulk_proven and self._bulk_heard and self._beat is not None and self._is_due("hello", now):
                self._due["hello"] = now + (2 * HELLO_SECONDS if self._seed_missing else HELLO_SECONDS)
                yield self._hello()
            elif self._beat is None:
                self.desk.waits_for = "a beat of the syncer"
            elif not self._announced and not (bulk_proven and self._bulk_heard):
                self.desk.waits_for = "its path for bulk messages to be open"
        if self.follower is not None and self.phase is Phase.FOLLOWING:
            for request in self.follower.requests(now):
                yield Fetch(
                    run=self.config.run, name=self.me.name, incarnation=self.me.incarnation, epoch=self.epoch,
                    what=request.what, fragment=request.fragment, version=request.version, chunks=request.chunks,
                )  # fmt: skip
        if self.me.role == "learner" and self.plan is not None and self._is_due("alive", now):
            self._due["alive"] = now + ALIVE_SECONDS
            yield self._alive(now, bytes_up, bytes_down, gaps)
        yield from self._goodbyes(now)

    def _is_due(self, what: str, now: float) -> bool:
        return now >= self._due.get(what, now)

    def _check_orphan(self, now: float) -> None:
        limit = self.config.orphan_timeout_seconds
        if self._announced and self.phase is not Phase.FINISHED and now - self._beat_at > limit:
            self.desk.fail(Orphaned(f"{self.me.name} heard no beat of run {self.config.run} for {limit:g} s"))

    def _take_wishes(self) -> None:
        if self.desk.take_reset_wish() and self.phase is Phase.FOLLOWING:
            self._reset()
        for capture in self.desk.take_captures():
            self._answer(capture)

    def _answer(self, capture: Capture) -> None:
        """Encode what was captured, keep it, and queue its chunks."""
        if capture.ready is not None:
            capture.ready.synchronize()
        call = capture.call
        if self.plan is None or self._settings is None or not self.answers.wanted(call):
            self.desk.give_back(capture)
            return
        fragment = self.plan.fragments[call.fragment]
        theta = capture.theta[: fragment.length]
        close_holes(fragment, theta)
        try:
            payload = encode_delta(self._settings.codec_up, anchor(fragment, capture.public), theta)
        except Malformed as wrong:
            self.malformed(wrong)
            self.desk.found_nonfinite()
            return
        finally:
            self.desk.give_back(capture)
        deltas = [
            Delta(
                run=self.config.run, name=self.me.name, incarnation=self.me.incarnation, epoch=call.epoch,
                slot=call.slot, attempt=call.attempt, fragment=call.fragment, base_version=capture.base_version,
                tokens_from=capture.since.tokens, tokens_to=capture.until.tokens,
                steps_from=capture.since.steps, steps_to=capture.until.steps,
                codec=self._settings.codec_up, **part,
            )
            for part in split(payload.numpy().data)
        ]  # fmt: skip
        self.answers.keep(Answer(call, deltas))
        self.bulk.extend(deltas)

    @property
    def busy(self) -> bool:
        """Bulk messages wait to be sent."""
        return bool(self.bulk) or self._seeds is not None

    def next_bulk(self) -> Delta | Seed | None:
        """The next bulk message to send, or None. Tell `sent` when it went out; `unsent` puts it back."""
        while self.bulk:
            message = self.bulk.popleft()
            if isinstance(message, Seed) or self.answers.keeps(message.slot, message.attempt):
                return message
        if self._seeds is not None:
            seed = next(self._seeds, None)
            if seed is None:
                self._seeds = None
            return seed
        return None

    def unsent(self, message: Delta | Seed) -> None:
        self.bulk.appendleft(message)

    def sent(self, message: Message, now: float) -> None:
        if isinstance(message, Delta) and message.chunk == message.chunks - 1:
            self.answers.sent(message.slot, message.attempt, now)
        if isinstance(message, Seed):
            self.desk.progress_at = now
        if isinstance(message, Goodbye) and self.desk.leaving:
            self.over = True

    def _hello(self) -> Hello:
        return Hello(
            run=self.config.run, name=self.me.name, incarnation=self.me.incarnation, role=self.me.role,
            fingerprint=self.me.layout.fingerprint, data_hash=self.me.data_hash, device=self.me.device,
            host=self.me.host, pid=self.me.pid, bulk_proven=True, payload=msgpack.packb(self.me.layout.to_wire()),
        )  # fmt: skip

    def _alive(self, now: float, bytes_up: int, bytes_down: int, gaps: int) -> Alive:
        own = self.desk.counters
        base: dict[str, Any] = {
            "run": self.config.run, "name": self.me.name, "incarnation": self.me.incarnation,
            "bytes_up": bytes_up, "bytes_down": bytes_down, "gaps": gaps,
        }  # fmt: skip
        held = [p for p in (self.follower.held if self.follower is not None else self.desk.whole) if p is not None]
        whole = self.plan is not None and len(held) == self.plan.P
        digests = tuple(p.digest[:16] for p in held) if whole else ()
        digest_versions = tuple(p.version for p in held) if whole else ()
        if own is None:
            return Alive(
                **base, epoch=self.epoch, local_steps=0, tokens=0, step_seconds=0.0, last_step_age_seconds=0.0,
                inner_seconds=0.0, session_seconds=0.0, since_first_step_seconds=0.0,
                versions=(0,) * (self.plan.P if self.plan else 0), digests=digests, digest_versions=digest_versions,
            )  # fmt: skip
        return Alive(
            **base, epoch=own.versions_epoch, local_steps=own.books.steps, tokens=own.books.tokens,
            step_seconds=own.step_seconds, last_step_age_seconds=max(0.0, now - own.last_step_at),
            inner_seconds=own.inner_seconds, session_seconds=own.session_seconds,
            since_first_step_seconds=max(0.0, now - own.started_at), loss=own.loss, versions=own.versions,
            digests=digests, digest_versions=digest_versions,
        )  # fmt: skip

    # --- leaving -----------------------------------------------------------------------------------------------------
    def _goodbyes(self, now: float) -> Iterator[Goodbye]:
        """After the end of the run each second; else once, when the last answers were taken or the time is up."""
        if self.me.role != "learner" or self.plan is None:
            self.over |= bool(self.desk.leaving)
            return
        reason = self.desk.leaving
        if self.phase is Phase.FINISHED:
            if reason or self._is_due("goodbye", now):
                self._due["goodbye"] = now + ALIVE_SECONDS
                yield self._goodbye("finished")
        elif reason and (now >= self._leaves_by(now) or not (self.bulk or self.answers.unconfirmed)):
            yield self._goodbye(reason)

    def _leaves_by(self, now: float) -> float:
        if self._leave_by is None:
            self._leave_by = now + (LEAVE_SECONDS if self.desk.leaving == "left" else HURRY_SECONDS)
        return self._leave_by

    def _goodbye(self, reason: str) -> Goodbye:
        own = self.desk.counters
        books = own.books if own is not None else Mark()
        return Goodbye(
            run=self.config.run, name=self.me.name, incarnation=self.me.incarnation, reason=reason,
            local_steps=books.steps, tokens=books.tokens, model_hash=self._final_hash,
        )  # fmt: skip
