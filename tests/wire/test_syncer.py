"""The syncer over real sockets: what learners and attackers send, message by message."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoupled_diloco.common.errors import Diverged, SaveFailed, SettingError, Superseded
from decoupled_diloco.common.fragments import Layout, TensorSpec
from decoupled_diloco.common.registry import list_runs, read_status
from decoupled_diloco.common.wire import Beat, Keyframe, Update, Welcome, split
from decoupled_diloco.compose.embedded_redis import EmbeddedRedis
from decoupled_diloco.syncer import loop, membership
from decoupled_diloco.syncer.checkpoint import Checkpoints
from decoupled_diloco.syncer.rounds import FAILED_MERGES
from logged import logged
from safetensors.torch import save_file
from syncer_run import LAYOUT, TOKENS, ScriptedLearner, SyncerRun, filled, syncer_run
from waiting import wait_for


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SyncerRun]:
    with syncer_run(tmp_path) as made:
        yield made


def versions(run: SyncerRun) -> list[int]:
    training = run.syncer.current.training
    assert training is not None
    return list(training.model.versions)


def all_finite(run: SyncerRun) -> bool:
    training = run.syncer.current.training
    assert training is not None
    state = training.model
    tensors = [*state.public, *state.residual, *(state.momentum or [])]
    return all(bool(torch.isfinite(t).all()) for t in tensors)


# --- joining ---------------------------------------------------------------------------------------------------------
def test_the_first_learner_seeds_and_nobody_is_welcome_before_version_0_is_on_the_disk(run: SyncerRun) -> None:
    a, b = run.learner("a"), run.learner("b", 2)
    a.wait(Beat)
    b.wait(Beat)
    assert a.hello().verdict == "seed"
    assert b.hello().verdict == "wait"
    a.seed(0.5)
    wait_for(lambda: a.hello().verdict == "welcome", "the seeder is welcomed")
    assert (run.directory / "global" / "version-0").is_dir()
    wait_for(lambda: b.hello().verdict == "welcome", "the other is welcomed")
    assert torch.equal(b.keyframe(0), filled(run.plan, 0, 0.5))
    assert torch.equal(
        torch.frombuffer(bytearray(b.fetch("initial", 1, kind=Keyframe).payload), dtype=torch.float32),
        filled(run.plan, 1, 0.5),
    )


def test_the_choice_of_a_seeder_lapses_with_it(run: SyncerRun) -> None:
    a = run.learner("a")
    a.wait(Beat)
    assert a.hello().verdict == "seed"
    a.close()
    run._learners.remove(a)
    b = run.learner("b", 2)
    b.wait(Beat)
    wait_for(lambda: b.hello().verdict == "seed", "another learner is chosen")
    b.join()


def test_a_seeder_whose_model_is_not_finite_is_refused_and_another_one_seeds(run: SyncerRun) -> None:
    a = run.learner("a")
    a.wait(Beat)
    assert a.hello().verdict == "seed"
    a.seed(math.nan)
    refused = a.wait(Welcome, lambda welcome: welcome.verdict == "refused")
    assert "nonfinite" in refused.reason
    run.learner("b", 2).join()


def test_a_learner_whose_model_is_not_that_of_the_given_file_is_refused_and_the_right_one_welcomed(
    tmp_path: Path,
) -> None:
    given = tmp_path / "given.safetensors"
    save_file({tensor.name: torch.full(tensor.shape, 0.25) for tensor in LAYOUT.tensors}, given)
    with syncer_run(tmp_path) as run:
        run.stop()
        run.start(init=given)
        stranger = run.learner("a")
        stranger.wait(Beat)
        welcome = stranger.hello(changed(shape=(80, 5)))
        assert welcome.verdict == "refused"
        assert "given.safetensors" in welcome.reason
        b = run.learner("b", 2)
        b.join()
        assert torch.equal(b.keyframe(0), filled(run.plan, 0, 0.25))


def test_a_file_to_begin_from_that_is_none_is_told_before_anybody_comes(tmp_path: Path) -> None:
    (tmp_path / "none.safetensors").write_text("no tensors")
    with syncer_run(tmp_path) as run:
        run.stop()
        run.start(init=tmp_path / "none.safetensors")
        wait_for(lambda: run.failure, "it ends at once")
        assert isinstance(failure := run.failure.pop(), SettingError)
        assert "cannot read" in str(failure)


def changed(**changes: Any) -> Layout:
    return Layout((replace(LAYOUT.tensors[0], **changes), *LAYOUT.tensors[1:]))


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (changed(shape=(80, 5)), "a [40, 5] float32 trainable"),
        (changed(shape=(5, 40)), "you have a [5, 40]"),
        (changed(dtype="bfloat16"), "a [40, 5] bfloat16"),
        (changed(kind="frozen"), "a [40, 5] float32 frozen"),
        (Layout((*LAYOUT.tensors, TensorSpec(name="d", shape=(1,), dtype="float32"))), "the run has no d [1]"),
    ],
    ids=["wider", "transposed", "another dtype", "frozen", "one tensor more"],
)
def test_another_model_is_refused_with_the_first_difference(run: SyncerRun, layout: Layout, said: str) -> None:
    run.learner("a").join()
    stranger = run.learner("b", 2)
    stranger.wait(Beat)
    welcome = stranger.hello(layout)
    assert welcome.verdict == "refused"
    assert said in welcome.reason


def test_two_live_learners_cannot_have_one_name_and_the_first_is_not_disturbed(run: SyncerRun) -> None:
    first = run.learner("a", 1)
    first.join()
    second = run.learner("a", 2)
    second.wait(Beat)
    assert second.hello().verdict == "wait"

    def refused() -> Welcome | None:
        first.alive()
        answer = second.hello()
        return answer if answer.verdict == "refused" else None

    assert "in use" in wait_for(refused, "the second is refused").reason  # type: ignore[union-attr]
    assert first.answer(first.call()).version == 1


def test_a_restarted_learner_gets_its_name_back_once_the_old_one_is_silent(run: SyncerRun) -> None:
    first = run.learner("a", 1)
    first.join()
    second = run.learner("a", 2)
    second.wait(Beat)
    wait_for(lambda: second.hello().verdict == "welcome", "the name is free again")


def test_a_learner_whose_name_went_to_another_one_meanwhile_is_told_so_when_it_is_back(run: SyncerRun) -> None:
    first, second = run.learner("a", 1), run.learner("a", 2)
    first.join()
    second.join()

    def told() -> bool:
        first.alive()
        second.alive()
        first.listen()
        return any(m.verdict == "refused" and m.incarnation == 1 for m in first.heard if isinstance(m, Welcome))

    wait_for(told, "the first one is refused")
    second.answer(second.call())


def test_a_learner_that_was_silent_so_long_that_it_was_forgotten_is_asked_to_say_hello(
    run: SyncerRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "REMEMBERED", 0)
    a = run.learner("a")
    a.join()
    training = run.syncer.current.training
    assert training is not None
    wait_for(lambda: not training.rounds.members.by_name, "it is forgotten")

    def told() -> bool:
        a.alive()
        a.listen()
        return any(m.verdict == "wait" for m in a.heard if isinstance(m, Welcome))

    wait_for(told, "it is asked")
    wait_for(lambda: a.hello().verdict == "welcome", "it is welcomed again")


# --- what is merged --------------------------------------------------------------------------------------------------
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


# --- repair, epochs, the end -----------------------------------------------------------------------------------------
def test_a_lost_update_is_sent_again_with_the_same_bytes_and_captures(run: SyncerRun) -> None:
    a = run.learner("a")
    a.join()
    update = a.answer(a.call())
    again = a.fetch("update", update.fragment, update.version, kind=Update)
    assert bytes(again.payload) == bytes(update.payload)
    assert again.contributors == update.contributors
    assert (again.version, again.digest) == (update.version, update.digest)


def test_a_killed_syncer_resumes_under_a_higher_epoch_with_higher_versions(tmp_path: Path) -> None:
    with syncer_run(tmp_path) as run:
        a = run.learner("a")
        a.join()
        call = a.call()
        for _ in range(4):
            a.answer(call)
            call = a.call(after=call.slot)
        epoch, before = a.epoch, versions(run)
        run.crash()
        run.start()
        a.wait(Beat, lambda b: b.epoch > epoch and b.versions != ())
        after = versions(run)
        assert all(new > old for new, old in zip(after, before, strict=True))
        a.versions = after
        a.since = [a.steps] * run.plan.P
        wait_for(lambda: a.hello().verdict == "welcome", "it is welcomed again")
        a.step()
        a.answer(a.call())


def test_an_empty_directory_never_begins_a_run_that_is_served_elsewhere(tmp_path: Path) -> None:
    with syncer_run(tmp_path / "one") as run:
        run.learner("a").join()
        other = SyncerRun(tmp_path / "two", run.port, run.settings)
        other.start(listen_seconds=3.0)
        wait_for(lambda: other.failure, "the second syncer refuses")
        assert isinstance(other.failure[0], SettingError)
        assert "already served" in str(other.failure[0])


def test_an_empty_directory_never_begins_a_run_that_learners_are_in(tmp_path: Path) -> None:
    with syncer_run(tmp_path / "one") as run:
        a = run.learner("a")
        a.join()
        run.crash()
        other = SyncerRun(tmp_path / "two", run.port, run.settings)
        other.start(listen_seconds=1.0)

        def failed() -> bool:
            a.alive(versions=(0, 3, 1))
            return bool(other.failure or other.syncer.current.epoch)

        wait_for(failed, "the second syncer decides")
        other.stop()
        assert isinstance(other.failure[0], SettingError)
        assert "learners" in str(other.failure[0])


@pytest.mark.parametrize("far", [{"epoch": 2**53}, {"versions": (2**53, 0, 0)}], ids=["an epoch", "a version"])
def test_no_stranger_can_drive_epochs_or_versions_to_where_nobody_takes_them(
    tmp_path: Path, far: dict[str, Any]
) -> None:
    with syncer_run(tmp_path) as run:
        a = run.learner("a")
        a.join()
        epoch = a.epoch
        run.crash()
        run.start(listen_seconds=0.5)

        def served_again() -> bool:
            a.alive(**far)
            a.listen()
            return a.epoch > epoch

        wait_for(served_again, "a beat of the new epoch is heard")
        a.wait(Beat, lambda beat: beat.epoch > epoch and len(beat.versions) == run.plan.P)


def test_a_syncer_that_comes_back_to_a_finished_run_waits_for_somebody_who_asks_and_then_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with syncer_run(tmp_path, steps=1) as run:
        a = run.learner("a")
        a.join()
        beat = wait_for(answers_until(run, a, lambda: finished(a)), "the run is finished")
        a.goodbye("finished", beat.model_hash)
        run.stop()
        for name, seconds in (("LINGER_SECONDS", 0.0), ("RETURN_SECONDS", 1000.0), ("RETURN_LINGER_SECONDS", 0.1)):
            monkeypatch.setattr(loop, name, seconds)
        run.start(drain_seconds=1000.0)
        late = run.learner("late")
        late.wait(Beat, lambda beat: beat.state == "finished" and beat.epoch > a.epoch)
        assert late.hello().verdict == "finished"
        late.goodbye("finished", beat.model_hash)
        wait_for(lambda: not run._thread.is_alive(), "the syncer goes")


def test_a_syncer_that_is_stopped_while_it_still_listens_says_nothing_and_takes_no_epoch(tmp_path: Path) -> None:
    with syncer_run(tmp_path) as run:
        run.stop()
        before = Checkpoints(tmp_path / "global").epoch()
        a = run.learner("a")
        run.start(listen_seconds=1000.0)
        run.stop()
        run.start()
        beat = a.wait(Beat)
        assert [m.syncer for m in a.heard if isinstance(m, Beat)].count(beat.syncer) == len(a.heard), (
            "only the last spoke"
        )
        assert beat.epoch == before + 1


def test_a_syncer_that_hears_a_higher_epoch_steps_down(tmp_path: Path) -> None:
    with syncer_run(tmp_path) as run:
        a = run.learner("a")
        a.join()
        beat = a.wait(Beat)
        a.control.send(replace(beat, epoch=beat.epoch + 1, syncer=beat.syncer + 1))
        wait_for(lambda: run.failure, "it steps down")
        assert isinstance(run.failure.pop(), Superseded)


def answers_until(run: SyncerRun, a: ScriptedLearner, enough: Callable[[], Any]) -> Callable[[], Any]:
    """A predicate for `wait_for`: the learner steps and answers every call until `enough` is true."""
    answered: set[tuple[int, int]] = set()

    def predicate() -> Any:
        a.listen()
        if found := enough():
            return found
        training = run.syncer.current.training
        for call in training.rounds.wire_calls() if training else ():
            if (call.slot, call.attempt) not in answered:
                answered.add((call.slot, call.attempt))
                p = call.fragment
                a.versions[p], a.since[p] = call.version, max(a.since[p], a.steps)
                a.step()
                a.bulk.send(a.delta(call))
                a.since[p] = a.steps
        a.alive()
        return None

    return predicate


def beats(a: ScriptedLearner) -> list[Beat]:
    a.listen()
    return [m for m in a.heard if isinstance(m, Beat)]


def finished(a: ScriptedLearner) -> Any:
    """The newest beat, if the run is over."""
    return next((beat for beat in beats(a)[-1:] if beat.state == "finished"), None)


def test_a_run_ends_with_one_last_round_of_every_fragment_and_books_without_pending(tmp_path: Path) -> None:
    with syncer_run(tmp_path, steps=3) as run:
        a = run.learner("a")
        a.join()
        beat = wait_for(answers_until(run, a, lambda: finished(a)), "the run is finished")
        assert len(beat.model_hash) == 64
        a.step(5)
        a.goodbye("finished", beat.model_hash)
        wait_for(lambda: not run._thread.is_alive(), "the syncer goes when all have acknowledged")
        training = run.syncer.current.training
        assert training is not None
        total = training.rounds.ledger.total()
        assert total.reported == a.steps * TOKENS
        assert total.pending == 0
        assert total.reported == total.merged + total.lost
        assert (run.directory / "model.safetensors").is_file()
        assert (run.directory / "summary.json").is_file()


def test_nobody_hears_that_the_run_is_over_before_its_end_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with syncer_run(tmp_path, steps=3, checkpoint_every=0) as run:
        gate, store = threading.Event(), run.syncer.components.checkpoints
        save = store.save
        monkeypatch.setattr(store, "save", lambda *what: (gate.wait(60), save(*what))[1])
        a = run.learner("a")
        a.join()

        def drained() -> bool:
            training = run.syncer.current.training
            return training is not None and training.rounds.state == "drained"

        wait_for(answers_until(run, a, drained), "every fragment has had its last round")
        before = len(beats(a))
        wait_for(lambda: len(beats(a)) >= before + 4, "more beats are heard")
        assert not any(beat.state == "finished" for beat in beats(a))
        gate.set()
        beat = wait_for(lambda: finished(a), "the end is told once it is safe")
        a.goodbye("finished", beat.model_hash)


def test_the_end_is_told_also_where_the_disk_takes_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError("No space left on device")

    with syncer_run(tmp_path, steps=3, checkpoint_every=0) as run:
        monkeypatch.setattr(run.syncer.components.checkpoints, "save", full)
        a = run.learner("a")
        a.join()
        beat = wait_for(answers_until(run, a, lambda: finished(a)), "the run is finished")
        a.goodbye("finished", beat.model_hash)
        wait_for(lambda: not run._thread.is_alive(), "the syncer goes when all have acknowledged")
        assert isinstance(run.failure.pop(), SaveFailed)


def test_checkpoints_that_fail_are_logged_once_and_so_is_the_end_of_the_trouble(tmp_path: Path) -> None:
    with logged(tmp_path) as events, syncer_run(tmp_path / "run") as run:
        writer, folder = run.syncer.components.writer, run.directory / "global"
        a = run.learner("a")
        a.join()
        wait_for(answers_until(run, a, lambda: events("checkpoint")), "a first checkpoint")
        saved_at = writer.saved_at
        assert saved_at is not None
        folder.rename(tmp_path / "away")
        wait_for(answers_until(run, a, lambda: writer.failures >= 3), "checkpoints fail, and merging goes on")
        last_good = writer.saved_at
        (tmp_path / "away").rename(folder)
        wait_for(answers_until(run, a, lambda: events("checkpoint_recovered")), "checkpoints are written again")
        assert len(events("checkpoint_failed")) == 1
        (recovered,) = events("checkpoint_recovered")
        assert recovered["failed"] >= 3
        assert recovered["seconds"] > 0
        assert last_good is not None
        assert saved_at <= last_good < writer.saved_at  # type: ignore[operator]


def test_a_syncer_that_is_stopped_says_so_and_closes_its_calls_so_that_nobody_waits_for_it(run: SyncerRun) -> None:
    a = run.learner("a")
    a.join()
    a.call()
    run.stop()
    last = a.wait(Beat, lambda beat: beat.state == "stopping" and not beat.calls)
    assert last.versions == tuple(versions(run))


@pytest.mark.parametrize("begun", [True, False])
def test_the_store_says_of_a_syncer_that_was_stopped_and_has_ended_that_it_is_stopped(
    tmp_path: Path, *, begun: bool
) -> None:
    (tmp_path / "store").mkdir()
    store = EmbeddedRedis(tmp_path / "store")
    store.start()
    try:
        with syncer_run(tmp_path / "run", redis=store.url) as run:
            if begun:
                run.learner("a").join()
            wait_for(lambda: "run" in list_runs(store.url), "the store knows the run")
            run.stop()
        assert read_status(store.url, "run")["run"]["state"] == "stopped"
    finally:
        store.stop()


def test_a_syncer_that_is_stopped_waits_for_no_answer_when_everybody_has_left(tmp_path: Path) -> None:
    with syncer_run(tmp_path) as run:
        run.stop()
        run.start(stop_seconds=600)
        a = run.learner("a")
        a.join()
        a.call()
        a.goodbye("left")
        wait_for(lambda: not run.syncer.current.training.rounds.members.live(), "it has left")  # type: ignore[union-attr]
        assert run.syncer.current.training.rounds.calls  # type: ignore[union-attr]
        run.syncer.stop()
        wait_for(lambda: not run._thread.is_alive(), "the syncer ends")
        assert run.failure == []


def two_at_the_end(run: SyncerRun) -> tuple[ScriptedLearner, ScriptedLearner, Beat]:
    """Two learners of a run that has just finished; the second one says nothing any more."""
    a, b = run.learner("a"), run.learner("b")
    a.join()
    b.join()

    def over() -> Any:
        if not (beat := finished(a)):
            b.alive()
        return beat

    return a, b, wait_for(answers_until(run, a, over), "the run is finished")


def lost(run: SyncerRun, name: str) -> bool:
    training = run.syncer.current.training
    return training is not None and training.rounds.members.by_name[name].state == "lost"


def test_a_learner_that_falls_silent_at_the_end_is_awaited_until_its_goodbye(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LINGER_SECONDS", 0.0)
    with syncer_run(tmp_path, steps=1) as run:
        run.stop()
        run.start(drain_seconds=1000.0)
        a, b, beat = two_at_the_end(run)
        monkeypatch.setattr(membership, "SILENCE_SECONDS", 0.3)
        a.goodbye("finished", beat.model_hash)
        wait_for(lambda: lost(run, "b"), "the other one is lost")
        before = len(beats(a))
        wait_for(lambda: len(beats(a)) > before + 2, "the syncer still beats")
        b.goodbye("finished", beat.model_hash)
        wait_for(lambda: not run._thread.is_alive(), "the syncer goes once both have confirmed")
        assert json.loads((tmp_path / "summary.json").read_text())["unconfirmed"] == {}


def test_a_learner_that_never_confirms_the_final_model_is_named_and_the_syncer_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LINGER_SECONDS", 0.0)
    with syncer_run(tmp_path, steps=1) as run:
        run.stop()
        run.start(drain_seconds=0.5)
        a, _, beat = two_at_the_end(run)
        a.goodbye("finished", beat.model_hash)
        wait_for(lambda: not run._thread.is_alive(), "the syncer goes")
        assert json.loads((tmp_path / "summary.json").read_text())["unconfirmed"] == {"b": "no goodbye"}
        assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.parametrize("reason", ["failed", "other final model", "other process"])
def test_only_a_member_that_has_finished_with_the_final_model_confirms_it_by_its_goodbye(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(loop, "LINGER_SECONDS", 0.0)
    with logged(tmp_path) as events, syncer_run(tmp_path / "run", steps=1) as run:
        run.stop()
        run.start(drain_seconds=0.5 if reason == "other process" else 1000.0)
        a, b, beat = two_at_the_end(run)
        if reason == "failed":
            b.goodbye("failed")
        elif reason == "other final model":
            b.goodbye("finished", "ab" * 32)
        else:
            run.learner("b", incarnation=2).goodbye("finished", beat.model_hash)
        a.goodbye("finished", beat.model_hash)
        wait_for(lambda: not run._thread.is_alive(), "the syncer goes")
        why = {"failed": "failed", "other final model": "another final model", "other process": "no goodbye"}[reason]
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["unconfirmed"] == {"b": why}
        (said,) = events("unconfirmed")
        assert said["learners"] == f"b ({why})"


def test_a_learner_that_asks_for_ever_keeps_a_finished_run_for_a_stated_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LINGER_SECONDS", 0.0)
    with logged(tmp_path) as events, syncer_run(tmp_path / "run", steps=1) as run:
        run.stop()
        run.start(drain_seconds=1000.0, drain_most_seconds=0.5)
        a, b, beat = two_at_the_end(run)
        a.goodbye("finished", beat.model_hash)

        def gone() -> bool:
            b.hello_once()
            return not run._thread.is_alive()

        wait_for(gone, "the syncer goes although it is asked again and again")
        (said,) = events("unconfirmed")
        assert "and 0.5 s at most" in said["sentence"]
