"""Handlers of control messages: Hello, Seed, Alive, Goodbye and final Buffers, and the Welcomes that answer them."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from ..common.errors import Malformed, SettingError
from ..common.fragments import Plan
from ..common.printable import printable
from ..common.wire import Alive, Buffers, Delta, Goodbye, Hello, Seed, Welcome
from . import stall_diagnosis
from .admission import Admission, Reply, SeedAssembly
from .checkpoint_writer import StoredBuffers
from .global_model import GlobalModel
from .membership import RESET_AFTER, Member, Membership
from .model_file import read_model
from .rejections import SENDERS, describe_rejection
from .run_state import Components, RunState, TrainingState
from .stall_diagnosis import StallReason
from .startup import serve


class ControlHandler:
    """Handles the messages of admission, living and leaving learners."""

    def __init__(self, components: Components, run: RunState) -> None:
        self._components, self._run = components, run
        self._admission = Admission(run.settings)
        self.asked_at = float("-inf")
        """Time of the last Hello."""
        self._greeted: dict[str, int] = {}
        """Name -> incarnation of the last thousand senders of a valid Hello: only these get unrequested answers."""

    def hello(self, hello: Hello, now: float) -> None:
        run, admission, telemetry = self._run, self._admission, self._components.telemetry
        self.asked_at = now
        admission.plan = run.training.model.plan if run.training else None
        admission.finished = run.phase == "finished"
        chosen = admission.seeding
        self._greet(hello)
        reply = admission.reply(hello, run.training.rounds.members if run.training else Membership(), now)
        if reply.verdict == "seed" and self._components.config.init is not None:
            reply = self._seed_from_file(self._components.config.init)
        if reply.verdict == "refused":
            telemetry.event("refused", learner=hello.name, reason=reply.reason)
        if admission.seeding is not None and admission.seeding is not chosen:
            run.phase = "seeding"
            telemetry.event("seeding", learner=hello.name)
        if reply.verdict == "welcome" and hello.role == "learner" and run.training is not None:
            self._join(run.training, hello, now)
        if reply.verdict == "finished" and hello.role == "learner":
            run.confirmations.expect([(hello.name, hello.incarnation)])
            run.confirmations.record_request((hello.name, hello.incarnation), time.monotonic())
        if reply.verdict == "finished" and not run.buffers.settled:
            reply = Reply("wait", "the final buffers are being received")
        self._answer(hello.name, hello.incarnation, reply)

    def seed(self, message: Seed, now: float) -> None:
        if self._run.training is not None:
            return  # a repeated chunk of version 0
        seeding = self._admission.seed(message, now)
        if seeding is None:
            return
        try:
            self._seeded(seeding.plan, *_vectors(seeding), source=message.name)
        except Malformed as wrong:
            self._answer(
                message.name, message.incarnation, Reply("refused", f"your model cannot be version 0: {wrong}")
            )
            raise

    def alive(self, alive: Alive, now: float) -> None:
        training = self._run.training
        if training is None:
            return
        members = training.rounds.members
        was = members.get((alive.name, alive.incarnation))
        returned = was is not None and was.state == "lost"
        member = training.rounds.alive(alive, now)
        if member is None:
            if was is None:
                self._answer_stranger(alive, members)
            raise Malformed("stranger", "not a member")
        if returned:
            self._components.telemetry.event("returned", learner=member.name)
        training.metrics.record_first_step(now, alive.since_first_step_seconds)
        if alive.epoch == self._run.epoch and _holds_other_bits(training, alive):
            self.reset(member, "it holds other bits than the run")

    def _answer_stranger(self, alive: Alive, members: Membership) -> None:
        """A learner that was silent for too long is no longer a member; without an answer it would train in vain."""
        holder = members.by_name.get(alive.name)
        reply = Reply("wait", "you were silent for too long; say Hello again")
        if holder is not None and holder.state in ("live", "stalled"):
            reply = Reply("refused", f"another learner took the name {alive.name} while you were silent")
        self._answer(alive.name, alive.incarnation, reply)

    def goodbye(self, goodbye: Goodbye, now: float) -> None:
        training, who = self._run.training, (goodbye.name, goodbye.incarnation)
        self._run.confirmations.record_goodbye(who, goodbye.reason, goodbye.model_hash, self._run.model_hash)
        member = training.rounds.members.get(who) if training else None
        if member is not None or self._greeted.get(goodbye.name) == goodbye.incarnation:
            self._offer(goodbye, now)
        if training is None or member is None or member.state == "left":
            return  # a repeated Goodbye
        training.rounds.left(who, goodbye.local_steps, goodbye.tokens)
        self._components.telemetry.event("left", learner=goodbye.name, reason=goodbye.reason, tokens=goodbye.tokens)
        if goodbye.reason == "finished" and goodbye.model_hash != self._run.model_hash:
            self._components.telemetry.warn("model_hash_differs", learner=goodbye.name, theirs=goodbye.model_hash[:16])
        self._components.telemetry.publish_learner(member, training.rounds, now)

    def _offer(self, goodbye: Goodbye, now: float) -> None:
        """Record a learner's offer of its static tensors, if it holds the final model."""
        run = self._run
        if run.phase == "finished" and goodbye.reason == "finished" and goodbye.model_hash == run.model_hash:
            run.buffers.offer((goodbye.name, goodbye.incarnation), goodbye.buffers, now)

    def buffers(self, message: Buffers, now: float) -> None:
        """Take one chunk of the final buffers; when complete, the checkpoint writer checks and stores them."""
        run = self._run
        if run.training is None or run.phase != "finished":
            raise Malformed("early", "buffers are taken once the run is finished")
        state = run.training.model
        received = run.buffers.add_chunk(message, state.plan, run.epoch, now)
        if received is not None:
            self._components.writer.store_buffers(state.plan, received, state.static)

    def buffers_stored(self, training: TrainingState, stored: StoredBuffers, now: float) -> None:
        """Put checked buffers into the model. Malformed if they are rejected: another learner is then selected."""
        learner, telemetry, state = stored.received.last.name, self._components.telemetry, training.model
        if stored.refused is not None:
            self._run.buffers.record_check(f"sent invalid buffers ({stored.refused})", now)
            raise stored.refused
        self._run.buffers.record_check("", now)
        state.replace_static(learner, stored.moved, stored.static)
        if stored.error:
            sentence = (
                f"the buffers of {learner} could not be stored ({stored.error}); model.safetensors still gets them, "
                "but a restarted syncer would not have them"
            )
            telemetry.warn("buffers_not_saved", learner=learner, error=stored.error, sentence=sentence)
        names = [state.plan.layout.static[index].name for index in stored.moved]
        telemetry.event("buffers_taken", learner=learner, tensors=len(names), first=", ".join(names[:3]))

    def rejected(self, kind: str, name: str, incarnation: int | None, reason: str, detail: str) -> None:
        """Count a rejected message, reset a learner after three consecutive invalid answers, and warn a sender whose
        messages are rejected repeatedly.

        incarnation: None if the message could not be decoded and only its topic names the sender.
        """
        training = self._run.training
        member = training.rounds.members.by_name.get(name) if training else None
        if member is not None and incarnation in (None, member.incarnation):
            incarnation = member.incarnation
            wrong = kind == Delta.KIND and member.reject(reason)
            member.rejected += kind != Delta.KIND
            if wrong:
                self.reset(member, f"{RESET_AFTER} rejected answers in a row, the last one: {detail}")
        elif incarnation in (None, self._greeted.get(name)):
            incarnation = self._greeted.get(name)
        else:
            incarnation = None
        if incarnation is not None:
            sentence = describe_rejection(reason, detail)
            notice = self._run.rejections.rejected((name, incarnation), kind, sentence, self._components.clock.now())
            if notice:
                self._answer(name, incarnation, Reply("notice", notice))

    def waits_for(self, now: float) -> StallReason | None:
        """Why a run without a model does not start, if the learner chosen to seed it sends nothing."""
        seeding = self._admission.seeding
        if seeding is None or now - seeding.progress_at < stall_diagnosis.SEED_SECONDS:
            return None
        parts, missing = len(seeding.assemblies), len(seeding.missing())
        sentence = (
            f"{seeding.who[0]} was chosen to send version 0 and has sent nothing for {now - seeding.progress_at:.0f} s "
            f"({missing} of {parts} parts are missing)"
        )
        return StallReason("seed", sentence, patience_seconds=0.0)

    def _greet(self, hello: Hello) -> None:
        self._greeted.pop(hello.name, None)
        self._greeted[hello.name] = hello.incarnation
        if len(self._greeted) > SENDERS:
            del self._greeted[next(iter(self._greeted))]

    def reset(self, member: Member, why: str) -> None:
        """Command a learner to drop its state and fetch every fragment, unless that was done a moment ago."""
        if not member.order_reset(self._components.clock.now()):
            return
        self._components.telemetry.warn("reset", learner=member.name, reason=why)
        self._answer(member.name, member.incarnation, Reply("reset", why))

    def _join(self, training: TrainingState, hello: Hello, now: float) -> None:
        members, telemetry = training.rounds.members, self._components.telemetry
        known = members.get((hello.name, hello.incarnation))
        member = training.rounds.join(hello.name, hello.incarnation, now)
        member.host, member.device, member.pid = hello.host, hello.device, hello.pid
        if known is not None:
            return
        telemetry.event("joined", learner=hello.name, incarnation=hello.incarnation, host=hello.host)
        ours = self._components.config.data_hash
        if ours and hello.data_hash and ours != hello.data_hash:
            telemetry.warn("data_differs", learner=hello.name)

    def _answer(self, name: str, incarnation: int, reply: Reply) -> None:
        seeding, training = self._admission.seeding, self._run.training
        plan = training.model.plan if training else seeding.plan if seeding else None
        self._components.transport.send(
            Welcome(
                run=self._run.settings.run,
                name=name,
                incarnation=incarnation,
                epoch=self._run.epoch,
                verdict=reply.verdict,
                reason=printable(reply.reason)[:1000],
                fragments=plan.P if plan else 0,
                plan_digest=plan.digest if plan else "",
                missing=reply.missing,
            )
        )

    def _seed_from_file(self, path: Path) -> Reply:
        """Read version 0 from the file of `--init`, if it holds the model that the first Hello describes."""
        seeding, self._admission.seeding = self._admission.seeding, None
        if seeding is None:
            return Reply("wait")
        try:
            vectors, static = read_model(seeding.plan, path)
        except SettingError as wrong:
            return Reply("refused", str(wrong))
        self._seeded(seeding.plan, vectors, static, source=str(path))
        return Reply("wait", "version 0 has just been read")

    def _seeded(self, plan: Plan, vectors: list[torch.Tensor], static: bytes, *, source: str) -> None:
        """Version 0 is complete: save it, and only then serve it."""
        settings = self._run.settings
        self._admission.seeding = None  # also if what follows fails
        self._components.checkpoints.write_version_zero(plan.layout, plan, settings, vectors, static)
        serve(self._components, self._run, GlobalModel.from_version_zero(plan, settings, vectors, static))
        self._components.telemetry.event("seeded", source=source, fragments=plan.P, parameters=plan.parameters)


def _holds_other_bits(training: TrainingState, alive: Alive) -> bool:
    rows = zip(training.digests, alive.digest_versions, alive.digests, strict=False)
    return any(version in known and not known[version].startswith(theirs) for known, version, theirs in rows)


def _vectors(seeding: SeedAssembly) -> tuple[list[torch.Tensor], bytes]:
    """The flat f32 vectors of all fragments and the static bytes, from the complete assemblies."""
    plan = seeding.plan
    vectors = [torch.frombuffer(seeding.assemblies[p].payload, dtype=torch.float32) for p in range(plan.P)]
    return vectors, bytes(seeding.assemblies[plan.static_index].payload)
