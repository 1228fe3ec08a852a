"""Final buffers: one learner is selected, and another one if it fails."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import pytest
from decoupled_diloco.common.config import CHUNK_BYTES
from decoupled_diloco.common.errors import Malformed
from decoupled_diloco.common.fragments import Layout, TensorSpec, balanced_plan
from decoupled_diloco.common.static_tensor_format import pack
from decoupled_diloco.common.wire import Buffers, split
from decoupled_diloco.syncer.checkpoint import Checkpoints
from decoupled_diloco.syncer.final_buffers import STALL_SECONDS, FinalBuffers, check
from decoupled_diloco.syncer.membership import SILENCE_SECONDS
from states import LAYOUT, PLAN, STATIC, advance, fresh, seeded, settings

LARGE = Layout(
    (
        TensorSpec(name="w", shape=(4,), dtype="float32"),
        TensorSpec(name="teacher", shape=(5, CHUNK_BYTES // 8), dtype="float32", kind="buffer"),
    )
)
MOVED = {1: bytes([0, 1, 0]), 2: (5).to_bytes(8, "little")}


def buffers(whole: bytes = pack(LAYOUT, MOVED), name: str = "a", **more: Any) -> Buffers:
    fields: dict[str, Any] = {
        "run": "tiny", "name": name, "incarnation": 1, "epoch": 3, "fragment": PLAN.static_index,
        "digest": hashlib.sha256(whole).hexdigest(), **split(whole)[0],
    }  # fmt: skip
    return Buffers(**(fields | more))


def offers(*names: str) -> FinalBuffers:
    made = FinalBuffers()
    for name in names:
        made.offer((name, 1), 2, 100.0)
    made.select_source(100.0)
    return made


def test_the_first_learner_that_offers_some_is_asked_and_stays_the_one() -> None:
    made = FinalBuffers()
    made.offer(("none", 1), 0, 100.0)
    made.offer(("unknown", 1), None, 100.0)
    made.select_source(100.0)
    assert made.source is None
    assert not made.settled, "one has not said yet"
    made.offer(("b", 1), 2, 100.1)
    made.offer(("a", 1), 2, 100.2)
    made.select_source(100.3)
    assert made.source == ("b", 1)
    taken = made.add_chunk(buffers(name="b"), PLAN, 3, 100.4)
    assert taken is not None
    assert {index: bytes(values) for index, values in check(PLAN, taken).items()} == MOVED
    assert not made.settled, "they are being checked and stored"
    made.select_source(100.4 + 2 * SILENCE_SECONDS)
    assert made.source == ("b", 1)
    made.record_check("", 100.5)
    assert made.held
    assert made.settled
    assert made.add_chunk(buffers(name="b"), PLAN, 3, 100.5) is None, "sent twice"


def test_a_learner_that_takes_its_offer_back_and_sends_nonsense_ends_nothing_but_its_turn() -> None:
    made = offers("a", "b")
    made.offer(("a", 1), 0, 100.1)
    with pytest.raises(Malformed, match="fragment"):
        made.add_chunk(buffers(name="a", fragment=0), PLAN, 3, 100.2)
    assert made.source == ("b", 1)


def test_a_learner_that_falls_silent_is_not_waited_for_and_the_next_one_is_asked() -> None:
    made = offers("a", "b")
    made.offer(("b", 1), 2, 100.0 + SILENCE_SECONDS)
    made.select_source(100.0 + SILENCE_SECONDS)
    assert made.source == ("b", 1)
    made.select_source(100.0 + 2 * SILENCE_SECONDS)
    assert made.source is None
    assert made.settled
    assert not made.held


def test_a_learner_that_offers_and_sends_nothing_new_is_replaced_and_two_of_them_do_not_hold_the_end() -> None:
    made, now, asked = offers("a", "b"), 100.0, []
    while not made.settled:
        now += 1.0
        for name in "ab":  # each goodbye is a sign of life, and an offer
            made.offer((name, 1), 2, now)
        made.select_source(now)
        asked += [made.source] if made.source not in asked else []
    assert asked == [("a", 1), ("b", 1), None]
    assert now == 100.0 + 2 * STALL_SECONDS
    assert not made.held
    assert made.failed == ["a sent nothing new for 8 s", "b sent nothing new for 8 s"]


def test_only_new_chunks_are_progress() -> None:
    made, plan = offers("a", "b"), balanced_plan(LARGE, 1)
    payload = pack(LARGE, {0: bytes(LARGE.static_bytes)})
    parts = [buffers(payload, fragment=plan.static_index, **part) for part in split(payload)]
    for chunk, now, source in ((0, 106.0, "a"), (1, 112.0, "a"), (1, 118.0, "a"), (0, 120.0, "b")):
        made.offer(("b", 1), 2, now)
        made.offer(("a", 1), 2, now)
        if made.source == ("a", 1) and source == "a":
            made.add_chunk(parts[chunk], plan, 3, now)
        made.select_source(now)
        assert made.source == (source, 1)


NAN = bytes(30)[:-2] + struct.pack("<H", 0x7FC0)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (buffers(pack(LAYOUT, {0: NAN})), "nonfinite"),
        (buffers(digest="0" * 64), "digest"),
        (buffers(b"\x02ab"), "size"),
        (buffers(b"\xff" + STATIC), "size"),
        (buffers(b"\x07" + STATIC + b"x"), "size"),
        (buffers(size=2**40, chunks=2**20), "size"),
        (buffers(fragment=0), "fragment"),
    ],
    ids=["nan", "digest", "short", "unknown tensors", "long", "huge", "fragment"],
)
def test_from_a_learner_that_sends_what_it_must_not_no_more_is_taken(wrong: Buffers, reason: str) -> None:
    made = offers("a", "b")
    with pytest.raises(Malformed, match=reason):  # noqa: PT012
        received = made.add_chunk(wrong, PLAN, 3, 100.0)
        assert received is not None
        try:
            check(PLAN, received)
        except Malformed as refused:
            made.record_check(str(refused), 100.0)
            raise
    assert made.source == ("b", 1)
    assert made.failed
    made.offer(("a", 1), 2, 100.1)
    with pytest.raises(Malformed, match="stranger"):
        made.add_chunk(buffers(), PLAN, 3, 100.1)
    assert made.add_chunk(buffers(name="b"), PLAN, 3, 100.2)


@pytest.mark.parametrize(
    ("more", "reason"), [({"name": "b"}, "stranger"), ({"incarnation": 2}, "stranger"), ({"epoch": 2}, "epoch")]
)
def test_a_learner_that_was_not_asked_changes_nothing(more: dict[str, Any], reason: str) -> None:
    made = offers("a", "b")
    with pytest.raises(Malformed, match=reason):
        made.add_chunk(buffers(**more), PLAN, 3, 100.0)
    assert made.source == ("a", 1)


def test_buffers_outlive_the_syncer_and_damaged_ones_are_reported(tmp_path: Path) -> None:
    with seeded(tmp_path) as store:
        state = fresh()
        advance(state)
        store.save(state.snapshot(), {})
        store.write_buffers(LAYOUT, "a", {1: b"\0\0\0"})
        store.write_buffers(LAYOUT, "b", MOVED)
    restored = Checkpoints(tmp_path).restore(settings())
    assert restored is not None
    assert restored.state.static == STATIC[:30] + MOVED[1] + MOVED[2]
    assert restored.state.static_origin is not None
    assert (restored.state.static_origin.learner, restored.state.static_origin.names) == ("b", ("mask", "count"))
    [place] = tmp_path.glob("buffers-*")
    (place / "state.json").write_text("{}")
    restored = Checkpoints(tmp_path).restore(settings())
    assert restored is not None
    assert restored.state.static == STATIC
    assert "those of version 0 are used instead" in restored.warnings[0]
