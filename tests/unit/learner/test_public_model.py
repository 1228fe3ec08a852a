"""Following the public model: updates, gaps, keyframes, and what is asked for. No socket and no clock is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decoupled_diloco.common.codec import digest, encode_step
from decoupled_diloco.common.errors import Malformed
from decoupled_diloco.common.fragments import Layout, Plan, TensorSpec, balanced_plan
from decoupled_diloco.common.wire import Keyframe, Update, split
from decoupled_diloco.learner.public_model import (
    GAP_SECONDS,
    RETRY_SECONDS,
    UPDATE_TRIES,
    PublicFragment,
    PublicModel,
    Request,
)
from torch import Tensor

CHUNK = 2**20 // 4
"""Elements of a chunk of a keyframe."""
BIG = 20 * CHUNK
"""Elements of the first fragment: 20 chunks as a keyframe, more than may be in flight."""


def plan_of(*sizes: int) -> Plan:
    layout = Layout(tuple(TensorSpec(name=f"t{i}", shape=(n,), dtype="float32") for i, n in enumerate(sizes)))
    return balanced_plan(layout, len(sizes))


class Source:
    """The syncer's side of one fragment: its versions, and the messages that carry them."""

    def __init__(self, plan: Plan, fragment: int = 0, *, codec: str = "f32", version: int = 5) -> None:
        self.codec, self.fragment, self.version = codec, fragment, version
        self.public = torch.randn(plan.fragments[fragment].length)

    def keyframe(self, version: int | None = None, *, epoch: int = 1) -> list[Keyframe]:
        content = self.public.numpy().data.cast("B")
        return [
            Keyframe(
                run="r", epoch=epoch, t=0, fragment=self.fragment, digest=digest(content),
                version=self.version if version is None else version, **part,
            )
            for part in split(content)
        ]  # fmt: skip

    def update(self) -> list[Update]:
        payload, self.public = encode_step(self.codec, self.public, self.public + torch.randn(len(self.public)))
        self.version += 1
        return [
            Update(
                run="r", epoch=1, slot=0, t=0, fragment=self.fragment, version=self.version,
                base_version=self.version - 1, codec=self.codec, digest=digest(self.public),
                contributors=(("a", 1, 2, 3),), **part,
            )
            for part in split(payload.numpy().data)
        ]  # fmt: skip


def follower_of(plan: Plan, codec: str = "f32") -> PublicModel:
    return PublicModel(plan, codec, epoch=1)


def joined(source: Source, plan: Plan, now: float = 0.0) -> PublicModel:
    """A follower that holds all that the source has; the other fragments are at version 0 of zeros."""
    follower = follower_of(plan, source.codec)
    list(follower.requests(now))
    for chunk in source.keyframe():
        follower.take_keyframe(chunk, now)
    for other in range(plan.P):
        if other != source.fragment:
            zeros = Source(plan, other, version=0)
            zeros.public = torch.zeros(plan.fragments[other].length)
            for chunk in zeros.keyframe():
                follower.take_keyframe(chunk, now)
    assert follower.complete
    return follower


def held(follower: PublicModel, fragment: int = 0) -> tuple[int, Tensor]:
    public = follower.held[fragment]
    assert public is not None
    return public.version, public.vector


def asked(follower: PublicModel, now: float) -> list[Request]:
    return list(follower.requests(now))


# --- joining ---------------------------------------------------------------------------------------------------------
def test_a_joiner_asks_for_every_fragment_and_is_complete_when_all_are_here() -> None:
    plan = plan_of(300, 200)
    follower, sources = follower_of(plan), [Source(plan, 0), Source(plan, 1)]
    follower.note_versions((5, 5), 0.0)
    assert asked(follower, 0.0) == [Request("keyframe", 0, 5, (0,)), Request("keyframe", 1, 5, (0,))]
    assert follower.take_keyframe(sources[0].keyframe()[0], 0.1) is not None
    assert not follower.complete
    follower.take_keyframe(sources[1].keyframe()[0], 0.1)
    assert follower.complete
    assert not follower.wants_keyframes
    assert asked(follower, 9.0) == []


def test_no_more_than_sixteen_chunks_are_in_flight_over_all_fragments() -> None:
    plan = plan_of(BIG, 300)
    follower, source = follower_of(plan), Source(plan)
    assert [len(r.chunks) for r in asked(follower, 0.0)] == [16]
    assert asked(follower, 0.1) == []
    chunks = source.keyframe()
    follower.take_keyframe(chunks[3], 0.2)
    follower.take_keyframe(chunks[7], 0.2)
    assert asked(follower, 0.2) == [Request("keyframe", 0, 0, (16, 17))]


def test_chunks_that_do_not_come_are_asked_for_again_and_ever_more_patiently() -> None:
    plan = plan_of(300)
    follower = follower_of(plan)
    asked(follower, 0.0)
    assert asked(follower, 0.9 * RETRY_SECONDS) == []
    assert len(asked(follower, RETRY_SECONDS)) == 1
    assert asked(follower, 2 * RETRY_SECONDS) == []
    assert len(asked(follower, 3 * RETRY_SECONDS)) == 1


def test_a_chunk_that_comes_slowly_does_not_make_the_others_be_asked_for_again() -> None:
    plan = plan_of(4 * CHUNK)
    follower, chunks = follower_of(plan), Source(plan).keyframe()
    asked(follower, 0.0)
    follower.take_keyframe(chunks[0], 0.9)
    assert asked(follower, 2.0) == []
    follower.take_keyframe(chunks[1], 2.6)
    assert asked(follower, 4.5) == []
    follower.take_keyframe(chunks[2], 4.6)
    follower.take_keyframe(chunks[3], 4.7)
    assert follower.complete


def test_updates_that_arrive_during_a_join_are_kept_and_applied_after_it() -> None:
    plan = plan_of(2 * CHUNK)
    follower, source = follower_of(plan), Source(plan)
    first, second = source.keyframe()
    follower.take_keyframe(first, 0.0)
    for update in (*source.update(), *source.update()):
        assert follower.take_update(update, 0.1) is None
    moved = follower.take_keyframe(second, 0.2)
    assert moved is not None
    assert moved.version == 7
    assert torch.equal(moved.vector, source.public)
    assert moved.contributors == (("a", 1, 2, 3),)


@pytest.mark.parametrize("codec", ["f32", "int4"])
@pytest.mark.parametrize("merges", [1, 5], ids=["a merge a chunk", "five merges a chunk"])
def test_a_join_ends_also_where_a_fragment_is_merged_more_often_than_it_can_be_fetched(codec: str, merges: int) -> None:
    plan = plan_of(4 * CHUNK)
    follower, source, now = follower_of(plan, codec), Source(plan, codec=codec), 0.0
    for chunk in range(4):
        list(follower.requests(now))
        follower.take_keyframe(source.keyframe()[chunk], now := now + 10.0)
        for _ in range(merges):
            for update in source.update():
                follower.take_update(update, now)
    assert follower.complete
    assert held(follower)[0] == source.version
    assert torch.equal(held(follower)[1], source.public)


def test_a_newer_keyframe_that_comes_instead_replaces_what_has_come_of_the_older() -> None:
    plan = plan_of(2 * CHUNK)
    follower, source = follower_of(plan), Source(plan)
    asked(follower, 0.0)
    old = source.keyframe()
    source.update()
    new = source.keyframe()
    follower.take_keyframe(old[0], 0.0)
    follower.take_keyframe(new[1], 0.1)
    assert follower.take_keyframe(old[1], 0.2) is None
    assert follower.take_keyframe(new[0], 0.3) is not None
    assert torch.equal(held(follower)[1], source.public)


def test_a_keyframe_older_than_what_was_asked_for_is_of_no_use() -> None:
    plan = plan_of(300)
    follower, source = follower_of(plan), Source(plan)
    follower.note_versions((5,), 0.0)
    asked(follower, 0.0)
    assert follower.take_keyframe(source.keyframe(version=0)[0], 0.1) is None
    assert not follower.complete


def test_the_static_part_is_fetched_too() -> None:
    plan = plan_of(300)
    follower = PublicModel(plan, "f32", epoch=1, static_bytes=5)
    assert asked(follower, 0.0)[-1] == Request("keyframe", 1, 0, (0,))
    follower.take_keyframe(Source(plan).keyframe()[0], 0.1)
    assert not follower.complete
    [part] = split(b"fives")
    static = Keyframe(run="r", epoch=1, t=0, fragment=1, version=0, digest=digest(b"fives"), **part)
    follower.take_keyframe(static, 0.1)
    assert follower.complete
    assert follower.static == b"fives"


# --- updates ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("codec", ["f32", "bf16", "int8", "int4"])
def test_an_update_gives_the_same_bits_as_the_sender_has_and_leaves_the_old_vector_alone(codec: str) -> None:
    plan = plan_of(3 * CHUNK)
    source = Source(plan, codec=codec)
    follower = joined(source, plan)
    before, copy = held(follower)[1], held(follower)[1].clone()
    chunks = source.update()
    for chunk in chunks[1:] + chunks[1:]:
        assert follower.take_update(chunk, 0.1) is None
    moved = follower.take_update(chunks[0], 0.2)
    assert isinstance(moved, PublicFragment)
    assert torch.equal(moved.vector, source.public)
    assert torch.equal(before, copy)


def test_updates_out_of_order_are_applied_in_order() -> None:
    plan = plan_of(300)
    source = Source(plan)
    follower = joined(source, plan)
    first, second = source.update(), source.update()
    assert follower.take_update(second[0], 0.1) is None
    moved = follower.take_update(first[0], 0.2)
    assert moved is not None
    assert moved.version == 7


def test_an_update_that_was_applied_changes_nothing_when_it_comes_again() -> None:
    plan = plan_of(300)
    source = Source(plan)
    follower = joined(source, plan)
    [update] = source.update()
    follower.take_update(update, 0.1)
    assert follower.take_update(update, 0.2) is None
    assert held(follower)[0] == 6


def test_messages_of_another_epoch_and_of_unknown_fragments_are_ignored() -> None:
    plan = plan_of(300)
    source = Source(plan)
    follower = joined(source, plan)
    [update] = source.update()
    assert follower.take_update(replace(update, epoch=0), 0.1) is None
    assert follower.take_update(replace(update, epoch=2), 0.1) is None
    assert follower.take_update(replace(update, fragment=4), 0.1) is None
    assert held(follower)[0] == 5
    other = follower_of(plan)
    assert other.take_keyframe(source.keyframe(epoch=0)[0], 0.1) is None
    assert other.take_keyframe(replace(source.keyframe()[0], fragment=4), 0.1) is None


def test_memory_for_updates_that_cannot_be_applied_is_bounded() -> None:
    plan = plan_of(300)
    source = Source(plan)
    follower = joined(source, plan)
    source.update()
    for _ in range(50):
        follower.take_update(source.update()[0], 0.1)
    assert len(follower._tracks[0].updates) == 3


# --- gaps and lies ---------------------------------------------------------------------------------------------------
def test_a_lost_chunk_of_an_update_is_asked_for_alone() -> None:
    plan = plan_of(3 * CHUNK)
    source = Source(plan)
    follower = joined(source, plan)
    chunks = source.update()
    follower.take_update(chunks[0], 10.0)
    follower.take_update(chunks[2], 10.0)
    assert asked(follower, 10.0 + 0.9 * GAP_SECONDS) == []
    assert asked(follower, 10.0 + GAP_SECONDS) == [Request("update", 0, 6, (1,))]
    assert follower.take_update(chunks[1], 12.0) is not None
    assert asked(follower, 99.0) == []


def test_an_update_of_which_nothing_came_is_noticed_by_the_beat_and_fetched() -> None:
    plan = plan_of(300)
    source = Source(plan)
    follower = joined(source, plan)
    [update] = source.update()
    follower.note_versions((6,), 10.0)
    follower.note_versions((6,), 11.0)
    assert asked(follower, 11.0) == []
    assert asked(follower, 10.0 + GAP_SECONDS) == [Request("update", 0, 6, (0,))]
    assert follower.take_update(update, 12.0) is not None


def test_a_call_tells_of_a_gap_as_well() -> None:
    plan = plan_of(300)
    follower = joined(Source(plan), plan)
    follower.note_version(0, 6, 10.0)
    follower.note_version(7, 6, 10.0)
    assert [r.what for r in asked(follower, 20.0)] == ["update"]


def test_who_is_more_than_one_version_behind_fetches_a_keyframe() -> None:
    plan = plan_of(300)
    source = Source(plan)
    follower = joined(source, plan)
    source.update()
    source.update()
    follower.note_versions((7,), 10.0)
    assert asked(follower, 10.0 + GAP_SECONDS) == [Request("keyframe", 0, 7, (0,))]
    assert follower.wants_keyframes
    moved = follower.take_keyframe(source.keyframe()[0], 12.0)
    assert moved is not None
    assert moved.version == 7
    assert moved.contributors == ()


def test_an_update_that_is_asked_for_in_vain_is_given_up_for_a_keyframe() -> None:
    plan = plan_of(300)
    follower = joined(Source(plan), plan)
    follower.note_versions((6,), 0.0)
    now, wants = 0.0, []
    for _ in range(400):
        now += 0.25
        wants += [request.what for request in asked(follower, now)]
    assert wants[: UPDATE_TRIES + 1] == ["update"] * UPDATE_TRIES + ["keyframe"]


def test_an_update_whose_result_has_another_digest_is_replaced_by_a_keyframe() -> None:
    plan = plan_of(300)
    source = Source(plan)
    follower = joined(source, plan)
    [update] = source.update()
    with pytest.raises(Malformed, match="digest"):
        follower.take_update(replace(update, digest="0" * 64), 10.0)
    assert held(follower)[0] == 5
    assert [r.what for r in asked(follower, 10.0)] == ["keyframe"]
    assert follower.take_keyframe(source.keyframe()[0], 10.1) is not None


def test_a_keyframe_with_another_digest_is_fetched_again() -> None:
    plan = plan_of(300)
    follower, source = follower_of(plan), Source(plan)
    asked(follower, 0.0)
    with pytest.raises(Malformed, match="digest"):
        follower.take_keyframe(replace(source.keyframe()[0], digest="0" * 64), 0.1)
    assert not follower.complete
    assert [r.what for r in asked(follower, 0.1)] == ["keyframe"]
    assert follower.take_keyframe(source.keyframe()[0], 0.2) is not None


def test_a_keyframe_that_is_not_finite_is_never_held() -> None:
    plan = plan_of(300)
    follower, source = follower_of(plan), Source(plan)
    source.public[4] = float("inf")
    with pytest.raises(Malformed, match="nonfinite"):
        follower.take_keyframe(source.keyframe()[0], 0.1)
    assert follower.held == [None]


@pytest.mark.parametrize("codec", ["f32", "int4"])
def test_a_size_that_does_not_fit_the_plan_is_refused_before_memory_is_taken(codec: str) -> None:
    plan, other = plan_of(300), plan_of(2 * CHUNK)
    follower = follower_of(plan, codec)
    with pytest.raises(Malformed, match="size"):
        follower.take_keyframe(Source(other).keyframe()[0], 0.0)
    with pytest.raises(Malformed, match="size"):
        follower.take_update(Source(other, codec=codec).update()[0], 0.0)


def test_an_update_in_another_codec_is_refused() -> None:
    plan = plan_of(300)
    with pytest.raises(Malformed, match="codec int8"):
        follower_of(plan, "int4").take_update(Source(plan, codec="int8").update()[0], 0.0)


# --- resets and the end ----------------------------------------------------------------------------------------------
def test_a_reset_fetches_everything_although_the_versions_are_the_same() -> None:
    plan = plan_of(300)
    source = Source(plan)
    follower = joined(source, plan)
    follower.note_versions((5,), 1.0)
    follower.want_all()
    assert not follower.complete
    assert asked(follower, 1.0) == [Request("keyframe", 0, 5, (0,))]
    assert follower.take_keyframe(source.keyframe()[0], 1.1) is not None
    assert follower.complete


def test_at_the_end_each_fragment_that_differs_is_fetched_as_a_keyframe_at_once() -> None:
    plan = plan_of(300, 200)
    source = Source(plan)
    follower = joined(source, plan)
    follower.want_final((6, 0))
    follower.want_final((6, 0))
    assert asked(follower, 0.1) == [Request("keyframe", 0, 6, (0,))]
    source.version = 6
    assert follower.take_keyframe(source.keyframe()[0], 0.2) is not None
    follower.want_final((6, 0))
    assert follower.complete
    assert asked(follower, 9.9) == []
