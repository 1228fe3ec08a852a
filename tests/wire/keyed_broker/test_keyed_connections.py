"""Connections without a valid key, and keys that are added, replaced or revoked."""

from __future__ import annotations

import socket as network
from pathlib import Path

import pytest
import zmq
from decoupled_diloco.common.auth_keys import new_key, revoke
from decoupled_diloco.common.sockets import Socket
from keyed_broker import BEAT, BULK, CONTROL, PLANE, KeyedBroker, alive, barred, frames, pass_on, read
from waiting import wait_for


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


def test_between_being_revoked_and_cut_off_nothing_passes_either(
    keyed: KeyedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_key_made_while_the_broker_runs_is_taken_and_no_connection_is_disturbed(keyed: KeyedBroker) -> None:
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


def test_a_folder_that_cannot_be_looked_at_keeps_those_in_who_are_and_is_reported(
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
