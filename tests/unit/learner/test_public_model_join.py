"""A public model at the join: initial fragments in chunks."""

from __future__ import annotations

import pytest
import torch
from decoupled_diloco.common.codec import digest
from decoupled_diloco.common.wire import Keyframe, split
from decoupled_diloco.learner.public_model import (
    RETRY_SECONDS,
    PublicModel,
    Request,
)
from fragment_source import CHUNK, Source, asked, follower_of, held, plan_of

BIG = 20 * CHUNK
"""Elements of the first fragment: 20 chunks as a keyframe, more than may be in flight."""


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


def test_chunks_that_do_not_come_are_asked_for_again_and_at_growing_intervals() -> None:
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
