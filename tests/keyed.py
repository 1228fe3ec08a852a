"""A run whose broker wants keys, all of real processes, and insiders: holders of a key who send what they like."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import zmq
from by_hand import events, learner, syncer
from decoupled_diloco.common.auth_keys import Key, Role, new_key
from decoupled_diloco.common.config import TaskSettings
from decoupled_diloco.common.sockets import SUBSCRIBE, Address, SubscribeSocket
from decoupled_diloco.common.wire import Message, Plane, Welcome, beat_topic, encode, prefix
from decoupled_diloco.learner.identity import identify, layout_to_send
from decoupled_diloco.learner.model_layout import inventory
from decoupled_diloco.learner.task.transformer import Transformer
from run import FOR_EVER, Process, resident_mib
from transport import free_ports
from waiting import wait_for

TASK = TaskSettings(layers=1, width=32, sequence_length=32, batch_sequences=4)
START_SECONDS = 120.0
RUN = "it"


class KeyedRun:
    """Broker, syncer and learners, each with its key. Use as a context manager."""

    def __init__(self, place: Path, *learners: str, around: Sequence[str] = ()) -> None:
        self.place, self.names = place, learners or ("a", "b")
        self.keys = place / "keys"
        self.files: dict[str, Path] = {}
        self.processes: dict[str, Process] = {}
        self.address = Address("127.0.0.1", free_ports())
        self._around = around
        self._stack = ExitStack()

    def key(self, role: Role, name: str, run: str = RUN) -> Path:
        """A new key's file; a broker that is there has taken it in. Who knocks before that is refused, and libzmq does
        not knock again.
        """
        path = self.files[name] = self.keys / f"{run}.{role}.{name}.key"
        new_key(self.keys, role=role, run=run, name=name).save(path)
        if "broker" in self.processes:
            self.processes["broker"].wait_for_output(f'key_added key="{role} {name} of {run}"')
        return path

    def __enter__(self) -> Self:
        self.key("syncer", "syncer")
        for name in self.names:
            self.key("learner", name)
        self.start_broker()
        where = str(self.address)
        self._add("syncer", syncer(self.place, where, "--key", str(self.files["syncer"]), steps=FOR_EVER))
        for name in self.names:
            self._add(name, learner(self.place, where, name, "--key", str(self.files[name]), "--run", RUN))
        self.wait_for_merges(4, "the run begins")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _add(self, name: str, process: Process) -> None:
        self.processes[name] = self._stack.enter_context(process)

    def start_broker(self) -> None:
        arguments = ["--port", str(self.address.port), "--keys", str(self.keys)]
        self._add("broker", Process(self.place / "broker", "broker", *arguments, around=self._around))

    # --- what a test sees --------------------------------------------------------------------------------------------
    def merged_with(self, name: str) -> int:
        """How many rounds had an answer of this learner."""
        return sum(name in row["learners"].split(",") for row in self.events("merged"))

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return events(self.place, *kinds) if (self.place / "syncer.jsonl").exists() else []

    def check_alive(self) -> None:
        for name, process in self.processes.items():
            assert process.child.poll() is None, f"{name} has ended: {process.output[-3000:]}"

    def wait_for_merges(self, more: int, why: str) -> None:
        """Every learner gives to so many rounds from now on."""
        goals = {name: self.merged_with(name) + more for name in self.names}

        def reached() -> bool:
            self.check_alive()
            return all(self.merged_with(name) >= goal for name, goal in goals.items())

        wait_for(reached, f"{why}: everybody's work is merged {more} times more", START_SECONDS)

    def memory_mib(self) -> dict[str, float]:
        return {name: resident_mib(process.pid) for name, process in self.processes.items()}


class Insider:
    """Connected to all four ports with somebody's key; whatever it sends is its own frames. Context manager."""

    def __init__(self, run: KeyedRun, file: Path, called: str = "") -> None:
        self.key, self.address = Key.load(file), run.address
        self.name = called or self.key.name
        self.context: zmq.Context[Any] = zmq.Context()
        self.up = {
            Plane.CONTROL: self.socket(zmq.XPUB, self.address.control_in),
            Plane.BULK: self.socket(zmq.XPUB, self.address.bulk_in),
        }
        try:
            for plane, socket in self.up.items():
                wait_for(
                    lambda socket=socket: socket.poll(20) and socket.recv() == SUBSCRIBE,  # type: ignore[misc]
                    f"the broker lets {self.name} in on the {plane.name.lower()} plane",
                )
        except BaseException:
            self.context.destroy(linger=0)
            raise
        self.down = SubscribeSocket(self.context, self.address.control_out, hwm_messages=10_000, key=self.key)
        for topic in (beat_topic(RUN), prefix(RUN, "call"), prefix(RUN, "welcome", self.name)):
            self.down.subscribe(topic)
        self.heard: deque[Message] = deque(maxlen=1000)

    def socket(self, kind: int, endpoint: str) -> Any:
        made: Any = self.context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.CURVE_PUBLICKEY, self.key.public.encode())
        made.setsockopt(zmq.CURVE_SECRETKEY, self.key.secret.encode())
        made.setsockopt(zmq.CURVE_SERVERKEY, self.key.broker.encode())
        if kind == zmq.XPUB:
            made.setsockopt(zmq.XPUB_NODROP, 1)
        made.connect(endpoint)
        return made

    def publish(self, frames: Sequence[bytes | memoryview], *planes: Plane) -> None:
        """Hand over as fast as the broker takes it; on both planes if none is named."""
        for plane in planes or tuple(Plane):
            while True:
                try:
                    self.up[plane].send_multipart([bytes(frame) for frame in frames], zmq.NOBLOCK)
                    break
                except zmq.Again:
                    self.up[plane].poll(100, zmq.POLLOUT)

    def send(self, message: Message, *planes: Plane) -> None:
        self.publish(encode(message), *planes)

    def listen(self) -> None:
        while (message := self.down.receive()) is not None:
            self.heard.append(message)

    def join(self) -> None:
        """Become a member, as far as the syncer can see."""
        entries = inventory(Transformer(TASK, 0))
        me = identify(RUN, self.name, entries, layout_to_send(entries))
        self.incarnation = me.incarnation

        def welcomed() -> bool:
            self.send(me.hello(), Plane.CONTROL)
            self.down.socket.poll(300)
            self.listen()
            return any(isinstance(m, Welcome) and m.verdict == "welcome" for m in self.heard)

        wait_for(welcomed, f"{self.name} is welcomed")

    def close(self) -> None:
        """Also what a failed test left open."""
        self.down.close()
        self.context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
