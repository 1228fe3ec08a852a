"""What sockets deliver: first and last messages, order, gaps, invalid frames."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import zmq
from decoupled_diloco.common import sockets
from decoupled_diloco.common.config import MESSAGE_BYTES
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.common.sockets import Address, Context, PublishSocket, Waker
from decoupled_diloco.common.wire import Alive, Beat, Hello, Message, Update, Welcome, beat_topic, encode, prefix
from transport import BrokerChild, broker_here, context, downlink, free_ports, meet, next_of, take_all, update, uplink
from waiting import wait_for


def alive(name: str = "node1", incarnation: int = 1, **changed: Any) -> Alive:
    rows: dict[str, Any] = {
        "run": "run", "name": name, "incarnation": incarnation, "epoch": 1, "local_steps": 0, "tokens": 0,
        "step_seconds": 0.0, "last_step_age_seconds": 0.0, "inner_seconds": 0.0, "session_seconds": 0.0,
        "since_first_step_seconds": 0.0, **changed,
    }  # fmt: skip
    return Alive(**rows)


def test_the_first_message_of_each_of_twenty_fresh_uplinks_arrives_even_if_its_sender_leaves_at_once() -> None:
    with broker_here() as (_, address), context() as made:
        down = downlink(made, address.control_out, prefix("run", "alive"))
        trial = uplink(made, address.control_in)
        meet(trial, down, alive("trial"))
        for i in range(20):
            own: Context = zmq.Context()
            link = uplink(own, address.control_in)
            assert link.send(alive(f"n{i}"))
            link.close()
            own.term()
        arrived: list[Message] = []
        wait_for(lambda: len(take_all(down, arrived)) >= 20, "the first message of each is there")
        assert [message.name for message in arrived] == [f"n{i}" for i in range(20)]  # type: ignore[attr-defined]


def test_what_was_sent_just_before_closing_still_goes_out() -> None:
    with BrokerChild() as broker, context() as made:
        down = downlink(made, broker.address.bulk_out, prefix("run", "fragment"))
        own: Context = zmq.Context()
        link = uplink(own, broker.address.bulk_in)
        meet(link, down, update())
        broker.stop_in_its_tracks()  # so that much of it still waits in the uplink when that is closed
        for slot in range(24):
            assert link.send(update(slot=slot, payload=bytes(2**20)))
        link.close()
        closing = threading.Thread(target=own.term, daemon=True)
        closing.start()
        broker.go_on()
        arrived: list[Message] = []
        wait_for(lambda: len(take_all(down, arrived)) >= 24, "all of it arrives")
        closing.join(30)
        assert not closing.is_alive()


def test_nothing_is_sent_or_numbered_while_no_broker_listens() -> None:
    with context() as made:
        address = Address("127.0.0.1", free_ports())
        up, down = (
            PublishSocket(made, address.bulk_in, hwm_messages=10),
            downlink(made, address.bulk_out, prefix("run", "fragment")),
        )
        assert not up.proven
        assert not any(up.send(update()) for _ in range(100))
        assert up.bytes_sent == 0
        assert down.receive() is None


def test_closing_without_a_broker_does_not_wait_for_it() -> None:
    made: Context = zmq.Context()
    address = Address("127.0.0.1", free_ports())
    up, down = PublishSocket(made, address.bulk_in, hwm_messages=10), downlink(made, address.bulk_out, b"run/")
    up.send(update())
    ended = threading.Event()

    def close() -> None:
        up.close()
        down.close()
        made.term()
        ended.set()

    threading.Thread(target=close, daemon=True).start()
    assert ended.wait(10), "closing hangs on an absent broker"


def test_closing_with_a_broker_that_stopped_reading_ends_after_the_linger_time() -> None:
    with BrokerChild() as broker:
        made: Context = zmq.Context()
        up = uplink(made, broker.address.bulk_in, hwm_messages=8)
        broker.stop_in_its_tracks()
        wait_for(lambda: not up.send(update(payload=bytes(2**20))), "the water mark is reached")
        ended = threading.Event()

        def close() -> None:
            up.close()
            made.term()
            ended.set()

        threading.Thread(target=close, daemon=True).start()
        assert ended.wait(20), "closing hangs on a broker that does not read"


def test_a_full_queue_says_no_and_loses_nothing_of_what_it_took() -> None:
    with BrokerChild() as broker, context() as made:
        down = downlink(made, broker.address.bulk_out, prefix("run", "fragment"))
        up = uplink(made, broker.address.bulk_in, hwm_messages=8)
        meet(up, down, update())
        broker.stop_in_its_tracks()
        taken = 0
        while up.send(update(slot=taken + 1, payload=bytes(2**20))):
            taken += 1
            assert taken < 100, "a stopped broker must not let the sender's queue grow without bound"
        broker.go_on()
        arrived: list[Message] = []
        wait_for(lambda: len(take_all(down, arrived)) >= taken, "all that was taken arrives")
        assert [message.slot for message in arrived] == list(range(1, taken + 1))  # type: ignore[attr-defined]
        assert down.gaps == 0


@pytest.mark.parametrize("view", ["writable", "read-only"])
def test_what_was_sent_is_the_buffer_as_it_was_then_whatever_is_written_into_it_later(view: str) -> None:
    with BrokerChild() as broker, context() as made:
        down = downlink(made, broker.address.bulk_out, prefix("run", "fragment"))
        up = uplink(made, broker.address.bulk_in)
        meet(up, down, update())
        scratch = bytearray(b"\x01" * 2**20)
        window = memoryview(scratch) if view == "writable" else memoryview(scratch).toreadonly()
        broker.stop_in_its_tracks()
        sent = 0
        for slot in range(12):  # more than the system's own buffers hold, so that some wait in the uplink's queue
            sent += up.send(update(slot=slot, payload=window))
            scratch[:] = bytes([slot + 2]) * 2**20
        broker.go_on()
        arrived: list[Message] = []
        wait_for(lambda: len(take_all(down, arrived)) >= sent, "everything arrives", 30)
        assert not down.rejected, "checksums hold"
        for message in arrived:
            assert isinstance(message, Update)
            assert bytes(message.payload) == bytes([message.slot + 1]) * 2**20


def test_a_large_immutable_payload_and_an_empty_one_arrive_whole() -> None:
    with broker_here() as (_, address), context() as made:
        down = downlink(made, address.bulk_out, prefix("run", "fragment"))
        up = uplink(made, address.bulk_in)
        meet(up, down, update())
        for payload in (bytes(range(256)) * 4096, memoryview(b"x" * 200_000)[7:], b""):
            assert up.send(update(payload=payload))
            message = next_of(down)
            assert isinstance(message, Update)
            assert message.payload == payload


def test_bytes_are_counted_at_both_ends() -> None:
    with broker_here() as (broker, address), context() as made:
        down = downlink(made, address.bulk_out, b"")
        up = uplink(made, address.bulk_in)
        meet(up, down, update())
        assert up.send(update(payload=bytes(100_000)))
        next_of(down)
        assert 100_000 < down.bytes_received <= up.bytes_sent
        assert broker.counters()["bulk"]["bytes"] == up.bytes_sent


def test_a_message_that_no_socket_would_take_is_refused_by_its_sender() -> None:
    with broker_here() as (_, address), context() as made:
        down = downlink(made, address.control_out, prefix("run", "hello"))
        up = uplink(made, address.control_in)
        hello = Hello(run="run", name="a", incarnation=1, role="learner", fingerprint="", bulk_proven=True)
        meet(up, down, hello)
        with pytest.raises(SettingError, match=r"hello of [0-9]+ bytes"):
            up.send(replace(hello, payload=bytes(MESSAGE_BYTES)))
        assert up.send(replace(hello, payload=bytes(2**20)))
        message = next_of(down, "a large layout passes")
        assert isinstance(message, Hello)
        assert len(message.payload) == 2**20


def test_a_run_a_fragment_or_a_learner_never_receives_what_another_with_a_longer_name_is_sent() -> None:
    with broker_here() as (_, address), context() as made:
        bulk = downlink(made, address.bulk_out, prefix("a", "fragment", 1))
        control = downlink(made, address.control_out, prefix("a", "welcome", "node1"), beat_topic("a"))
        up_bulk, up_control = uplink(made, address.bulk_in), uplink(made, address.control_in)
        answer = Welcome(run="a", name="node1", incarnation=1, epoch=1, verdict="welcome")
        meet(up_bulk, bulk, update(run="a", fragment=1))
        meet(up_control, control, answer)
        beat = Beat(run="a", epoch=1, state="running", t=1, steps=2, step_seconds=0, syncer=1)
        for strange in (
            update(run="a2", fragment=1), update(run="a", fragment=10), update(run="a-a", fragment=1),
        ):  # fmt: skip
            assert up_bulk.send(strange)
        for other in (
            replace(answer, name="node10"), replace(answer, run="a2"), replace(beat, run="a2"), replace(beat, run="a1"),
        ):  # fmt: skip
            assert up_control.send(other)
        assert up_bulk.send(update(run="a", fragment=1, slot=77))
        assert up_control.send(beat)
        assert next_of(bulk).slot == 77, "the first that comes is our own"  # type: ignore[attr-defined]
        heard = next_of(control)
        assert isinstance(heard, Beat)
        assert heard.run == "a"
        assert not bulk.rejected
        assert not control.rejected


def test_after_unsubscribing_nothing_more_comes() -> None:
    with broker_here() as (_, address), context() as made:
        down = downlink(made, address.bulk_out, prefix("run", "fragment"), prefix("run", "keyframe"))
        up = uplink(made, address.bulk_in)
        meet(up, down, update())
        down.unsubscribe(prefix("run", "fragment"))
        assert up.send(update())
        end = update(run="run", fragment=4)
        down.subscribe(prefix("run", "fragment", 4))
        wait_for(lambda: up.send(end) and down.socket.poll(50), "the other subscription is there")
        assert {message.fragment for message in take_all(down)} == {4}  # type: ignore[attr-defined]


def test_messages_are_numbered_kind_by_kind_and_answers_to_one_are_not() -> None:
    with broker_here() as (_, address), context() as made:
        down = downlink(made, address.control_out, b"")
        up = uplink(made, address.control_in)
        welcome = Welcome(run="run", name="a", incarnation=1, epoch=1, verdict="wait")
        hello = Hello(run="run", name="a", incarnation=1, role="observer", fingerprint="", bulk_proven=True)
        meet(up, down, welcome)
        for message in (alive(), hello, alive(), welcome, alive(sequence=99), hello):
            assert up.send(message)
        arrived: list[Message] = []
        wait_for(lambda: len(take_all(down, arrived)) >= 6, "all arrive")
        numbers = [(message.KIND, message.sequence) for message in arrived]
        assert numbers == [("alive", 1), ("hello", 1), ("alive", 2), ("welcome", 0), ("alive", 3), ("hello", 2)]
        assert down.gaps == 0


def test_gaps_are_counted_for_each_sender_life_and_kind_apart() -> None:
    with context() as made:
        down = downlink(made, "tcp://127.0.0.1:1", b"")
        for message in (
            alive(sequence=5), alive(sequence=6), alive(sequence=9),          # two are missing
            alive("b", sequence=1), alive("b", sequence=3),                   # one
            alive(incarnation=2, sequence=1), alive(incarnation=2, sequence=2),  # a new life counts anew
            update(sequence=40), update(sequence=41), update(epoch=2, sequence=1), update(epoch=2, sequence=2),
            update(sequence=42), alive(sequence=9), alive(sequence=7), alive(sequence=10),  # repeated ones: nothing
            alive(sequence=0), alive(sequence=11),
        ):  # fmt: skip
            down._count_gap(message)
        assert down.gaps == 3


def test_senders_with_invented_names_and_numbers_cost_a_receiver_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "SENDERS_REMEMBERED", 50)
    with context() as made:
        down = downlink(made, "tcp://127.0.0.1:1", b"")
        for i in range(500):
            down._count_gap(alive(f"n{i}", sequence=1))
            down._count_gap(alive("steady", sequence=i + 1))
        assert len(down._newest) <= 50
        assert down.gaps == 0, "who is heard all the time is remembered"
        down._count_gap(alive("steady", sequence=2**53))
        down._count_gap(alive("n499", sequence=2**53))
        assert down.gaps <= 2**53, "our own reports of it must stay sendable"


def test_malformed_messages_are_counted_by_reason_reported_and_skipped() -> None:
    told: list[tuple[bytes, str]] = []
    with broker_here() as (_, address), context() as made:
        down = downlink(
            made, address.bulk_out, b"", on_malformed=lambda topic, wrong: told.append((topic, wrong.reason))
        )
        up = uplink(made, address.bulk_in)
        meet(up, down, update())
        topic, header, _ = (bytes(frame) for frame in encode(update()))
        for frames in (
            [topic, b"noise", b""],
            [topic, header],
            [topic, header, b"another payload"],
            [topic, header, b"PAYLOAD"],
            [topic.replace(b"/3/", b"/4/"), header, b"payload"],
            [topic, msgpack.packb(msgpack.unpackb(header) | {"protocol": 99}), b"payload"],
        ):
            up.socket.send_multipart(frames)
        assert up.send(update(slot=7))
        assert next_of(down).slot == 7  # type: ignore[attr-defined]
        assert down.rejected == {"header": 1, "frames": 1, "chunk": 1, "checksum": 1, "topic": 1, "protocol": 1}
        assert [reason for _, reason in told] == ["header", "frames", "chunk", "checksum", "topic", "protocol"]
        assert told[0][0] == topic


def test_a_flood_of_malformed_messages_does_not_hold_the_receiver() -> None:
    with broker_here() as (_, address), context() as made:
        down = downlink(made, address.bulk_out, b"", hwm_messages=10_000)
        up = uplink(made, address.bulk_in, hwm_messages=10_000)
        meet(up, down, update())
        for _ in range(200):
            up.socket.send_multipart([b"run/fragment/3/", b"", b""])
        wait_for(lambda: down.socket.poll(10), "the flood begins")
        calls = 0
        while down.rejected.total() < 200:
            before = down.rejected.total()
            assert down.receive() is None
            assert down.rejected.total() - before <= sockets.REJECTED_A_CALL
            calls += 1
            wait_for(lambda: down.rejected.total() == 200 or down.socket.poll(10), "the rest arrives")
        assert calls >= 200 / sockets.REJECTED_A_CALL


def test_a_waker_wakes_a_poller_of_another_thread_and_never_blocks() -> None:
    waker = Waker()
    poller = zmq.Poller()
    poller.register(waker.socket, zmq.POLLIN)
    assert not poller.poll(0)
    threading.Thread(target=waker.wake).start()
    assert poller.poll(30_000)
    for _ in range(100_000):  # more than any pipe holds
        waker.wake()
    waker.clear()
    assert not poller.poll(0)
    waker.close()
    waker.wake()
