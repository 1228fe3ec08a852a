"""A learner whose every message a test writes by hand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import zmq
from decoupled_diloco.common.codec import digest, encode_delta
from decoupled_diloco.common.fragments import Layout, Plan, TensorSpec
from decoupled_diloco.common.sockets import Address, PublishSocket, SubscribeSocket
from decoupled_diloco.common.wire import (
    Alive,
    Beat,
    Call,
    Delta,
    Fetch,
    Goodbye,
    Hello,
    Keyframe,
    Message,
    Seed,
    Update,
    Welcome,
    beat_topic,
    pack_layout,
    prefix,
    split,
)
from torch import Tensor
from waiting import wait_for

if TYPE_CHECKING:
    from syncer_run import SyncerRun

LAYOUT = Layout(
    (
        TensorSpec(name="a", shape=(40, 5), dtype="float32"),
        TensorSpec(name="b", shape=(150,), dtype="float32"),
        TensorSpec(name="c", shape=(3,), dtype="float32", merge="mean"),
    )
)
STEP_SECONDS = 0.1
TOKENS = 10
M = TypeVar("M", bound=Message)


class ScriptedLearner:
    """Speaks the protocol message by message; does nothing that a test did not say."""

    def __init__(self, run: SyncerRun, name: str, incarnation: int) -> None:
        self.run, self.name, self.incarnation = run, name, incarnation
        address = Address.parse(run.address)
        self._context: zmq.Context[Any] = zmq.Context()
        self.control = PublishSocket(self._context, address.control_in, hwm_messages=1000)
        self.bulk = PublishSocket(self._context, address.bulk_in, hwm_messages=1000)
        self._downs = [
            SubscribeSocket(self._context, address.control_out, hwm_messages=1000),
            SubscribeSocket(self._context, address.bulk_out, hwm_messages=1000),
        ]
        run_name = run.settings.run
        for topic in (beat_topic(run_name), prefix(run_name, "call"), prefix(run_name, "welcome", name)):
            self._downs[0].subscribe(topic)
        for topic in (beat_topic(run_name), prefix(run_name, "fragment"), prefix(run_name, "keyframe")):
            self._downs[1].subscribe(topic)
        self.heard: list[Message] = []
        self.steps = 0
        self.since = [0] * run.settings.fragments
        self.versions = [0] * run.settings.fragments
        self.theta = [torch.zeros(f.length) for f in run.plan.fragments]
        wait_for(self._connected, "both uplinks are proven")

    def _connected(self) -> bool:
        self.control.read_subscriptions()
        self.bulk.read_subscriptions()
        return self.control.proven and self.bulk.proven

    @property
    def epoch(self) -> int:
        return max((m.epoch for m in self.heard if isinstance(m, Beat)), default=0)

    def listen(self) -> None:
        """Take what has arrived; fails at once where the syncer has, since nothing more will come."""
        if self.run.failure:
            raise AssertionError("the syncer has ended by itself") from self.run.failure[0]
        for down in self._downs:
            while (message := down.receive()) is not None:
                self.heard.append(message)
                if isinstance(message, Update) and message.version > self.versions[message.fragment]:
                    self.versions[message.fragment] = message.version
                    self.since[message.fragment] = self.steps

    def wait(self, kind: type[M], where: Callable[[M], bool] = lambda _: True, *, seconds: float = 20) -> M:
        """The first message of this kind that fits, of all that were heard."""

        def found() -> M | None:
            self.listen()
            return next((m for m in self.heard if isinstance(m, kind) and where(m)), None)

        message = wait_for(found, f"{self.name} hears a fitting {kind.KIND}", seconds)
        assert message is not None
        return message

    def hello_once(self, layout: Layout | None = None, **more: Any) -> None:
        layout = layout or self.run.layout
        fields: dict[str, Any] = {
            "run": self.run.settings.run, "name": self.name, "incarnation": self.incarnation, "role": "learner",
            "fingerprint": layout.fingerprint, "bulk_proven": True, "payload": pack_layout(layout),
        }  # fmt: skip
        self.control.send(Hello(**(fields | more)))

    def hello(self, layout: Layout | None = None, **more: Any) -> Welcome:
        """Say Hello until there is an answer to this very one."""
        self.heard = [m for m in self.heard if not isinstance(m, Welcome)]
        polls = count()

        def answered() -> Welcome | None:
            if next(polls) % 50 == 0:
                self.hello_once(layout, **more)
            self.listen()
            return next((m for m in self.heard if isinstance(m, Welcome) and m.incarnation == self.incarnation), None)

        welcome = wait_for(answered, f"{self.name} is answered")
        assert welcome is not None
        return welcome

    def seed(self, value: float = 0.0, **more: Any) -> None:
        """Send version 0: every parameter is `value`."""
        plan = self.run.plan
        parts = [(p, bytes(filled(plan, p, value).numpy().data)) for p in range(plan.P)] + [
            (plan.P, bytes(plan.layout.static_bytes))
        ]
        for p, payload in parts:
            for part in split(payload):
                self.bulk.send(
                    Seed(run=self.run.settings.run, name=self.name, incarnation=self.incarnation, fragment=p,
                         epoch=self.epoch, digest=digest(payload), **(part | more))
                )  # fmt: skip

    def join(self) -> None:
        """Until welcome, sending version 0 if chosen; then report one timed step."""
        self.wait(Beat)
        wait_for(self._welcomed, f"{self.name} is welcomed")
        self.step(2)

    def _welcomed(self) -> bool:
        verdict = self.hello().verdict
        if verdict == "seed":
            self.seed()
        return verdict == "welcome"

    def alive(self, **more: Any) -> None:
        fields: dict[str, Any] = {
            "run": self.run.settings.run, "name": self.name, "incarnation": self.incarnation, "epoch": self.epoch,
            "local_steps": self.steps, "tokens": self.steps * TOKENS, "step_seconds": STEP_SECONDS,
            "last_step_age_seconds": 0.0, "inner_seconds": 0.0, "session_seconds": 0.0,
            "since_first_step_seconds": 0.0,
        }  # fmt: skip
        self.control.send(Alive(**(fields | more)))

    def step(self, steps: int = 1) -> None:
        self.steps += steps
        self.alive()

    def call(self, fragment: int | None = None, after: int = -1) -> Call:
        """The newest open call (of this fragment) with a slot above `after`; others are answered meanwhile."""
        answered: set[tuple[int, int]] = set()

        def found() -> Call | None:
            self.alive()
            self.listen()
            calls = [m for m in self.heard if isinstance(m, Call)]
            calls += [c for m in self.heard if isinstance(m, Beat) for c in m.calls]
            calls = [c for c in calls if c.slot > after and c.epoch == self.epoch]
            fits = [c for c in calls if fragment in (None, c.fragment)]
            for other in calls:
                if not fits and (other.slot, other.attempt) not in answered:
                    answered.add((other.slot, other.attempt))
                    self.step()
                    self.bulk.send(self.delta(other))
            return max(fits, key=lambda c: (c.slot, c.attempt), default=None)

        call = wait_for(found, f"{self.name} is called")
        assert call is not None
        return call

    def delta(self, call: Call, value: float = 0.01, **more: Any) -> Delta:
        """An honest one-chunk answer to `call`: the outer gradient is `value` everywhere. Not sent."""
        plan, p = self.run.plan, call.fragment
        codec = self.run.settings.codec_up
        anchor = filled(plan, p, 1.0)
        payload = bytes(encode_delta(codec, anchor, filled(plan, p, 1.0 - value)).numpy().data)
        fields: dict[str, Any] = {
            "run": self.run.settings.run, "name": self.name, "incarnation": self.incarnation, "epoch": call.epoch,
            "slot": call.slot, "attempt": call.attempt, "fragment": p, "base_version": self.versions[p],
            "tokens_from": self.since[p] * TOKENS, "tokens_to": self.steps * TOKENS, "steps_from": self.since[p],
            "steps_to": self.steps, "codec": codec,
        }  # fmt: skip
        own = split(more["payload"] if "payload" in more and "crc" not in more else payload)[0]
        return Delta(**(fields | own | more))

    def answer(self, call: Call, value: float = 0.01) -> Update:
        """Answer honestly and wait for the merged fragment; adopt it."""
        p, sent = call.fragment, set[int]()

        def merged() -> Update | None:
            newest = self.newest(call)
            if newest.attempt not in sent:
                sent.add(newest.attempt)
                self.alive()
                self.bulk.send(self.delta(newest, value))
            updates = [m for m in self.heard if isinstance(m, Update) and m.epoch == call.epoch]
            return next((m for m in updates if m.fragment == p and m.version > call.version), None)

        update = wait_for(merged, f"{self.name}'s answer is merged")
        assert update is not None
        self.step()
        return update

    def newest(self, call: Call) -> Call:
        """The newest attempt of this call that was heard."""
        self.listen()
        calls = [c for m in self.heard for c in (m.calls if isinstance(m, Beat) else (m,)) if isinstance(c, Call)]
        return max((c for c in calls if c.slot == call.slot), key=lambda c: c.attempt, default=call)

    def provoke(self, reason: str, call: Call, times: int = 1, **changes: Any) -> None:
        """Send answers with these changes to the newest attempt of `call` until so many were rejected with `reason`."""
        before, polls = self.run.rejected[reason], count()

        def rejected() -> bool:
            self.alive()
            if next(polls) % 20 == 0:
                self.bulk.send(self.delta(self.newest(call), **changes))
            return self.run.rejected[reason] >= before + times

        wait_for(rejected, f"it is rejected as {reason}")

    def fetch(self, what: str, fragment: int, version: int = 0, *, kind: type[M]) -> M:
        self.heard = [m for m in self.heard if not isinstance(m, kind)]

        def fetched() -> M | None:
            self.control.send(
                Fetch(run=self.run.settings.run, name=self.name, incarnation=self.incarnation, epoch=self.epoch,
                      what=what, fragment=fragment, version=version, chunks=(0,))
            )  # fmt: skip
            self.listen()
            return next((m for m in self.heard if isinstance(m, kind) and m.fragment == fragment), None)  # type: ignore[attr-defined]

        message = wait_for(fetched, f"{self.name} gets the {what}")
        assert message is not None
        return message

    def keyframe(self, fragment: int) -> Tensor:
        payload = self.fetch("keyframe", fragment, kind=Keyframe).payload
        return torch.frombuffer(bytearray(payload), dtype=torch.float32)

    def goodbye(self, reason: str = "left", model_hash: str = "", **more: Any) -> None:
        self.control.send(
            Goodbye(run=self.run.settings.run, name=self.name, incarnation=self.incarnation, reason=reason,
                    local_steps=self.steps, tokens=self.steps * TOKENS, model_hash=model_hash, **more)
        )  # fmt: skip

    def close(self) -> None:
        for up in (self.control, self.bulk):
            up.close()
        for down in self._downs:
            down.close()
        self._context.term()


def filled(plan: Plan, fragment: int, value: float) -> Tensor:
    """A flat vector with `value` in every parameter and zero in the holes."""
    part = plan.fragments[fragment]
    flat = torch.zeros(part.length)
    for span in part.spans:
        flat[span.offset : span.stop] = value
    return flat
