"""A broker with keys, attacked by raw sockets: who has which key gets what, and nobody else gets anything."""

from __future__ import annotations

import errno
import signal
import socket as network
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from decoupled_diloco.broker import acl, authorized_forwarder
from decoupled_diloco.broker.acl import REFUSALS
from decoupled_diloco.broker.authenticator import Authenticator
from decoupled_diloco.broker.broker import Broker
from decoupled_diloco.common.auth_keys import Key, KeyRing, Role, new_key, revoke
from decoupled_diloco.common.config import MESSAGE_BYTES, BrokerConfig
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.common.sockets import Address, Context, Socket
from decoupled_diloco.common.wire import (
    Alive,
    Beat,
    Call,
    Hello,
    Keyframe,
    Message,
    Ping,
    Seed,
    Welcome,
    encode,
    split,
)
from transport import context, delta, free_ports, update
from waiting import wait_for
from zmq.auth.thread import ThreadAuthenticator
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


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[KeyedBroker]:
    with context() as made:
        built = KeyedBroker(tmp_path / "keys", made)
        try:
            yield built
        finally:
            built.broker.stop()
        assert built.broker.failure is None


# --- messages --------------------------------------------------------------------------------------------------------
BEAT = Beat(run="run", epoch=1, state="running", t=1, steps=2, step_seconds=0, syncer=1)
CALL = Call(run="run", epoch=1, slot=1, t=1, fragment=3, version=1, attempt=1)
PART: dict[str, Any] = {"run": "run", "epoch": 1, "fragment": 3, "digest": "", **split(b"12345678")[0]}
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


def test_what_somebody_called_ping_says_is_no_ping(keyed: KeyedBroker) -> None:
    key = new_key(keyed.directory, role="learner", run="run", name="ping")
    pass_on(keyed.sender(key), keyed.receiver("syncer", CONTROL, b"run/alive/"), alive("ping"))
    plane = keyed.broker._planes[0]
    assert isinstance(plane, authorized_forwarder.AuthorizedForwarder)
    assert plane._pings == 0


FORGED: dict[str, tuple[str, int, Message]] = {
    "a learner calls": ("bob", CONTROL, CALL),
    "a learner beats": ("bob", CONTROL, BEAT),
    "a learner beats among bulk": ("bob", BULK, BEAT),
    "a learner welcomes": ("bob", CONTROL, welcome("eve")),
    "a learner welcomes itself": ("bob", CONTROL, welcome("bob")),
    "a learner publishes a fragment": ("bob", BULK, update()),
    "a learner publishes a keyframe": ("bob", BULK, Keyframe(t=1, version=1, **PART)),
    "a learner says hello as another": ("bob", CONTROL, hello("eve")),
    "a learner says hello as one whose name begins alike": ("bob", CONTROL, hello("bobby")),
    "a learner is alive as another": ("bob", CONTROL, alive("eve")),
    "a learner's delta under another's name": ("bob", BULK, delta(name="eve")),
    "a learner's seed under another's name": ("bob", BULK, Seed(name="eve", incarnation=1, **PART)),
    "a learner pings as another": ("bob", CONTROL, Ping(run="run", name="eve", nonce=1)),
    "a learner's delta for another run": ("bob", BULK, delta(name="bob", run="run1")),
    "a learner's hello for another run": ("bob", CONTROL, hello("bob", run="run1")),
    "an observer's delta": ("owl", BULK, delta(name="owl")),
    "an observer's seed": ("owl", BULK, Seed(name="owl", incarnation=1, **PART)),
    "an observer is alive": ("owl", CONTROL, alive("owl")),
    "an observer says hello as a learner": ("owl", CONTROL, hello("owl", role="learner")),
    "an observer calls": ("owl", CONTROL, CALL),
    "an observer publishes a fragment": ("owl", BULK, update()),
    "another run's syncer calls": ("far syncer", CONTROL, CALL),
    "another run's syncer publishes a fragment": ("far syncer", BULK, update()),
    "another run's syncer beats": ("far syncer", CONTROL, BEAT),
    "a syncer sends a delta": ("syncer", BULK, delta(name="bob")),
}


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


@pytest.mark.parametrize(("who", "plane", "message"), FORGED.values(), ids=FORGED)
def test_what_a_key_may_not_say_reaches_nobody_and_is_counted(
    keyed: KeyedBroker, who: str, plane: int, message: Message, capfd: pytest.CaptureFixture[str]
) -> None:
    receivers, up = everything(keyed, plane), keyed.sender(who, plane)
    up.send_multipart(frames(message))
    wait_for(lambda: keyed.dropped(plane) == {"denied": 1}, "it is refused")
    for receiver in receivers:
        assert not receiver.poll(20)
    keyed.works(plane)
    told = wait_for(lambda: capfd.readouterr().err, "it is told")
    key = keyed.keys[who]
    assert f"{key.role} {key.name} of {key.run}" in told, "whose key it was is told"


def test_what_keys_are_for_passes(keyed: KeyedBroker) -> None:
    syncer = {
        plane: keyed.receiver("syncer", plane, *(f"run/{kind}/".encode() for kind in ("hello", "alive", "delta")))
        for plane in (CONTROL, BULK)
    }
    for who, name in (("bob", "bob"), ("bob", "bob-7"), ("eve", "eve-a-b")):
        pass_on(keyed.sender(who), syncer[CONTROL], hello(name))
        pass_on(keyed.sender(who), syncer[CONTROL], alive(name))
        pass_on(keyed.sender(who, BULK), syncer[BULK], delta(name=name))
    pass_on(keyed.sender("owl"), syncer[CONTROL], hello("owl-2", role="observer"))
    for listener in ("bob", "owl"):
        down = keyed.receiver(listener, CONTROL, b"run/call/", f"run/welcome/{listener}-2/".encode())
        pass_on(keyed.sender("syncer"), down, CALL)
        pass_on(keyed.sender("syncer"), down, welcome(f"{listener}-2"))
        pass_on(keyed.sender("syncer", BULK), keyed.receiver(listener, BULK, b"run/fragment/"), update())
    for who in ("syncer", "bob", "owl"):
        ping = Ping(run="run", name=keyed.keys[who].name, nonce=7)
        for plane in (CONTROL, BULK):
            pass_on(keyed.sender(who, plane), keyed.receiver(who, plane, ping.topic()), ping)
    assert keyed.dropped(CONTROL) == keyed.dropped(BULK) == {}


# --- subscriptions ---------------------------------------------------------------------------------------------------
SPIED: dict[str, tuple[str, bytes]] = {
    "everything": ("bob", b""),
    "a whole run": ("bob", b"run/"),
    "the beginning of a run's name": ("bob", b"ru"),
    "another run": ("far", b"run/"),
    "another run's calls": ("far", b"run/call/"),
    "another run's beats": ("far", b"_/beat/run/"),
    "all runs' beats": ("far", b"_/beat/"),
    "everybody's welcome": ("bob", b"run/welcome/"),
    "another's welcome": ("eve", b"run/welcome/bob/"),
    "the welcome of all whose names begin alike": ("bob", b"run/welcome/b"),
    "the deltas, as a learner": ("bob", b"run/delta/"),
    "the deltas, as an observer": ("owl", b"run/delta/"),
    "another's deltas": ("eve", b"run/delta/3/bob/"),
    "hellos": ("owl", b"run/hello/"),
    "another's pings": ("eve", b"run/ping/bob/"),
}


@pytest.mark.parametrize("plane", [CONTROL, BULK])
@pytest.mark.parametrize(("who", "prefix"), SPIED.values(), ids=SPIED)
def test_what_a_key_may_not_hear_it_does_not_hear(keyed: KeyedBroker, who: str, prefix: bytes, plane: int) -> None:
    spy = keyed.receiver(who, plane, prefix)
    wait_for(lambda: keyed.dropped(plane) == {"subscription": 1}, "it is refused")
    down = keyed.receiver(
        "bob", plane, b"run/call/", b"run/fragment/", b"run/welcome/bob/", b"run/ping/bob/", b"_/beat/run/"
    )
    hears = keyed.receiver("syncer", plane, b"run/hello/", b"run/delta/")
    syncer, learner = keyed.sender("syncer", plane), keyed.sender("bob", plane)
    pass_on(syncer, down, BEAT)
    pass_on(learner, down, Ping(run="run", name="bob", nonce=1))
    if plane == CONTROL:
        pass_on(syncer, down, CALL)
        pass_on(syncer, down, welcome("bob"))
        pass_on(learner, hears, hello("bob"))
    else:
        pass_on(syncer, down, update())
        pass_on(learner, hears, delta(name="bob"))
    assert read(spy) == []


def test_a_refused_subscription_that_is_taken_back_or_whose_connection_closes_takes_nobody_s_along(
    keyed: KeyedBroker,
) -> None:
    hears = keyed.receiver("syncer", BULK, b"run/delta/")
    spy, other = (keyed.receiver("eve", BULK, b"run/delta/") for _ in range(2))
    wait_for(lambda: keyed.dropped(BULK) == {"subscription": 2}, "both are refused")
    spy.unsubscribe(b"run/delta/")
    other.close()
    pass_on(keyed.sender("bob", BULK), hears, delta(name="bob"))
    assert keyed.broker.counters()["bulk"]["subscriptions"] == 1


def test_beyond_so_many_subscriptions_a_key_gets_no_more_and_the_others_do(
    keyed: KeyedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acl, "SUBSCRIPTIONS", 500)
    greedy = keyed.receiver("bob", BULK, *(b"run/fragment/%d/" % i for i in range(500 + 20)))
    wait_for(lambda: keyed.dropped(BULK) == {"subscription": 20}, "the last ones are refused")
    assert keyed.broker.counters()["bulk"]["subscriptions"] == 500
    up, down = keyed.sender("syncer", BULK), keyed.receiver("eve", BULK, b"run/fragment/")
    pass_on(up, down, update())
    assert read(greedy), "what it has it keeps"
    greedy.close()
    wait_for(lambda: keyed.broker.counters()["bulk"]["subscriptions"] == 1, "those of connections that closed are gone")
    keyed.receiver("bob", BULK, b"run/fragment/")
    wait_for(lambda: keyed.dropped(BULK) == {"subscription": 21}, "and count all the same")


def test_a_key_that_got_all_its_subscriptions_in_a_long_time_gets_new_ones_when_all_connect_anew(
    keyed: KeyedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acl, "SUBSCRIPTIONS", 50)
    monkeypatch.setattr(authorized_forwarder, "SUBSCRIPTIONS_SECONDS", 0)
    for _ in range(3):
        leaving = keyed.receiver("bob", BULK, *(b"run/fragment/%d/" % i for i in range(40)))
        keyed.works(BULK)
        leaving.close()
    assert keyed.dropped(BULK) == {}


def test_who_keeps_asking_for_what_he_may_not_hear_is_barred_and_the_others_go_on(keyed: KeyedBroker) -> None:
    greedy = keyed.receiver("bob", CONTROL, *(b"run/delta/%d/" % i for i in range(REFUSALS)))
    assert barred(keyed, keyed.keys["bob"])
    greedy.close()
    up, down = keyed.sender("syncer"), keyed.receiver("eve", CONTROL, b"_/beat/run/")
    pass_on(up, down, BEAT)


ODD = {
    "another kind of frame": b"\x02",
    "an empty frame": b"",
    "noise": b"\xff" * 100,
    "a very long prefix": b"\x01" + b"x" * 500,
}


def test_a_key_that_is_barred_is_told_once_and_connections_are_cut_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    key, cuts = new_key(tmp_path, role="learner", run="run", name="bob"), Counter[str]()
    with context() as made:
        door = Authenticator(made, KeyRing(tmp_path), lambda: None)
        door.guard([], lambda: cuts.update(["cut"]))
        door.start()
        try:
            for _ in range(2):
                door.bar(key.public, "has reasons")
            assert door.grant_of(key.public) is None
            new_key(tmp_path, role="learner", run="run", name="eve")
            told = ""

            def looked() -> bool:
                nonlocal told
                told += capfd.readouterr().err
                return "key_added" in told

            wait_for(looked, "the door has looked after it")
        finally:
            door.stop()
    assert cuts.total() == 1
    assert told.count("key_barred") == 1
    assert "key_revoked" not in told


@pytest.mark.parametrize("frame", ODD.values(), ids=ODD)
def test_who_sends_what_is_no_subscription_is_barred_and_gets_nobody_else_s(keyed: KeyedBroker, frame: bytes) -> None:
    """libzmq would give subscriptions that come after such a frame to the wrong peer."""
    listener = keyed.receiver("eve", BULK, b"run/fragment/")
    spies = [keyed.connect(zmq.XSUB, BULK + 1, keyed.keys["bob"]) for _ in range(3)]
    for spy in spies:
        for _ in range(3):
            spy.send(frame)
            spy.send(b"\x01run/call/")
    syncer = [keyed.receiver("syncer", BULK, b"run/delta/") for _ in range(3)]
    assert barred(keyed, keyed.keys["bob"])
    up = keyed.sender("eve", BULK)
    for each in syncer:
        pass_on(up, each, delta(name="eve"))
    pass_on(keyed.sender("syncer", BULK), listener, update())
    for spy in spies:
        assert not [message for message in read(spy) if message[0].startswith(b"run/delta/")]


def barred(keyed: Peers, key: Key) -> bool:
    """Who comes with this key is refused in the handshake, soon."""
    socket = keyed.connect(zmq.SUB, 1, key)
    wait_for(lambda: keyed.watch[socket].seen(zmq.EVENT_HANDSHAKE_FAILED_AUTH), "the key is refused")
    socket.close()
    return True


# --- strangers -------------------------------------------------------------------------------------------------------
def made_up() -> dict[str, str]:
    public, secret = zmq.curve_keypair()
    return {"public": public.decode(), "secret": secret.decode()}


STRANGERS = ["without a key", "with a key of his own", "with the wrong key of the broker", "with another's public half"]


def stranger(keyed: KeyedBroker, which: str, kind: int, port: int) -> Socket:
    key = keyed.keys["bob"]
    if which == "without a key":
        return keyed.connect(kind, port, None)
    if which == "with a key of his own":
        return keyed.connect(kind, port, key, **made_up())
    if which == "with the wrong key of the broker":
        return keyed.connect(kind, port, key, broker=made_up()["public"])
    return keyed.connect(kind, port, key, secret=made_up()["secret"])


@pytest.mark.parametrize("which", STRANGERS)
def test_a_stranger_says_and_hears_nothing(keyed: KeyedBroker, which: str) -> None:
    sockets = [stranger(keyed, which, kind, port) for port, kind in enumerate((zmq.XPUB, zmq.SUB, zmq.XPUB, zmq.SUB))]
    for down in sockets[1::2]:
        down.subscribe(b"")
    wait_for(lambda: all(keyed.watch[socket].seen() for socket in sockets), "he is cut off")
    keyed.works(CONTROL)
    keyed.works(BULK)
    for socket in sockets:
        assert read(socket) == [], "neither the broker's greeting nor a message"
    for plane in (CONTROL, BULK):
        assert keyed.dropped(plane) == {}
        assert keyed.broker.counters()[PLANE[plane]]["subscriptions"] <= 1


def test_a_stranger_s_connections_leave_nothing_behind(keyed: KeyedBroker) -> None:
    keyed.works()
    fresh = [network.create_connection((keyed.address.host, keyed.address.port + i % 4)) for i in range(100)]
    for peer in fresh:
        peer.close()
    wait_for(lambda: descriptors(keyed.address.port) <= 8, "connections that closed are gone")
    sockets = [stranger(keyed, which, zmq.SUB, 1) for which in STRANGERS for _ in range(25)]
    wait_for(lambda: all(keyed.watch[socket].seen() for socket in sockets), "each is cut off")
    for socket in sockets:
        socket.close()
    wait_for(lambda: descriptors(keyed.address.port) <= 8, "connections that closed are gone")
    keyed.works()


def descriptors(port: int) -> int:
    """TCP sockets of this process that belong to the broker's ports."""
    inodes = set()
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        local, state, inode = (line.split()[i] for i in (1, 3, 9))
        if port <= int(local.rpartition(":")[2], 16) < port + 4 and state != "06":
            inodes.add(f"socket:[{inode}]")
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found += str(entry.readlink()) in inodes
        except FileNotFoundError:
            continue  # the listing's own
    return found


# --- large ones ------------------------------------------------------------------------------------------------------
def test_a_key_holder_s_oversized_messages_reach_nobody(keyed: KeyedBroker) -> None:
    up, down = keyed.sender("bob", BULK), keyed.receiver("syncer", BULK, b"run/delta/")
    pass_on(up, down, delta(name="bob"))
    topic, header, _ = frames(delta(name="bob"))
    up.send_multipart([topic, header, bytes(MESSAGE_BYTES - 50)])
    up.send_multipart([topic, header, b"", b""])
    up.send_multipart([topic])
    wait_for(lambda: keyed.dropped(BULK) == {"size": 1, "frames": 2}, "they are refused")
    up.send_multipart([topic, header, bytes(MESSAGE_BYTES + 1)])
    wait_for(lambda: up.poll(50) and up.recv(), "a frame above the largest cuts the connection, and it is made anew")
    assert read(down) == []
    pass_on(up, down, delta(name="bob"))


# --- keys come and go ------------------------------------------------------------------------------------------------
def test_a_revoked_key_neither_says_nor_hears_anything_more_and_the_others_do(keyed: KeyedBroker) -> None:
    bob_up, bob_down = keyed.sender("bob"), keyed.receiver("bob", CONTROL, b"_/beat/run/")
    eve_up, eve_down = keyed.sender("eve"), keyed.receiver("eve", CONTROL, b"_/beat/run/")
    up, down = keyed.sender("syncer"), keyed.receiver("syncer", CONTROL, b"run/alive/")
    pass_on(up, bob_down, BEAT)
    pass_on(up, eve_down, BEAT)
    pass_on(bob_up, down, alive("bob"))
    pass_on(eve_up, down, alive("eve"))

    revoke(keyed.directory, role="learner", run="run", name="bob")
    for socket in (bob_up, bob_down):
        seen = keyed.watch[socket].seen
        wait_for(lambda seen=seen: seen(zmq.EVENT_HANDSHAKE_FAILED_AUTH), "he is cut off, and refused")  # type: ignore[misc]
    read(down), read(bob_down)
    for _ in range(3):
        bob_up.send_multipart(frames(alive("bob")))
    pass_on(eve_up, down, alive("eve"))
    pass_on(up, eve_down, BEAT)
    assert read(bob_down) == []
    assert read(down) == []


def test_between_being_revoked_and_cut_off_nothing_passes_either(keyed: KeyedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    up, down = keyed.sender("bob"), keyed.receiver("syncer", CONTROL, b"run/alive/")
    pass_on(up, down, alive("bob"))
    assert keyed.broker._authenticator is not None
    monkeypatch.setattr(keyed.broker._authenticator, "_reconnect", lambda: None)
    revoke(keyed.directory, role="learner", run="run", name="bob")

    def dropped() -> bool:
        up.send_multipart(frames(alive("bob")))
        return "revoked" in keyed.dropped()

    wait_for(dropped, "his messages are dropped")
    read(down)
    up.send_multipart(frames(alive("bob")))
    spy = keyed.receiver("eve", CONTROL, b"_/beat/run/")
    pass_on(keyed.sender("syncer"), spy, BEAT)
    assert read(down) == []


def test_a_key_made_while_the_broker_runs_is_taken_and_nobody_is_disturbed(keyed: KeyedBroker) -> None:
    down = keyed.receiver("syncer", CONTROL, b"run/alive/")
    new = new_key(keyed.directory, role="learner", run="run", name="late")
    pass_on(keyed.sender(new), down, alive("late"))
    assert keyed.watch[down].seen() == 0


def test_a_replaced_key_opens_and_the_old_one_does_not(keyed: KeyedBroker) -> None:
    old = keyed.keys["bob"]
    revoke(keyed.directory, role="learner", run="run", name="bob")
    new = new_key(keyed.directory, role="learner", run="run", name="bob")
    assert barred(keyed, old)
    pass_on(keyed.sender(new), keyed.receiver("syncer", CONTROL, b"run/alive/"), alive("bob"))


def test_a_folder_that_cannot_be_looked_at_keeps_those_in_who_are_and_is_told(
    keyed: KeyedBroker, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails() -> bool:
        raise PermissionError(13, "Permission denied")

    assert keyed.broker._authenticator is not None
    monkeypatch.setattr(keyed.broker._authenticator._ring, "changed", fails)
    seen = ""

    def told() -> bool:
        nonlocal seen
        seen += capfd.readouterr().err
        return "keys_unreadable" in seen

    wait_for(told, "it is told")
    keyed.works()


# --- starting and ending ---------------------------------------------------------------------------------------------
def test_a_broker_whose_handshakes_nobody_answers_ends(tmp_path: Path) -> None:
    new_key(tmp_path, role="learner", run="run", name="bob")
    broker = Broker(BrokerConfig(port=free_ports(), keys=tmp_path))
    broker.start()
    assert broker._authenticator is not None
    broker._authenticator._authenticator.stop()
    wait_for(lambda: broker.failure is not None, "half a broker is none")
    broker.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broker_whose_handshakes_are_answered_no_more_since_that_failed_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise ZeroDivisionError

    key = new_key(tmp_path, role="learner", run="run", name="bob")
    broker = Broker(BrokerConfig(port=free_ports(), keys=tmp_path))
    monkeypatch.setattr(ThreadAuthenticator, "handle_zap_message", fails)
    broker.start()
    with context() as made:
        peers = Peers(made, broker.config.port, {"bob": key})
        peers.receiver("bob", CONTROL, b"_/beat/run/")
        wait_for(lambda: broker.failure is not None, "half a broker is none")
        ending = threading.Thread(target=broker.stop, daemon=True)
        ending.start()
        wait_for(lambda: not ending.is_alive(), "it ends all the same", seconds=20)


def test_a_broker_that_gets_no_socket_for_a_moment_when_it_cuts_connections_goes_on(
    keyed: KeyedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keyed.broker._context is not None
    made, times = keyed.broker._context.socket, Counter[int]()

    def socket(kind: int) -> Socket:
        times[kind] += 1
        if times[kind] <= 4:
            raise zmq.ZMQError(errno.EMFILE)
        return made(kind)

    monkeypatch.setattr(keyed.broker._context, "socket", socket)
    keyed.broker.reconnect()
    wait_for(lambda: times[zmq.XPUB] >= 6, "both planes listen again")
    keyed.works(CONTROL)
    keyed.works(BULK)


def test_beyond_loopback_keys_or_insecure_is_needed_and_keys_are_enough(tmp_path: Path) -> None:
    everywhere, port = "0.0.0.0", free_ports()  # noqa: S104 - what is tested
    with pytest.raises(SettingError, match="--keys"):
        BrokerConfig(host=everywhere, port=port)
    new_key(tmp_path, role="learner", run="run", name="bob")
    broker = Broker(BrokerConfig(host=everywhere, port=port, keys=tmp_path))
    broker.start()
    broker.stop()


def test_a_folder_without_keys_is_refused_and_no_port_is_taken(tmp_path: Path) -> None:
    port = free_ports()
    with pytest.raises(SettingError, match=r"broker\.key"):
        Broker(BrokerConfig(port=port, keys=tmp_path)).start()
    for each in range(port, port + 4):
        network.create_server(("127.0.0.1", each)).close()


@pytest.mark.parametrize("offset", range(4))
def test_a_taken_port_is_named_and_the_others_are_given_back(tmp_path: Path, offset: int) -> None:
    new_key(tmp_path, role="learner", run="run", name="bob")
    port = free_ports()
    with (
        network.create_server(("127.0.0.1", port + offset)),
        pytest.raises(SettingError, match=f"port {port + offset} "),
    ):
        Broker(BrokerConfig(port=port, keys=tmp_path)).start()
    for each in range(port, port + 4):
        network.create_server(("127.0.0.1", each)).close()


def child(port: int, *arguments: str) -> subprocess.Popen[str]:
    diloco = [sys.executable, "-P", "-m", "decoupled_diloco.cli", "broker", "--port", str(port), *arguments]
    return subprocess.Popen(diloco, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("keyed", [False, True], ids=["open", "keyed"])
def test_a_broker_ends_by_itself_once_everybody_has_left_and_pings_do_not_count(tmp_path: Path, keyed: bool) -> None:
    boss = new_key(tmp_path, role="syncer", run="run", name="boss")
    bob = new_key(tmp_path, role="learner", run="run", name="bob")
    port = free_ports()
    process = child(port, "--exit-when-idle", "1.5", *(["--keys", str(tmp_path)] if keyed else []))
    with context() as made:
        peers, ping = Peers(made, port, {}), frames(Ping(run="run", name="boss", nonce=1))
        up, down = (
            peers.connect(zmq.XPUB, CONTROL, boss if keyed else None),
            peers.connect(zmq.SUB, 1, boss if keyed else None),
        )
        down.subscribe(ping[0])
        wait_for(lambda: up.poll(50), "the broker greets", seconds=60)

        def pinged() -> int:
            up.send_multipart(ping)
            return len(read(down))

        wait_for(lambda: all(pinged() for _ in range(20)), "pings alone go on for longer than that")
        assert process.poll() is None, "nobody was there yet"
        listener = peers.connect(zmq.SUB, CONTROL + 1, bob if keyed else None)
        listener.subscribe(b"run/call/")
        pass_on(up, listener, CALL)
        listener.close()
        wait_for(lambda: pinged() >= 0 and process.poll() is not None, "it ends although pings come")
    told = process.communicate()[1]
    assert process.returncode == 0, told
    assert "broker_idle" in told


def test_no_secret_appears_in_what_a_broker_tells_of_itself(tmp_path: Path) -> None:
    bob = new_key(tmp_path / "keys", role="learner", run="run", name="bob")
    pair = (tmp_path / "keys" / "broker.key").read_text()
    port = free_ports()
    process = child(port, "--keys", str(tmp_path / "keys"))
    with context() as made:
        keyed = Peers(made, port, {"bob": bob})
        keyed.sender("bob").send_multipart(frames(CALL))
        revoke(tmp_path / "keys", role="learner", run="run", name="bob")
        assert barred(keyed, bob)
    process.send_signal(signal.SIGTERM)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 0
    assert "key_revoked" in told
    for secret in (bob.secret, bob.public, *[line.split('"')[3] for line in pair.splitlines() if "secret" in line]):
        assert secret not in told
