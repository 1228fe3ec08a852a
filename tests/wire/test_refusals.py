"""Whoever is refused is told so, and let in as soon as that changes: libzmq by itself does neither."""

from __future__ import annotations

import contextlib
import socket as network
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq
from decoupled_diloco.broker.broker import Broker
from decoupled_diloco.common.auth_keys import Key, Role, new_key, revoke
from decoupled_diloco.common.config import BrokerConfig
from decoupled_diloco.common.connection_monitor import BROKEN_OFF, Refusal, mechanism_of
from decoupled_diloco.common.errors import PeerLost
from decoupled_diloco.common.sockets import Address, BrokerConnection, PublishSocket, SubscribeSocket, refusal_of
from decoupled_diloco.common.wire import Ping, beat_topic, prefix
from decoupled_diloco.learner.discover import discover
from decoupled_diloco.syncer.transport import Transport
from transport import context, free_ports
from waiting import wait_for


@dataclass
class Place:
    """A folder of a broker's keys, and of the files that its clients hold."""

    path: Path

    def new(self, role: Role = "learner", name: str = "a", *, broker: str = "keys") -> Path:
        key = new_key(self.path / broker, role=role, run="r", name=name)
        file = self.path / f"{broker}-{name}.key"
        key.save(file)
        return file

    def revoke(self, name: str, role: Role = "learner") -> None:
        revoke(self.path / "keys", role=role, run="r", name=name)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@contextlib.contextmanager
def broker(port: int, keys: Path | None = None) -> Iterator[Address]:
    running = Broker(BrokerConfig(port=port, keys=keys))
    running.start()
    try:
        yield Address("127.0.0.1", port)
    finally:
        running.stop()


@contextlib.contextmanager
def keyed(place: Place) -> Iterator[Address]:
    place.new("syncer", "s")
    with broker(free_ports(), place.path / "keys") as address:
        yield address


@contextlib.contextmanager
def lines(address: Address, file: Path | None) -> Iterator[list[BrokerConnection]]:
    """All four, as a client has them."""
    key = None if file is None else Key.load(file)
    with context() as made:
        yield [
            PublishSocket(made, address.control_in, hwm_messages=100, key=key),
            PublishSocket(made, address.bulk_in, hwm_messages=100, key=key),
            SubscribeSocket(made, address.control_out, hwm_messages=100, key=key),
            SubscribeSocket(made, address.bulk_out, hwm_messages=100, key=key),
        ]


def looked(what: list[BrokerConnection]) -> bool:
    for line in what:
        line.look()
    return True


def wait_for_refusal(what: list[BrokerConnection], refusal: Refusal | None) -> None:
    def told() -> bool:
        looked(what)
        uplinks = [line for line in what if isinstance(line, PublishSocket)]
        for uplink in uplinks:
            uplink.read_subscriptions()
        let_in = all(uplink.proven for uplink in uplinks)
        return all(line.refusal is refusal for line in what) and (refusal is not None or let_in)

    wait_for(told, f"all four lines: {refusal}")


def test_without_a_key_one_is_asked_for(place: Place) -> None:
    with keyed(place) as address, lines(address, None) as mine:
        wait_for_refusal(mine, Refusal.WANTS_KEY)
        said = refusal_of(mine, str(address), None)
        assert said == f"the broker at {address} wants a key: give --key FILE (see diloco keys new)"


def test_a_key_is_not_wanted_where_nobody_has_one(place: Place) -> None:
    with broker(free_ports()) as address, lines(address, place.new()) as mine:
        wait_for_refusal(mine, Refusal.TAKES_NO_KEYS)
        assert "takes no keys: leave --key FILE out" in refusal_of(mine, str(address), Path("FILE"))


def test_an_unknown_key_is_refused_and_taken_once_it_is_known(place: Place) -> None:
    with keyed(place) as address:
        file = place.new()
        grant = next((place.path / "keys" / "grants").glob("r.learner.a.json"))
        aside = grant.rename(place.path / "aside")
        with lines(address, file) as mine:
            wait_for_refusal(mine, Refusal.UNKNOWN_KEY)
            said = refusal_of(mine, str(address), file)
            assert said == f"the broker at {address} refuses the key {file} (unknown or revoked)"
            aside.rename(grant)
            wait_for_refusal(mine, None)
            assert comes_back(mine)


def test_a_key_of_another_broker_is_distinguished_from_one_that_is_unknown(place: Place) -> None:
    with keyed(place) as address, lines(address, place.new(broker="elsewhere")) as mine:
        wait_for_refusal(mine, Refusal.OTHER_BROKER)


def test_a_refusal_is_forgotten_when_the_broker_has_gone_or_has_changed_its_mind(place: Place) -> None:
    port, file = free_ports(), place.new()
    with lines(Address("127.0.0.1", port), file) as mine:
        with broker(port):
            wait_for_refusal(mine, Refusal.TAKES_NO_KEYS)
        wait_for(lambda: looked(mine) and not any(line.refusal for line in mine), "nobody is there to refuse")
        with broker(port, place.path / "keys"):
            wait_for_refusal(mine, None)
            assert comes_back(mine)


def test_a_client_that_holds_a_good_key_continues_when_another_one_is_revoked(place: Place) -> None:
    with keyed(place) as address, lines(address, place.new()) as mine, lines(address, place.new(name="b")) as other:
        wait_for_refusal(mine, None)
        wait_for_refusal(other, None)
        place.revoke("b")
        wait_for_refusal(other, Refusal.UNKNOWN_KEY)
        wait_for_refusal(mine, None)
        assert comes_back(mine)


def comes_back(mine: list[BrokerConnection]) -> bool:
    """What is said on each plane is heard on it: the downlinks' subscriptions have arrived as well."""
    for plane in (0, 1):
        up, down = mine[plane], mine[2 + plane]
        assert isinstance(up, PublishSocket)
        assert isinstance(down, SubscribeSocket)
        down.subscribe(prefix("r", "ping", "a"))

        def heard(up: PublishSocket = up, down: SubscribeSocket = down) -> bool:
            up.look()
            down.look()
            up.send(Ping(run="r", name="a", nonce=1))
            return bool(down.socket.poll(100)) and down.receive() is not None

        wait_for(heard, f"a ping on plane {plane} comes back")
    return True


@pytest.mark.parametrize("with_key", [False, True])
def test_something_that_hangs_up_on_everybody_is_no_broker_that_refuses(place: Place, *, with_key: bool) -> None:
    with hangs_up() as (address, calls), lines(address, place.new() if with_key else None) as mine:
        wait_for(lambda: looked(mine) and len(calls) > 3 * len(mine) * BROKEN_OFF, "it hung up often")
        assert refusal_of(mine, str(address), None) == ""


def test_a_broker_is_asked_what_it_wants_where_it_hangs_up_before_that_is_heard(place: Place) -> None:
    with keyed(place) as address:
        assert {mechanism_of(e) for e in endpoints(address)} == {"CURVE"}
        with lines(address, None) as mine:
            cut_off(mine)
            assert {line.refusal for line in mine} == {Refusal.WANTS_KEY}
    with broker(free_ports()) as address:
        assert {mechanism_of(e) for e in endpoints(address)} == {"NULL"}
        with lines(address, place.new()) as mine:
            cut_off(mine)
            assert {line.refusal for line in mine} == {Refusal.TAKES_NO_KEYS}
    assert mechanism_of(f"tcp://127.0.0.1:{free_ports()}") == ""


def endpoints(address: Address) -> list[str]:
    return [address.control_in, address.control_out, address.bulk_in, address.bulk_out]


def cut_off(mine: list[BrokerConnection]) -> None:
    """Let all of them be cut off again and again, as on a busy machine, and hear nothing else."""
    for line in mine:
        handshakes = line._monitor
        for _ in range(BROKEN_OFF):
            handshakes._take(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 0)
        question = handshakes._probe
        assert question is not None
        wait_for(lambda question=question: question.answer is not None, "the broker answers")  # type: ignore[misc]
        handshakes._answered(question.answer or "")


def test_discovery_and_syncer_say_why_they_wait(place: Place) -> None:
    with keyed(place) as address:
        with pytest.raises(PeerLost, match=r"wants a key: give --key FILE .*; nothing was heard for 4 s"):
            discover(str(address), timeout_seconds=4)
        file = place.new(broker="elsewhere", role="syncer", name="s")
        syncer = Transport(str(address), "r", lambda *_: None, file)
        try:

            def told() -> bool:
                syncer.wait(0.01)
                return "is not the one that the key" in syncer.refusal

            wait_for(told, "the syncer is told")
        finally:
            syncer.close()


def test_with_a_key_discovery_asks_for_beats_of_its_run_alone(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    monkeypatch.setattr(SubscribeSocket, "subscribe", lambda _self, topic: asked.append(topic))
    with pytest.raises(PeerLost, match="a beat of run r was not heard"):
        discover(f"tcp://127.0.0.1:{free_ports()}", timeout_seconds=0.1, key=place.new())
    assert asked == [beat_topic("r")]


@contextlib.contextmanager
def hangs_up() -> Iterator[tuple[Address, list[Any]]]:
    """What takes every connection and closes it at once, as some do whose service behind them is away."""
    calls: list[Any] = []
    port = free_ports()
    with contextlib.ExitStack() as stack:
        for offset in range(4):
            listener = stack.enter_context(network.create_server(("127.0.0.1", port + offset)))
            thread = threading.Thread(target=_hang_up, args=(listener, calls), daemon=True)
            stack.callback(thread.join)
            stack.callback(listener.shutdown, network.SHUT_RDWR)
            thread.start()
        yield Address("127.0.0.1", port), calls


def _hang_up(listener: network.socket, calls: list[Any]) -> None:
    with contextlib.suppress(OSError):  # shut down: the test is over
        while True:
            accepted, who = listener.accept()
            accepted.close()
            calls.append(who)
