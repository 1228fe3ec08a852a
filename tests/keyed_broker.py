"""A broker with keys, and clients of it with any key, or none."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import zmq
from decoupled_diloco.broker.broker import Broker
from decoupled_diloco.common.auth_keys import Key, Role, new_key
from decoupled_diloco.common.config import BrokerConfig
from decoupled_diloco.common.sockets import Address, Context, Socket
from decoupled_diloco.common.wire import (
    Alive,
    Beat,
    Call,
    Hello,
    Message,
    Welcome,
    encode,
)
from transport import free_ports
from waiting import wait_for
from zmq.utils.monitor import recv_monitor_message

CONTROL, BULK = 0, 2
"""The first port of each plane, counted from the broker's."""


PLANE = {CONTROL: "control", BULK: "bulk"}


FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)  # fmt: skip


class Watch:
    """How the handshakes and connections of a socket fail, as libzmq tells it."""

    def __init__(self, socket: Socket) -> None:
        self._monitor = socket.get_monitor_socket(FAILURES)
        self._seen: Counter[int] = Counter()

    def seen(self, *events: int) -> int:
        """How often one of `events` was; of any, without."""
        while self._monitor.poll(0):
            self._seen[recv_monitor_message(self._monitor)["event"]] += 1
        return sum(self._seen[event] for event in events or self._seen)


class Peers:
    """Sockets of a broker's clients, with any key, or none."""

    def __init__(self, made: Context, port: int, keys: dict[str, Key]) -> None:
        self.address, self.keys = Address("127.0.0.1", port), keys
        self._context = made
        self.watch: dict[Socket, Watch] = {}

    def connect(self, kind: int, port: int, key: Key | None, **changed: str) -> Socket:
        """`changed`: halves of the key that are other than they should be."""
        socket = self._context.socket(kind)
        self.watch[socket] = Watch(socket)  # before it connects: who is refused is refused once
        if key is not None:
            socket.curve_serverkey = changed.get("broker", key.broker).encode()
            socket.curve_publickey = changed.get("public", key.public).encode()
            socket.curve_secretkey = changed.get("secret", key.secret).encode()
        if kind == zmq.XPUB:
            socket.setsockopt(zmq.XPUB_VERBOSER, 1)
            socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.SNDHWM, 0)  # else no more than 1000 subscriptions are sent
        socket.connect(f"tcp://{self.address.host}:{self.address.port + port}")
        return socket

    def sender(self, key: Key | str, plane: int = CONTROL) -> Socket:
        """A publisher that has heard the broker."""
        socket = self.connect(zmq.XPUB, plane, self.keys[key] if isinstance(key, str) else key)
        wait_for(lambda: socket.poll(50), "the broker greets")
        assert socket.recv() == b"\x01"
        return socket

    def receiver(self, key: Key | str, plane: int = CONTROL, *prefixes: bytes) -> Socket:
        socket = self.connect(zmq.SUB, plane + 1, self.keys[key] if isinstance(key, str) else key)
        for prefix in prefixes:
            socket.subscribe(prefix)
        return socket


HOLDERS: dict[str, tuple[Role, str, str]] = {
    "syncer": ("syncer", "run", "syncer"),
    "bob": ("learner", "run", "bob"),
    "eve": ("learner", "run", "eve"),
    "owl": ("observer", "run", "owl"),
    "far syncer": ("syncer", "run1", "syncer"),
    "far": ("learner", "run1", "far"),
}


class KeyedBroker(Peers):
    """A broker with keys in this process, and its clients."""

    def __init__(self, directory: Path, made: Context) -> None:
        keys = {who: new_key(directory, role=role, run=run, name=name) for who, (role, run, name) in HOLDERS.items()}
        self.directory = directory
        self.broker = Broker(BrokerConfig(port=free_ports(), keys=directory))
        self.broker.start()
        super().__init__(made, self.broker.config.port, keys)

    def dropped(self, plane: int = CONTROL) -> dict[str, int]:
        rows: dict[str, int] = self.broker.counters()[PLANE[plane]]["dropped"]
        return rows

    def works(self, plane: int = CONTROL) -> None:
        """Those who have keys are served, new connections too."""
        up, down = self.sender("syncer", plane), self.receiver("bob", plane, b"_/beat/run/")
        pass_on(up, down, BEAT)
        up.close()
        down.close()


def frames(message: Message) -> list[bytes]:
    return [bytes(frame) for frame in encode(message)]


def pass_on(up: Socket, down: Socket, message: Message) -> None:
    """Return when a message of `up` has come to `down`, and all its repetitions."""

    def arrives() -> int:
        up.send_multipart(frames(message))
        return down.poll(50)

    wait_for(arrives, "what a key holder may say comes to who may hear it")
    while down.poll(50):
        assert down.recv_multipart() == frames(message)


def read(socket: Socket) -> list[list[bytes]]:
    """All that waits, and comes within a moment."""
    found = []
    while socket.poll(100):
        found.append(socket.recv_multipart())
    return found


BEAT = Beat(run="run", epoch=1, state="running", t=1, steps=2, step_seconds=0, syncer=1)


CALL = Call(run="run", epoch=1, slot=1, t=1, fragment=3, version=1, attempt=1)


ABOUT: dict[str, Any] = {"run": "run", "incarnation": 1, "epoch": 1}


def welcome(name: str) -> Welcome:
    return Welcome(name=name, verdict="finished", **ABOUT)


def hello(name: str, role: str = "learner", run: str = "run") -> Hello:
    return Hello(run=run, name=name, incarnation=1, role=role, fingerprint="", bulk_proven=True)


def alive(name: str) -> Alive:
    return Alive(
        name=name, local_steps=1, tokens=1, step_seconds=1, last_step_age_seconds=1, inner_seconds=1, session_seconds=1,
        since_first_step_seconds=1, **ABOUT,
    )  # fmt: skip


def everything(keyed: KeyedBroker, plane: int) -> list[Socket]:
    """Receivers who, together, hear all that anybody may hear on a plane."""
    found = []
    for name in keyed.keys:
        key = keyed.keys[name]
        heard = (
            ["call", "fragment", "keyframe"] if key.role != "syncer" else ["hello", "alive", "fetch", "delta", "seed"]
        )
        prefixes = [f"_/beat/{key.run}/", *(f"{key.run}/{kind}/" for kind in heard)]
        prefixes += [f"{key.run}/ping/{key.name}/"]
        prefixes += [f"{key.run}/welcome/{key.name}/"] if key.role != "syncer" else []
        found.append(keyed.receiver(key, plane, *(prefix.encode() for prefix in prefixes)))
    wait_for(lambda: keyed.broker.counters()[PLANE[plane]]["subscriptions"] >= 26, "all are subscribed")
    return found


def barred(keyed: Peers, key: Key) -> bool:
    """Who comes with this key is refused in the handshake, soon."""
    socket = keyed.connect(zmq.SUB, 1, key)
    wait_for(lambda: keyed.watch[socket].seen(zmq.EVENT_HANDSHAKE_FAILED_AUTH), "the key is refused")
    socket.close()
    return True
