"""The broker passes on what has a known topic and lives through everything else: kills, floods, stopped receivers."""

from __future__ import annotations

import json
import select
import signal
import socket as network
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import zmq
from decoupled_diloco.broker.acl import topic_pattern
from decoupled_diloco.broker.broker import Broker
from decoupled_diloco.broker.forwarder import Forwarder
from decoupled_diloco.common.config import MESSAGE_BYTES, BrokerConfig
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.common.sockets import Address, Context, PublishSocket, SubscribeSocket
from decoupled_diloco.common.wire import (
    BOTH_PLANES,
    MESSAGES,
    Beat,
    Call,
    Delta,
    Fetch,
    Message,
    Plane,
    Update,
    encode,
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

BEAT = Beat(run="run", epoch=1, state="running", t=1, steps=2, step_seconds=0, syncer=1)
PLANES = ("control", "bulk")


class BrokerClients:
    """A broker in this process with a sender and a receiver of everything on each plane."""

    def __init__(self, broker: Broker, address: Address, made: Context) -> None:
        self.broker, self.address = broker, address
        ends = {"control": (address.control_in, address.control_out), "bulk": (address.bulk_in, address.bulk_out)}
        self.up: dict[str, PublishSocket] = {plane: uplink(made, ends[plane][0]) for plane in PLANES}
        self.down: dict[str, SubscribeSocket] = {plane: downlink(made, ends[plane][1], b"") for plane in PLANES}
        for plane in PLANES:
            meet(self.up[plane], self.down[plane], BEAT)

    def send_raw(self, plane: str, *frames: bytes) -> None:
        self.up[plane].socket.send_multipart(frames)

    def dropped(self, plane: str) -> dict[str, int]:
        rows: dict[str, int] = self.broker.counters()[plane]["dropped"]
        return rows

    def works(self) -> None:
        """Nothing but our own message has arrived, on each plane."""
        for plane in PLANES:
            wait_for(lambda plane=plane: self.up[plane].send(BEAT), "the broker takes a message")  # type: ignore[misc]
            assert isinstance(next_of(self.down[plane], f"a genuine message passes the {plane} plane"), Beat)
            assert self.down[plane].receive() is None


@pytest.fixture
def clients() -> Iterator[BrokerClients]:
    with broker_here() as (broker, address), context() as made:
        built = BrokerClients(broker, address, made)
        yield built


# --- what passes -----------------------------------------------------------------------------------------------------
def test_frames_pass_unchanged_on_their_plane_and_are_counted(clients: BrokerClients) -> None:
    before = clients.broker.counters()
    frames = encode(update(payload=bytes(range(256)) * 4096))
    clients.send_raw("bulk", *map(bytes, frames))
    wait_for(lambda: clients.down["bulk"].socket.poll(50), "it arrives")
    assert clients.down["bulk"].socket.recv_multipart() == [bytes(frame) for frame in frames]
    after = clients.broker.counters()
    assert after["bulk"]["messages"] - before["bulk"]["messages"] == 1
    assert after["bulk"]["bytes"] - before["bulk"]["bytes"] == sum(len(frame) for frame in frames)
    assert after["control"] == before["control"], "the planes have nothing in common"
    assert after["bulk"]["subscriptions"] == 1


def test_everybody_who_wants_a_message_gets_it_and_several_senders_share_a_plane(clients: BrokerClients) -> None:
    with context() as made:
        others = [downlink(made, clients.address.control_out, prefix("run", "fetch")) for _ in range(3)]
        senders = [uplink(made, clients.address.control_in) for _ in range(3)]
        fetch = Fetch(run="run", name="a", incarnation=1, epoch=1, what="update", fragment=1, version=1, chunks=())
        for other in others:
            meet(senders[0], other, replace(fetch, name="trial"))
        for other in others:
            take_all(other)
        for i, sender in enumerate(senders):
            assert sender.send(replace(fetch, name=f"n{i}"))
        for other in others:
            arrived: list[Message] = []
            wait_for(lambda: len(take_all(other, arrived)) >= 3, "all three arrive")  # noqa: B023 - called at once
            assert {message.name for message in arrived} == {"n0", "n1", "n2"}  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", sorted(MESSAGES))
def test_the_broker_lets_a_kind_through_on_its_own_plane_only(kind: str) -> None:
    details = {"call": "3/", "fragment": "3/", "keyframe": "3/", "delta": "3/a/", "seed": "3/a/", "buffers": "3/a/"}
    detail = details.get(kind, "a/")
    topic = b"_/beat/run/" if kind == "beat" else f"run/{kind}/{detail}".encode()
    planes = {plane for plane in Plane if topic_pattern(plane).fullmatch(topic)}
    assert planes == (set(Plane) if kind in BOTH_PLANES else {MESSAGES[kind].PLANE})


# --- what does not ---------------------------------------------------------------------------------------------------
CALL_TOPIC, CALL_HEADER = (bytes(f) for f in encode(Call(run="run", epoch=1, slot=1, t=1, fragment=3, version=1,
                                                         attempt=1)))  # fmt: skip
UPDATE = [bytes(frame) for frame in encode(update())]
DROPPED: dict[str, tuple[str, str, list[bytes]]] = {
    "an empty frame": ("control", "frames", [b""]),
    "a topic alone": ("control", "frames", [CALL_TOPIC]),
    "four frames": ("bulk", "frames", [*UPDATE, b"more"]),
    "a hundred frames": ("bulk", "frames", [*UPDATE, *[b"more"] * 97]),
    "an unknown kind": ("control", "topic", [b"run/eval/3/", CALL_HEADER]),
    "a kind of the other plane": ("control", "topic", UPDATE),
    "a control message among bulk": ("bulk", "topic", [CALL_TOPIC, CALL_HEADER]),
    "no last delimiter": ("control", "topic", [CALL_TOPIC[:-1], CALL_HEADER]),
    "no run": ("control", "topic", [b"/call/3/", CALL_HEADER]),
    "a run in capitals": ("control", "topic", [b"RUN/call/3/", CALL_HEADER]),
    "a newline in the topic": ("control", "topic", [b"run/call/3/\n", CALL_HEADER]),
    "a newline in a name": ("control", "topic", [b"run/hello/a\nb/", CALL_HEADER]),
    "a beat of no run": ("bulk", "topic", [b"_/beat//", CALL_HEADER]),
    "noise": ("bulk", "topic", [bytes(range(256)), bytes(4096), bytes(4096)]),
    "a topic of a MiB": ("bulk", "topic", [b"run/" * 2**18, b"", b""]),
    "more in all than one message may have": ("bulk", "size", [UPDATE[0], bytes(2**20), bytes(2**20)]),
}


@pytest.mark.parametrize(("plane", "reason", "frames"), DROPPED.values(), ids=DROPPED)
def test_what_is_no_message_is_dropped_counted_and_changes_nothing(
    clients: BrokerClients, plane: str, reason: str, frames: list[bytes]
) -> None:
    clients.send_raw(plane, *frames)
    clients.works()
    assert clients.dropped(plane) == {reason: 1}


def test_a_frame_above_the_largest_message_is_refused_and_the_broker_goes_on(clients: BrokerClients) -> None:
    with context() as made:
        for endpoint in (clients.address.control_in, clients.address.bulk_in):
            hostile = made.socket(zmq.XPUB)
            hostile.setsockopt(zmq.XPUB_VERBOSE, 1)
            hostile.connect(endpoint)
            assert hostile.poll(30_000), "the broker greets"
            hostile.recv()
            hostile.send_multipart([UPDATE[0], UPDATE[1], bytes(MESSAGE_BYTES + 1)])
            assert hostile.poll(30_000), "the connection is cut, and made anew"
            hostile.close(0)
        clients.works()
        assert not clients.dropped("bulk")


def test_a_receiver_that_sends_other_things_than_subscriptions_changes_nothing_for_others(clients: BrokerClients) -> None:
    subscriptions = clients.broker.counters()["bulk"]["subscriptions"]
    with context() as made:
        strange, endless = made.socket(zmq.XSUB), made.socket(zmq.XSUB)
        for peer in (strange, endless):
            peer.connect(clients.address.bulk_out)
        endless.send(b"\x01" + b"x" * 2000)  # no topic is so long: its connection is cut each time
        for frame in (b"\x02not a subscription", b"", b"\x00never subscribed", b"\x01run/fragment/"):
            strange.send(frame)
        wait_for(lambda: clients.up["bulk"].send(update()) and strange.poll(50), "the strange one is served all the same")
    wait_for(lambda: not take_all(clients.down["bulk"]) and not clients.down["bulk"].socket.poll(50), "updates are through")
    clients.works()
    wait_for(lambda: clients.broker.counters()["bulk"]["subscriptions"] == subscriptions, "who leaves is not counted")


RAW: dict[str, bytes] = {
    "random bytes": bytes((i * 7919 + i // 251) % 256 for i in range(100_000)),
    "zeros": bytes(100_000),
    "a web request": b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n",
    "half a greeting": b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03",
    "a greeting with an unknown mechanism": b"\xff" + bytes(8) + b"\x7f\x03\x00NOBODY" + bytes(46),
    "a greeting, then noise": b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + bytes(range(256)) * 20,
    "a frame said to have 2^63 bytes": b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + b"\x02" + b"\x7f" * 8,
    "the oldest protocol, a frame said to have 2^63 bytes": b"\x01\x00\xff" + struct.pack(">Q", 2**63),
    "the oldest protocol, a small message": b"\x01\x00" + b"\x05\x01hell" + b"\x03\x00ab",
}


def test_raw_bytes_to_any_port_are_survived_and_half_open_connections_too(clients: BrokerClients) -> None:
    kept = []
    for endpoint in range(clients.address.port, clients.address.port + 4):
        for octets in RAW.values():
            peer = network.create_connection((clients.address.host, endpoint), timeout=30)
            kept.append(peer)
            try:
                peer.sendall(octets)
            except OSError:
                continue  # cut off already: as good an answer as silence
    clients.works()
    for peer in kept:
        peer.close()
    clients.works()


def test_a_flood_of_bad_messages_is_told_in_one_line_a_second(capfd: pytest.CaptureFixture[str]) -> None:
    with broker_here() as (broker, address), context() as made:
        up = uplink(made, address.control_in, hwm_messages=20_000)
        began = time.monotonic()
        for _ in range(5_000):
            up.socket.send_multipart([b"nonsense\nbroker_ready", b""])
        wait_for(lambda: broker.counters()["control"]["dropped"].get("topic") == 5_000, "all are counted")
        seconds = time.monotonic() - began
    lines = [line for line in capfd.readouterr().err.splitlines() if "messages_dropped" in line]
    assert len(lines) <= seconds + 2
    assert not any("nonsense" in line for line in lines), "what a stranger wrote is not repeated"


# --- kills, and those who stop ---------------------------------------------------------------------------------------
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
            before = broker.resident_bytes()
            arrived = 0
            for slot in range(messages):  # at most four are on their way, as a syncer's window would have it
                wait_for(lambda slot=slot: up.send(update(slot=slot, payload=chunk)), "the broker takes it")  # type: ignore[misc]
                while slot + 1 - arrived >= 4:
                    healthy.socket.poll(1000)
                    arrived += len(take_all(healthy))
            wait_for(lambda: not take_all(healthy) and not healthy.socket.poll(50), "the last ones are through")
            grown = broker.resident_bytes() - before
            assert healthy.gaps == 0, "others lost nothing"
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


# --- starting and stopping -------------------------------------------------------------------------------------------
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


def test_a_second_broker_on_the_same_ports_is_refused_and_the_first_goes_on(clients: BrokerClients) -> None:
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
