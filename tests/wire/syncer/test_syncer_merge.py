"""A syncer merges answers, and rejects what must not be merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from decoupled_diloco.common.errors import Diverged
from decoupled_diloco.common.wire import Welcome, split
from decoupled_diloco.syncer.checkpoint import Checkpoints
from decoupled_diloco.syncer.rounds import FAILED_MERGES
from scripted_learner import TOKENS, filled
from syncer_run import SyncerRun, syncer_run
from syncer_state import versions
from waiting import wait_for


def all_finite(run: SyncerRun) -> bool:
    training = run.syncer.current.training
    assert training is not None
    state = training.model
    tensors = [*state.public, *state.residual, *(state.momentum or [])]
    return all(bool(torch.isfinite(t).all()) for t in tensors)


def test_an_honest_answer_moves_the_model_by_its_delta(run: SyncerRun) -> None:
    a = run.learner("a")
    a.join()
    update = a.answer(a.call(), value=0.01)
    expected = filled(run.plan, update.fragment, -0.01)
    assert torch.allclose(a.keyframe(update.fragment), expected, atol=0.01 / 14 + 1e-6)
    assert update.contributors == (("a", 1, 2, 2 * TOKENS),)


@pytest.mark.parametrize(
    ("codec", "bits", "reason"),
    [("bf16", 0x7FC0, "nonfinite"), ("int4", 0x7FC0, "scale"), ("int4", 0x7F80, "scale"), ("int8", 0xBF80, "scale")],
    ids=["a value that is not a number", "a scale that is not a number", "an infinite scale", "a negative scale"],
)
def test_a_delta_that_is_not_finite_is_rejected_and_the_round_still_completes(
    tmp_path: Path, codec: str, bits: int, reason: str
) -> None:
    with syncer_run(tmp_path, codec_up=codec) as run:
        a, b = run.learner("a", 1), run.learner("b", 2)
        a.join()
        b.join()
        call = a.call()
        broken = bytearray(a.delta(call).payload)
        broken[:2] = bits.to_bytes(2, "little")
        a.provoke(reason, call, payload=bytes(broken))
        b.answer(call)
        assert all_finite(run)


def test_an_answer_without_tokens_or_steps_is_never_merged(run: SyncerRun) -> None:
    a, b = run.learner("a", 1), run.learner("b", 2)
    a.join()
    b.join()
    call = a.call()
    for learner in (a, b):
        learner.provoke("empty", call, tokens_to=0, tokens_from=0)
    assert versions(run)[call.fragment] == call.version
    update = b.answer(b.call(call.fragment))
    assert [c[0] for c in update.contributors] == ["b"]


def test_the_same_delta_again_at_once_after_the_merge_and_three_rounds_later_counts_once(run: SyncerRun) -> None:
    a = run.learner("a")
    a.join()
    call = a.call()
    genuine = a.delta(call)
    a.bulk.send(genuine)
    a.answer(call)
    a.bulk.send(genuine)
    slot = call.slot
    for _ in range(3):
        later = a.call(after=slot)
        slot = later.slot
        a.answer(later)
    a.bulk.send(genuine)
    wait_for(lambda: run.rejected["duplicate"] + run.rejected["late"] >= 3, "the repeats are rejected")
    training = run.syncer.current.training
    assert training is not None
    account = training.rounds.ledger.account("a")
    assert account.merged <= account.reported


def test_a_forged_answer_with_an_interval_already_merged_is_an_overlap(run: SyncerRun) -> None:
    a = run.learner("a")
    a.join()
    call = a.call()
    a.answer(call)
    a.provoke("overlap", a.call(call.fragment, after=call.slot), tokens_from=0, steps_from=0)


def test_work_on_a_model_long_gone_is_rejected_as_stale(run: SyncerRun) -> None:
    a = run.learner("a")
    a.join()
    call = a.call()
    slot = call.slot
    rounds = 0
    while rounds < 3:
        a.answer(call)
        rounds += 1
        slot = call.slot
        call = a.call(call.fragment, after=slot)
    a.provoke("stale", call, base_version=call.version - 3)
    a.answer(a.call(call.fragment, after=slot))


def test_tokens_that_were_never_reported_do_not_count(tmp_path: Path) -> None:
    with syncer_run(tmp_path, grace_seconds=0.2) as run:
        a, b = run.learner("a", 1), run.learner("b", 2)
        a.join()
        b.join()
        call = a.call()
        a.bulk.send(a.delta(call, tokens_to=10**12))
        update = b.answer(call)
        assert [c[0] for c in update.contributors] == ["b"]
        wait_for(lambda: run.rejected["unreported"], "the liar is named")


def test_a_norm_far_beyond_the_usual_is_rejected_and_three_in_a_row_reset_the_learner(run: SyncerRun) -> None:
    a = run.learner("a")
    a.join()
    call = a.call(0)
    for _ in range(9):
        a.answer(call)
        call = a.call(0, after=call.slot)
    a.provoke("norm", call, times=3, value=1e4)
    a.wait(Welcome, lambda w: w.verdict == "reset")
    a.answer(call)


def test_a_run_whose_merges_are_never_finite_keeps_what_was_good_and_says_why_it_ends(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"outer_lr": 100.0, "codec_up": "f32", "codec_down": "f32"}
    with syncer_run(tmp_path, **changes) as run:
        a = run.learner("a")
        a.join()
        call = a.call(0)
        first = a.answer(call)
        call, sent = a.call(0, after=call.slot), set[int]()

        def ended() -> None:
            a.alive()
            newest = a.newest(call)
            if newest.attempt not in sent:
                sent.add(newest.attempt)
                a.bulk.send(a.delta(newest, 3e37))

        with pytest.raises(AssertionError, match="the syncer has ended by itself"):
            wait_for(ended, "the syncer gives up")
        failure = run.failure.pop()
        assert isinstance(failure, Diverged)
        assert "has diverged: merging fragment 0 gave values that are not finite" in str(failure)
        assert len(sent) == FAILED_MERGES
        assert all_finite(run)
        assert Checkpoints(run.directory / "global").newest() is not None
        assert versions(run)[0] == first.version


def test_a_delta_of_the_wrong_size_or_codec_is_rejected_before_memory_is_taken(run: SyncerRun) -> None:
    a = run.learner("a")
    a.join()
    call = a.call()
    a.provoke("size", call, **split(b"\0" * 10)[0])
    a.provoke("size", call, size=2**41, chunks=2**21, chunk=0, **_full_chunk())
    a.provoke("size", call, codec="f32")
    a.answer(call)


def _full_chunk() -> dict[str, Any]:
    part = split(b"\0" * 2**20)[0]
    return {"payload": part["payload"], "crc": part["crc"]}


def test_messages_of_a_lower_epoch_are_rejected(run: SyncerRun) -> None:
    a = run.learner("a")
    a.join()
    call = a.call()
    a.provoke("epoch", call, epoch=call.epoch - 1)


def test_other_bits_than_the_run_s_are_answered_with_a_reset(run: SyncerRun) -> None:
    a = run.learner("a")
    a.join()
    update = a.answer(a.call())
    held = [0] * run.plan.P
    held[update.fragment] = update.version
    shas = [""] * run.plan.P
    shas[update.fragment] = update.digest[:16]
    a.alive(digests=tuple(shas), digest_versions=tuple(held))
    shas[update.fragment] = "0" * 16
    a.alive(digests=tuple(shas), digest_versions=tuple(held))
    assert "bits" in a.wait(Welcome, lambda w: w.verdict == "reset").reason
