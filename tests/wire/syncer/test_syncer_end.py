"""The end of a run, graceful stops, and checkpoints that fail."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from decoupled_diloco.common.errors import SaveFailed
from decoupled_diloco.common.registry import list_runs, read_status
from decoupled_diloco.common.wire import Beat
from decoupled_diloco.compose.embedded_redis import EmbeddedRedis
from decoupled_diloco.syncer import loop, membership
from logged import logged
from scripted_learner import TOKENS, ScriptedLearner
from syncer_run import SyncerRun, syncer_run
from syncer_state import answers_until, beats, finished, versions
from waiting import wait_for


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


def test_the_end_is_published_also_where_the_disk_takes_nothing_any_more(
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


def test_a_syncer_that_is_stopped_reports_it_and_closes_its_calls_so_that_nobody_waits_for_it(run: SyncerRun) -> None:
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


def test_a_syncer_that_is_stopped_waits_for_no_answer_when_all_clients_have_left(tmp_path: Path) -> None:
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


def test_a_learner_that_asks_forever_keeps_a_finished_run_for_a_stated_time_only(
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
