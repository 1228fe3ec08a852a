"""Which messages pass a broker with keys: each role sends and receives its own kinds only."""

from __future__ import annotations

from typing import Any

import pytest
from decoupled_diloco.broker import authorized_forwarder
from decoupled_diloco.common.auth_keys import new_key
from decoupled_diloco.common.config import MESSAGE_BYTES
from decoupled_diloco.common.wire import (
    Keyframe,
    Message,
    Ping,
    Seed,
    split,
)
from keyed_broker import (
    BEAT,
    BULK,
    CALL,
    CONTROL,
    KeyedBroker,
    alive,
    everything,
    frames,
    hello,
    pass_on,
    read,
    welcome,
)
from transport import delta, update
from waiting import wait_for

PART: dict[str, Any] = {"run": "run", "epoch": 1, "fragment": 3, "digest": "", **split(b"12345678")[0]}


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


@pytest.mark.parametrize(("who", "plane", "message"), FORGED.values(), ids=FORGED)
def test_what_a_key_may_not_say_is_not_delivered_and_is_counted(
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


def test_a_key_holder_s_oversized_messages_are_not_delivered(keyed: KeyedBroker) -> None:
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
