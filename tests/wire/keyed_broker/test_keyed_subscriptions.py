"""Which subscriptions a broker with keys accepts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import zmq
from decoupled_diloco.broker import acl, authorized_forwarder
from decoupled_diloco.broker.acl import REFUSALS
from decoupled_diloco.broker.authenticator import Authenticator
from decoupled_diloco.common.auth_keys import KeyRing, new_key
from decoupled_diloco.common.wire import (
    Ping,
)
from keyed_broker import BEAT, BULK, CALL, CONTROL, KeyedBroker, barred, hello, pass_on, read, welcome
from transport import context, delta, update
from waiting import wait_for

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


def test_a_client_that_keeps_asking_for_what_it_may_not_hear_is_barred_and_the_others_continue(
    keyed: KeyedBroker,
) -> None:
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


def test_a_key_that_is_barred_is_reported_once_and_connections_are_cut_once(
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
def test_a_client_that_sends_what_is_no_subscription_is_barred_and_gets_no_other_s(
    keyed: KeyedBroker, frame: bytes
) -> None:
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
