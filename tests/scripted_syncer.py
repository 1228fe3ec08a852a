"""A syncer that does what a test tells it, over real sockets: it answers Hello and Fetch by itself, records all."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

import torch
import zmq
from decoupled_diloco.broker.broker import Broker
from decoupled_diloco.common.codec import decode_delta, digest, encode_step, model_hash
from decoupled_diloco.common.config import BrokerConfig, RunSettings
from decoupled_diloco.common.fragments import Layout, Plan, balanced_plan
from decoupled_diloco.common.sockets import Address, PublishSocket, SubscribeSocket
from decoupled_diloco.common.wire import (
    Assembly,
    Beat,
    Call,
    Delta,
    Fetch,
    Hello,
    Keyframe,
    Message,
    Plane,
    Seed,
    Update,
    Welcome,
    prefix,
    split,
    unpack_layout,
)
from torch import Tensor
from transport import free_ports
from waiting import wait_for

M = TypeVar("M", bound=Message)
BEAT_SECONDS = 0.05
"""Beats come faster than in a real run, so that tests need not wait for them."""


@contextlib.contextmanager
def running_broker(port: int = 0) -> Iterator[str]:
    """A real broker's address."""
    port = port or free_ports()
    broker = Broker(BrokerConfig(port=port))
    broker.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        broker.stop()


class ScriptedSyncer:
    """Holds a model, beats, welcomes, answers fetches; merges when the test says so. Use as a context manager."""

    def __init__(self, address: str, settings: RunSettings, layout: Layout | None = None) -> None:
        self.settings, self.run = settings, settings.run
        self.layout, self.plan = layout, balanced_plan(layout, settings.fragments) if layout else None
        self.epoch, self.state, self.t = 1, "running", 0
        self.public: list[Tensor] = []
        self.versions: list[int] = []
        self.static = b""
        self.last: dict[int, list[Update]] = {}
        self.calls: dict[int, Call] = {}
        self.heard: list[Message] = []
        self.verdict: Callable[[Hello], dict[str, Any]] = self.welcome
        self.drops: Callable[[Message], bool] = lambda _: False
        """Messages for which it is true are lost on their way out."""
        self.beating = True
        self.beat_more: dict[str, Any] = {}
        """Fields of a Beat that a test adds."""
        self.seeds: dict[int, Assembly] = {}
        self.model_hash = ""
        self._address = Address.parse(address)
        self._lock = threading.RLock()
        self._outbox: list[Message] = []
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join(10)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    # --- what a test does --------------------------------------------------------------------------------------------
    def put(self, vectors: Sequence[Tensor], version: int = 1, static: bytes = b"") -> None:
        """Hold this public model, every fragment at `version`."""
        with self._lock:
            self.public, self.versions, self.static = list(vectors), [version] * len(vectors), static

    def call(self, fragment: int, slot: int, attempt: int = 1, **more: Any) -> Call:
        with self._lock:
            self.calls[slot] = call = Call(
                run=self.run, epoch=self.epoch, slot=slot, t=self.t, fragment=fragment,
                version=more.pop("version", self.versions[fragment]), attempt=attempt, **more,
            )  # fmt: skip
            self.say(call)
            return call

    def confirm(self, slot: int, *names: str) -> None:
        with self._lock:
            self.calls[slot] = replace(self.calls[slot], received=names)

    def close_call(self, slot: int) -> None:
        with self._lock:
            del self.calls[slot]

    def merge(
        self, fragment: int, target: Tensor, contributors: Sequence[tuple[str, int, int, int]] = (), slot: int = 0
    ) -> Tensor:
        """Take an outer step to `target` and publish it; the new public vector."""
        with self._lock:
            payload, new = encode_step(self.settings.codec_down, self.public[fragment], target)
            version = self.versions[fragment]
            self.public[fragment], self.versions[fragment] = new, version + 1
            self.last[fragment] = [
                Update(
                    run=self.run, epoch=self.epoch, slot=slot, t=self.t, fragment=fragment, version=version + 1,
                    base_version=version, contributors=tuple(contributors), codec=self.settings.codec_down,
                    digest=digest(new), **part,
                )
                for part in split(payload.numpy().data)
            ]  # fmt: skip
            for update in self.last[fragment]:
                self.say(update)
            return new

    def finish(self) -> None:
        with self._lock:
            self.versions = [v + 1 for v in self.versions]
            self.model_hash, self.state = model_hash(self.public), "finished"

    def new_epoch(self, epoch: int, versions: int) -> None:
        """As if another syncer process served the run: it knows nobody."""
        with self._lock:
            self.epoch, self.versions = epoch, [versions] * len(self.public)
            self.calls.clear()
            self.last.clear()

    def say(self, message: Message) -> None:
        with self._lock:
            self._outbox.append(message)

    def tell(self, hello: Hello, verdict: str, **more: Any) -> None:
        self.say(self._welcome(hello, {"verdict": verdict, **more}))

    def all_of(self, kind: type[M], **having: Any) -> list[M]:
        with self._lock:
            return [m for m in self.heard if isinstance(m, kind) and all(getattr(m, k) == v for k, v in having.items())]

    def wait_for(self, kind: type[M], count: int = 1, **having: Any) -> list[M]:
        return (
            wait_for(
                lambda: (found := self.all_of(kind, **having)) if len(self.all_of(kind, **having)) >= count else None,
                f"{count} {kind.KIND} having {having}",
            )
            or []
        )

    def delta(self, *, slot: int, attempt: int = 1, name: str) -> tuple[Delta, Tensor]:
        """A complete answer: one of its messages, and the delta as the syncer decodes it against the public model."""

        def complete() -> tuple[Delta, bytes] | None:
            parts = {m.chunk: m for m in self.all_of(Delta, slot=slot, attempt=attempt, name=name)}
            if not parts or len(parts) < next(iter(parts.values())).chunks:
                return None
            return parts[0], b"".join(bytes(parts[c].payload) for c in sorted(parts))

        first, payload = wait_for(complete, f"the answer of {name} to slot {slot}, attempt {attempt}") or (None, b"")
        assert first is not None
        return first, decode_delta(first.codec, self.public[first.fragment], payload)

    # --- what it does by itself --------------------------------------------------------------------------------------
    def welcome(self, _: Hello) -> dict[str, Any]:
        return {"verdict": "finished" if self.state == "finished" else "welcome"}

    def seed_first(self, hello: Hello) -> dict[str, Any]:
        """Have the first who asks seed the run."""
        layout = unpack_layout(hello.payload)
        self.layout, self.plan = layout, balanced_plan(layout, self.settings.fragments)
        wanted = [*range(self.plan.P), self.plan.P]
        missing = tuple(p for p in wanted if p not in self.seeds or self.seeds[p].missing)
        if missing:
            return {"verdict": "seed", "missing": missing}
        if not self.public:
            vectors = [torch.frombuffer(bytearray(self.seeds[p].payload), dtype=torch.float32) for p in wanted[:-1]]
            self.put(vectors, 0, bytes(self.seeds[self.plan.P].payload))
        return {"verdict": "welcome"}

    def _welcome(self, hello: Hello, rows: dict[str, Any]) -> Welcome:
        plan = {"fragments": self.plan.P, "plan_digest": self.plan.digest} if self.plan else {}
        return Welcome(
            run=self.run, name=hello.name, incarnation=hello.incarnation, epoch=self.epoch, **{**plan, **rows}
        )

    def _beat(self) -> Beat:
        return Beat(
            run=self.run, epoch=self.epoch, state=self.state, t=self.t, steps=self.settings.steps, step_seconds=0.0,
            versions=tuple(self.versions), calls=tuple(self.calls.values()), settings=self.settings.to_map(),
            model_hash=self.model_hash, syncer=1, **self.beat_more,
        )  # fmt: skip

    def _run(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        try:
            self._serve(context)
        except BaseException as failure:  # noqa: BLE001 - shown by __exit__
            self._failure = failure
        finally:
            context.destroy(linger=1000)

    def _serve(self, context: zmq.Context[Any]) -> None:
        inward = {Plane.CONTROL: self._address.control_in, Plane.BULK: self._address.bulk_in}
        up = {plane: PublishSocket(context, endpoint, hwm_messages=1000) for plane, endpoint in inward.items()}
        down = [
            SubscribeSocket(context, e, hwm_messages=1000) for e in (self._address.control_out, self._address.bulk_out)
        ]
        for kind in ("hello", "alive", "goodbye", "fetch"):
            down[0].subscribe(prefix(self.run, kind))
        for kind in ("delta", "seed", "buffers"):
            down[1].subscribe(prefix(self.run, kind))
        poller = zmq.Poller()
        for link in down:
            poller.register(link.socket, zmq.POLLIN)
        beat_at = 0.0
        while not self._stopping:
            poller.poll(10)
            with self._lock:
                for link in down:
                    while (message := link.receive()) is not None:
                        self._take(message)
                for uplink in up.values():
                    uplink.read_subscriptions()
                if self.beating and time.monotonic() - beat_at > BEAT_SECONDS:
                    beat_at = time.monotonic()
                    for uplink in up.values():
                        uplink.send(self._beat())
                while self._outbox and (self.drops(self._outbox[0]) or up[self._outbox[0].PLANE].send(self._outbox[0])):
                    self._outbox.pop(0)
        for uplink in up.values():
            uplink.close()
        for downlink in down:
            downlink.close()

    def _take(self, message: Message) -> None:
        self.heard.append(message)
        if isinstance(message, Hello):
            self._outbox.append(self._welcome(message, self.verdict(message)))
        elif isinstance(message, Seed):
            self.seeds.setdefault(message.fragment, Assembly(message.size)).add(message)
        elif isinstance(message, Fetch) and message.epoch == self.epoch:
            self._outbox.extend(self._answer(message))

    def _answer(self, fetch: Fetch) -> list[Message]:
        plan: Plan | None = self.plan
        assert plan is not None
        if fetch.what == "update":
            updates = self.last.get(fetch.fragment, [])
            return [u for u in updates if u.version == fetch.version and u.chunk in fetch.chunks]
        if fetch.fragment == plan.static_index:
            content: bytes | memoryview = self.static
            version = 0
        else:
            content = self.public[fetch.fragment].numpy().data.cast("B")
            version = self.versions[fetch.fragment]
        return [
            Keyframe(
                run=self.run, epoch=self.epoch, t=self.t, fragment=fetch.fragment, version=version,
                digest=digest(content), **part,
            )
            for part in split(content, fetch.chunks)
        ]  # fmt: skip
