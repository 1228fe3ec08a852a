"""A public model follows updates: gaps, wrong bits, resets, the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decoupled_diloco.common.errors import Malformed
from decoupled_diloco.common.fragments import Plan
from decoupled_diloco.learner.public_model import (
    GAP_SECONDS,
    UPDATE_TRIES,
    PublicFragment,
    PublicModel,
    Request,
)
from fragment_source import CHUNK, Source, asked, follower_of, held, plan_of


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


def test_a_learner_that_is_more_than_one_version_behind_fetches_a_keyframe() -> None:
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
