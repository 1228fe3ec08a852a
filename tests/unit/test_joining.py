"""What a Hello is answered before and after version 0 is there. Time is passed in; nothing is sent."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import pytest
from decoupled_diloco.common.codec import digest
from decoupled_diloco.common.config import RunSettings
from decoupled_diloco.common.errors import Malformed
from decoupled_diloco.common.fragments import Layout, TensorSpec
from decoupled_diloco.common.wire import Hello, Seed, split
from decoupled_diloco.syncer.joining import STUCK_SECONDS, Joining, layout_of, most_members, plan_for
from decoupled_diloco.syncer.members import SILENCE_SECONDS, Members

SETTINGS = RunSettings(run="run", fragments=1, overlap=1)


def layout(*shape: int) -> Layout:
    return Layout((TensorSpec(name="a", shape=shape, dtype="float32"),))


def hello(name: str, model: Layout, **more: Any) -> Hello:
    fields: dict[str, Any] = {"role": "learner", "bulk_proven": True, "payload": msgpack.packb(model.to_wire())}
    return Hello(run="run", name=name, incarnation=1, fingerprint=model.fingerprint, **(fields | more))


def seed(name: str, payload: bytes, fragment: int = 0) -> Seed:
    return Seed(run="run", name=name, incarnation=1, epoch=1, fragment=fragment, digest=digest(payload),
                **split(payload)[0])  # fmt: skip


def test_a_model_that_this_machine_cannot_hold_is_refused_and_the_next_learner_is_chosen() -> None:
    joining = Joining(SETTINGS)
    reply = joining.reply(hello("a", layout(2**40)), Members(), 0.0)
    assert reply.verdict == "refused"
    assert "memory" in reply.reason
    assert joining.reply(hello("b", layout(100)), Members(), 0.0).verdict == "seed"


def test_no_more_learners_are_let_in_than_messages_can_name_and_those_who_are_in_stay() -> None:
    model = layout(100)
    joining, members = Joining(SETTINGS, plan_for(model, SETTINGS)), Members()
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


def test_one_learner_is_chosen_to_seed_until_it_falls_silent() -> None:
    joining, model = Joining(SETTINGS), layout(100)
    assert joining.reply(hello("a", model), Members(), 0.0).missing == (0, 1)
    assert joining.reply(hello("b", model), Members(), SILENCE_SECONDS - 0.1).verdict == "wait"
    assert joining.seed(seed("a", bytes(512)), SILENCE_SECONDS - 0.1) is None
    assert joining.reply(hello("b", model), Members(), SILENCE_SECONDS).verdict == "wait", "a chunk is a sign of life"
    assert joining.reply(hello("b", model), Members(), 2 * SILENCE_SECONDS).missing == (0, 1)
    with pytest.raises(Malformed, match="stranger"):
        joining.seed(seed("a", bytes(512)), 2 * SILENCE_SECONDS)
    assert joining.seed(seed("b", bytes(512)), 2 * SILENCE_SECONDS) is None
    assert joining.seed(seed("b", b"", fragment=1), 2 * SILENCE_SECONDS) is not None


def test_who_is_chosen_to_seed_and_only_says_hello_gives_way_to_another_for_good() -> None:
    joining, model = Joining(SETTINGS), layout(100)
    now = 0.0
    while now < STUCK_SECONDS:
        assert joining.reply(hello("a", model), Members(), now).verdict == "seed"
        now += 1.0
    reply = joining.reply(hello("a", model), Members(), now)
    assert reply.verdict == "wait"
    assert "somebody else" in reply.reason
    assert joining.reply(hello("b", model), Members(), now).verdict == "seed"
    assert joining.reply(hello("a", model), Members(), now + 2 * SILENCE_SECONDS).verdict == "wait"
    assert joining.reply(hello("b", model), Members(), now + 2 * SILENCE_SECONDS).verdict == "seed"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 200_000,
        b"\xdd\xff\xff\xff\xff",
        (b"\xdd" + (10**6).to_bytes(4, "big")) * 200_000,
        (b"\xdf" + (10**5).to_bytes(4, "big")) * 200_000,
        b"\xdd" + (2**20).to_bytes(4, "big") + b"\x90" * 2**20,
    ],
    ids=["empty", "no-msgpack", "nested", "vast", "nested-vast", "nested-maps", "many-empty-rows"],
)
def test_a_hello_whose_layout_is_none_takes_no_memory_beyond_the_message(payload: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Malformed, match="layout"):
            layout_of(hello("a", layout(100), payload=payload))
        assert tracemalloc.get_traced_memory()[1] < 2 * len(payload) + 2**20
    finally:
        tracemalloc.stop()
