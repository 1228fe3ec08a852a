"""What a Hello is answered before and after version 0 is there. Time is passed in; nothing is sent."""

from __future__ import annotations

import tracemalloc
import zlib
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from decoupled_diloco.common import wire
from decoupled_diloco.common.codec import digest
from decoupled_diloco.common.config import MAX_TENSORS, MESSAGE_BYTES, RunSettings
from decoupled_diloco.common.errors import Malformed
from decoupled_diloco.common.fragments import Layout, TensorSpec
from decoupled_diloco.common.wire import Hello, Seed, pack_layout, split, unpack_layout
from decoupled_diloco.syncer.admission import STUCK_SECONDS, Admission, layout_of, most_members, plan_for
from decoupled_diloco.syncer.membership import SILENCE_SECONDS, Membership

SETTINGS = RunSettings(run="run", fragments=1, overlap=1)


def layout(*shape: int) -> Layout:
    return Layout((TensorSpec(name="a", shape=shape, dtype="float32"),))


def hello(name: str, model: Layout, **more: Any) -> Hello:
    fields: dict[str, Any] = {"role": "learner", "bulk_proven": True, "payload": pack_layout(model)}
    return Hello(run="run", name=name, fingerprint=model.fingerprint, **(fields | {"incarnation": 1} | more))


def seed(name: str, payload: bytes, fragment: int = 0) -> Seed:
    return Seed(run="run", name=name, incarnation=1, epoch=1, fragment=fragment, digest=digest(payload),
                **split(payload)[0])  # fmt: skip


def test_a_model_that_this_machine_cannot_hold_is_refused_and_the_next_learner_is_chosen() -> None:
    joining = Admission(SETTINGS)
    reply = joining.reply(hello("a", layout(2**40)), Membership(), 0.0)
    assert reply.verdict == "refused"
    assert "memory" in reply.reason
    assert joining.reply(hello("b", layout(100)), Membership(), 0.0).verdict == "seed"


def test_no_more_learners_are_let_in_than_messages_can_name_and_those_who_are_in_stay() -> None:
    model = layout(100)
    joining, members = Admission(SETTINGS, plan_for(model, SETTINGS)), Membership()
    most = most_members(1, 1)
    assert 500 < most < 1000
    for number in range(most):
        members.join(f"n{number}", 1, 0.0)
    reply = joining.reply(hello("late", model), members, 0.0)
    assert reply.verdict == "refused"
    assert f"the run has {most} learners, as many as its messages can name" in reply.reason
    assert joining.reply(hello("n0", model), members, 0.0).verdict == "welcome"
    members.leave(("n1", 1))
    assert joining.reply(hello("late", model), members, 0.0).verdict == "welcome"


def test_after_the_end_a_name_is_held_as_long_as_its_learner_is_heard() -> None:
    model = layout(100)
    joining, members = Admission(SETTINGS, plan_for(model, SETTINGS)), Membership()
    joining.finished = True
    members.join("a", 1, 0.0)
    assert joining.reply(hello("a", model), members, 1.0).verdict == "finished"
    assert joining.reply(hello("a", model, role="observer", incarnation=2), members, 1.0).verdict == "finished"
    assert joining.reply(hello("a", model, incarnation=2), members, 1.0).verdict == "wait"
    assert joining.reply(hello("a", model, incarnation=2), members, SILENCE_SECONDS).verdict == "finished"


def test_one_learner_is_chosen_to_seed_until_it_falls_silent() -> None:
    joining, model = Admission(SETTINGS), layout(100)
    assert joining.reply(hello("a", model), Membership(), 0.0).missing == (0, 1)
    assert joining.reply(hello("b", model), Membership(), SILENCE_SECONDS - 0.1).verdict == "wait"
    assert joining.seed(seed("a", bytes(512)), SILENCE_SECONDS - 0.1) is None
    assert joining.reply(hello("b", model), Membership(), SILENCE_SECONDS).verdict == "wait", (
        "a chunk is a sign of life"
    )
    assert joining.reply(hello("b", model), Membership(), 2 * SILENCE_SECONDS).missing == (0, 1)
    with pytest.raises(Malformed, match="stranger"):
        joining.seed(seed("a", bytes(512)), 2 * SILENCE_SECONDS)
    assert joining.seed(seed("b", bytes(512)), 2 * SILENCE_SECONDS) is None
    assert joining.seed(seed("b", b"", fragment=1), 2 * SILENCE_SECONDS) is not None


def test_a_learner_that_is_chosen_to_seed_and_only_says_hello_gives_way_to_another_for_good() -> None:
    joining, model = Admission(SETTINGS), layout(100)
    now = 0.0
    while now < STUCK_SECONDS:
        assert joining.reply(hello("a", model), Membership(), now).verdict == "seed"
        now += 1.0
    reply = joining.reply(hello("a", model), Membership(), now)
    assert reply.verdict == "wait"
    assert "another learner" in reply.reason
    assert joining.reply(hello("b", model), Membership(), now).verdict == "seed"
    assert joining.reply(hello("a", model), Membership(), now + 2 * SILENCE_SECONDS).verdict == "wait"
    assert joining.reply(hello("b", model), Membership(), now + 2 * SILENCE_SECONDS).verdict == "seed"


ROWS = b"".join(msgpack.packb(row) for row in layout(100).to_wire())
HOSTILE = {
    "empty": b"",
    "no msgpack": b"\xc1",
    "nested": b"\x91" * 200_000,
    "vast": b"\xdd\xff\xff\xff\xff",
    "nested and vast": (b"\xdd" + (10**6).to_bytes(4, "big")) * 200_000,
    "nested and large": (b"\xdc" + (1000).to_bytes(2, "big")) * 200_000,
    "nested maps": (b"\xdf" + (10**5).to_bytes(4, "big")) * 200_000,
    "many empty rows": b"\x90" * 2**20,
    "a row of many": b"\xdc"
    + (1024).to_bytes(2, "big")
    + (b"\xdc" + (1024).to_bytes(2, "big") + b"\x90" * 1024) * 1024,
    "a long name": b"\xdb" + (10**8).to_bytes(4, "big") + b"x" * 10**8,
    "a name twice": ROWS * 2,
    "half a row": ROWS[:-1],
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("what", HOSTILE)
def test_a_hello_whose_layout_is_none_takes_no_memory_beyond_the_message(what: str, packed: bool) -> None:
    payload = zlib.compress(HOSTILE[what]) if packed else HOSTILE[what][: 2**20]
    tracemalloc.start()
    try:
        with pytest.raises(Malformed, match="layout"):
            layout_of(hello("a", layout(100), payload=payload))
        assert tracemalloc.get_traced_memory()[1] < 2 * len(payload) + 16 * 2**20
    finally:
        tracemalloc.stop()


def test_a_layout_has_room_for_as_many_tensors_as_are_promised() -> None:
    row, count = layout(100).tensors[0], MAX_TENSORS // 10
    many = Layout(tuple(replace(row, name=f"blocks.{i}.attention.query.weight") for i in range(count)))
    packed = pack_layout(many)
    assert len(packed) < MESSAGE_BYTES // 20
    assert unpack_layout(packed) == many


def test_a_layout_of_more_tensors_is_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_TENSORS", 5)
    with pytest.raises(Malformed, match="more than 5 tensors"):
        unpack_layout(zlib.compress(ROWS * 6))


def test_a_small_message_that_inflates_to_a_vast_layout_is_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LAYOUT_BYTES", 2 * wire.LAYOUT_STEP_BYTES)
    rows = [[f"{number}." + "n" * 500, [1], "float32", "trainable", "rda", []] for number in range(100)]
    payload = zlib.compress(b"".join(msgpack.packb(row) for row in rows))
    assert len(payload) < 1500
    with pytest.raises(Malformed, match="its names and shapes take more than 32768 bytes"):
        unpack_layout(payload)


def test_what_follows_a_layout_is_malformed() -> None:
    packed = pack_layout(layout(100))
    for odd in (packed + b"x", packed[:-1], zlib.compress(ROWS + b"\x91"), zlib.compress(ROWS + b"\xc0")):
        with pytest.raises(Malformed, match="layout"):
            unpack_layout(odd)
