"""Start and end of a broker with keys."""

from __future__ import annotations

import errno
import signal
import socket as network
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import zmq
from decoupled_diloco.broker.broker import Broker
from decoupled_diloco.common.auth_keys import new_key, revoke
from decoupled_diloco.common.config import BrokerConfig
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.common.sockets import Socket
from decoupled_diloco.common.wire import (
    Ping,
)
from keyed_broker import BULK, CALL, CONTROL, KeyedBroker, Peers, barred, frames, pass_on, read
from transport import context, free_ports
from waiting import wait_for
from zmq.auth.thread import ThreadAuthenticator


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


def test_a_broker_that_gets_no_socket_for_a_moment_when_it_cuts_connections_continues(
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
def test_a_broker_ends_by_itself_once_all_clients_have_left_and_pings_do_not_count(tmp_path: Path, keyed: bool) -> None:
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
