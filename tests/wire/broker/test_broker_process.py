"""Kills and restarts of the broker and of its clients."""

from __future__ import annotations

import json
import select
import signal
import socket as network
import subprocess
import sys
import threading
from typing import Any

import pytest
import zmq
from broker_clients import BrokerClients
from decoupled_diloco.broker.broker import Broker
from decoupled_diloco.broker.forwarder import Forwarder
from decoupled_diloco.common.config import BrokerConfig
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.common.sockets import Address, PublishSocket
from decoupled_diloco.common.wire import (
    Delta,
    Plane,
    Update,
    prefix,
)
from transport import (
    HWM,
    BrokerChild,
    LinkThread,
    broker_here,
    context,
    delta,
    downlink,
    free_ports,
    meet,
    next_of,
    take_all,
    update,
    uplink,
)
from waiting import wait_for


def exchange(sender: LinkThread, receiver: LinkThread, message: Update | Delta) -> None:
    """Nobody touches a socket here: the two threads do."""

    def arrived() -> bool:
        sender.send(message)
        return any(isinstance(got, type(message)) and got.slot == message.slot for got in receiver.received)

    wait_for(arrived, f"the {message.KIND} arrives")


def test_a_broker_killed_and_started_again_is_found_by_both_directions_while_the_program_does_something_else() -> None:
    with BrokerChild() as broker, context() as made:
        learner = LinkThread(made, broker.address, prefix("run", "fragment"))
        syncer = LinkThread(made, broker.address, prefix("run", "delta"), prefix("run", "seed"))
        try:
            for life in range(1, 4):
                wait_for(lambda: learner.proven and syncer.proven, "both hear the broker")
                exchange(syncer, learner, update(slot=life))
                exchange(learner, syncer, delta(slot=life))
                broker.kill()
                wait_for(lambda: not learner.proven and not syncer.proven, "both know that the broker is gone")
                broker.start()
        finally:
            learner.close()
            syncer.close()


def test_what_is_sent_as_soon_as_a_restarted_broker_is_heard_reaches_it() -> None:
    config = BrokerConfig(port=free_ports())
    with context() as made:
        up = PublishSocket(made, Address("127.0.0.1", config.port).bulk_in, hwm_messages=HWM)
        for _ in range(5):
            broker = Broker(config)
            broker.start()
            taken = sum([wait_for(lambda: up.send(update()), "the broker is heard"), up.send(update())])
            wait_for(lambda: broker.counters()["bulk"]["messages"] == taken, "the broker has all that was taken")  # noqa: B023 - called at once
            broker.stop()
            wait_for(lambda: not up.send(update()), "the uplink knows that the broker is gone")


STOPPED_RECEIVER = """
import json, sys, zmq
from decoupled_diloco.common.sockets import SubscribeSocket
context = zmq.Context()
down = SubscribeSocket(context, sys.argv[1], hwm_messages=8)
down.subscribe(b"run/fragment/")
first, count = None, 0
while True:
    down.socket.poll()
    message = down.receive()
    if message is None:
        continue
    if first is None:
        first = message.sequence
        print("hears", flush=True)
    count += 1
    if message.slot == 2**40:
        break
print(json.dumps({"first": first, "last": message.sequence, "received": count, "gaps": down.gaps}), flush=True)
"""


def test_a_stopped_receiver_costs_a_bounded_queue_and_the_others_keep_pace_and_it_sees_what_it_missed() -> None:
    queue_mib, messages, chunk = 8, 1_500, bytes(64 * 1024)
    with BrokerChild(queue_mib=queue_mib) as broker, context() as made:
        arguments = [sys.executable, "-P", "-c", STOPPED_RECEIVER, broker.address.bulk_out]
        sleeper = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert sleeper.stdout is not None
        try:
            up = uplink(made, broker.address.bulk_in)
            healthy = downlink(made, broker.address.bulk_out, prefix("run", "fragment"))
            meet(up, healthy, update())
            reading = select_reader(sleeper.stdout)
            wait_for(lambda: up.send(update()) and reading(0.05), "the receiver hears")
            assert sleeper.stdout.readline() == "hears\n"
            wait_for(lambda: not take_all(healthy) and not healthy.socket.poll(50), "the trial messages are through")
            sleeper.send_signal(signal.SIGSTOP)
            before, gaps = broker.resident_bytes(), healthy.gaps
            arrived = 0
            for slot in range(messages):  # at most four are on their way, as a syncer's window would have it
                wait_for(lambda slot=slot: up.send(update(slot=slot, payload=chunk)), "the broker takes it")  # type: ignore[misc]
                while slot + 1 - arrived >= 4:
                    healthy.socket.poll(1000)
                    arrived += len(take_all(healthy))
            wait_for(lambda: not take_all(healthy) and not healthy.socket.poll(50), "the last ones are through")
            grown = broker.resident_bytes() - before
            assert healthy.gaps == gaps, "others lost nothing"
            assert grown < (queue_mib + 24) * 2**20, f"grew by {grown / 2**20:.1f} MiB of {messages * 64 / 1024:.0f}"

            sleeper.send_signal(signal.SIGCONT)
            wait_for(
                lambda: up.send(update(slot=2**40)) and sleeper.poll() is not None, "it wakes up and hears the end"
            )
            told = json.loads(sleeper.stdout.read())
            assert told["gaps"] > messages / 2, "it knows how much it missed"
            assert told["received"] + told["gaps"] == told["last"] - told["first"] + 1
        finally:
            sleeper.kill()
            sleeper.communicate()


def select_reader(stream: Any) -> Any:
    """Whether the pipe has something to read, within some seconds."""
    poller = zmq.Poller()
    poller.register(stream.fileno(), zmq.POLLIN)
    return lambda seconds: poller.poll(seconds * 1000)


@pytest.mark.parametrize("offset", range(4))
def test_a_taken_port_is_named_and_the_other_three_are_given_back(offset: int) -> None:
    port = free_ports()
    broker = Broker(BrokerConfig(port=port))
    with (
        network.create_server(("127.0.0.1", port + offset)),
        pytest.raises(SettingError, match=f"port {port + offset} "),
    ):
        broker.start()
    for each in range(port, port + 4):
        network.create_server(("127.0.0.1", each)).close()


def test_a_second_broker_on_the_same_ports_is_refused_and_the_first_continues(clients: BrokerClients) -> None:
    with pytest.raises(SettingError, match="taken"):
        Broker(BrokerConfig(port=clients.address.port)).start()
    clients.works()


def test_a_host_that_is_not_ours_is_refused_in_one_sentence() -> None:
    for host in ("192.0.2.1", "no such host", "host.invalid", "a" * 64, ""):
        with pytest.raises(SettingError, match="--host") as caught:
            Broker(BrokerConfig(host=host, port=free_ports(), insecure=True)).start()
        assert "\n" not in str(caught.value)


def test_listening_beyond_loopback_is_refused_unless_it_is_said_to_be_meant() -> None:
    everywhere, port = "0.0.0.0", free_ports()  # noqa: S104 - what is tested
    with pytest.raises(SettingError, match="--insecure"):
        BrokerConfig(host=everywhere, port=port)
    broker = Broker(BrokerConfig(host=everywhere, port=port, insecure=True))
    broker.start()
    with context() as made:
        address = Address("127.0.0.1", port)
        down, up = downlink(made, address.bulk_out, b""), uplink(made, address.bulk_in)
        meet(up, down, update())
    broker.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_broker_with_code_0_and_its_totals_even_with_receivers_that_do_not_read(
    number: signal.Signals,
) -> None:
    with BrokerChild() as broker, context() as made:
        down = downlink(made, broker.address.bulk_out, b"", hwm_messages=1)
        up = uplink(made, broker.address.bulk_in)
        meet(up, down, update())
        for _ in range(32):
            wait_for(lambda: up.send(update(payload=bytes(2**20))), "the broker takes it")
        broker.process.send_signal(number)
        _, told = broker.process.communicate(timeout=30)
        assert broker.process.returncode == 0
        assert "broker_stopped" in told
        assert '"bytes"' in told


def test_a_broker_that_was_stopped_can_be_started_again_on_the_same_ports_at_once() -> None:
    port = free_ports()
    with context() as made:
        for _ in range(3):
            broker = Broker(BrokerConfig(port=port))
            broker.start()
            address = Address("127.0.0.1", port)
            down = downlink(made, address.bulk_out, b"", hwm_messages=HWM)
            up = uplink(made, address.bulk_in)
            meet(up, down, update())
            broker.stop()
            up.close()
            down.close()


def test_half_a_broker_is_none_a_plane_that_fails_ends_it_with_its_reason() -> None:
    told = threading.Event()
    broker = Broker(BrokerConfig(port=free_ports()), on_failure=told.set)
    broker.start()
    failing = broker._planes[1]
    failing._log_drops = lambda: 1 / 0  # type: ignore[method-assign,assignment]
    failing._waker.wake()
    assert told.wait(30), "the failure is told"
    assert isinstance(broker.failure, ZeroDivisionError)
    broker.stop()


def test_the_largest_update_passes(clients: BrokerClients) -> None:
    message = update(payload=bytes(2**20), contributors=tuple((f"node-{i}", 2**53, 2**53, 2**53) for i in range(1000)))
    assert clients.up["bulk"].send(message)
    arrived = next_of(clients.down["bulk"])
    assert isinstance(arrived, Update)
    assert arrived.contributors == message.contributors


def test_a_plane_that_was_woken_for_nothing_sleeps_again() -> None:
    with broker_here() as (broker, _):
        for plane in broker._planes:
            plane._waker.wake()
            wait_for(lambda plane=plane: not select.select([plane._waker], [], [], 0)[0], "the wish is read")  # type: ignore[misc]


def test_a_request_to_reopen_during_another_one_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with context() as made:
        plane = Forwarder(Plane.BULK, lambda: (made.socket(zmq.XSUB), made.socket(zmq.XPUB)), lambda: None)
        clear = plane._waker.clear

        def wished_meanwhile() -> None:
            clear()
            plane.reopen()

        monkeypatch.setattr(plane._waker, "clear", wished_meanwhile)
        plane.reopen()
        plane._reopen()
        assert plane._reopening
        plane.close()
