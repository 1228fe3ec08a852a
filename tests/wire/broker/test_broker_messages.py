"""Which messages pass the broker."""

from __future__ import annotations

import socket as network
import struct
import time
from dataclasses import replace

import pytest
import zmq
from broker_clients import BrokerClients
from decoupled_diloco.broker.acl import topic_pattern
from decoupled_diloco.common.config import MESSAGE_BYTES
from decoupled_diloco.common.wire import (
    BOTH_PLANES,
    MESSAGES,
    Call,
    Fetch,
    Message,
    Plane,
    encode,
    prefix,
)
from transport import (
    broker_here,
    context,
    downlink,
    meet,
    take_all,
    update,
    uplink,
)
from waiting import wait_for


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


def test_every_subscriber_that_wants_a_message_gets_it_and_several_senders_share_a_plane(
    clients: BrokerClients,
) -> None:
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


def test_a_frame_above_the_largest_message_is_refused_and_the_broker_continues(clients: BrokerClients) -> None:
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


def test_a_receiver_that_sends_other_things_than_subscriptions_changes_nothing_for_others(
    clients: BrokerClients,
) -> None:
    subscriptions = clients.broker.counters()["bulk"]["subscriptions"]
    with context() as made:
        strange, endless = made.socket(zmq.XSUB), made.socket(zmq.XSUB)
        for peer in (strange, endless):
            peer.connect(clients.address.bulk_out)
        endless.send(b"\x01" + b"x" * 2000)  # no topic is so long: its connection is cut each time
        for frame in (b"\x02not a subscription", b"", b"\x00never subscribed", b"\x01run/fragment/"):
            strange.send(frame)
        wait_for(
            lambda: clients.up["bulk"].send(update()) and strange.poll(50), "the strange one is served all the same"
        )
    wait_for(
        lambda: not take_all(clients.down["bulk"]) and not clients.down["bulk"].socket.poll(50), "updates are through"
    )
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


def test_a_flood_of_bad_messages_is_reported_in_one_line_a_second(capfd: pytest.CaptureFixture[str]) -> None:
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
