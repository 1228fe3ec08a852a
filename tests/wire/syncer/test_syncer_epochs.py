"""Retransmission, and epochs of a syncer that is restarted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decoupled_diloco.common.errors import SettingError, Superseded
from decoupled_diloco.common.wire import Beat, Update
from decoupled_diloco.syncer import loop
from decoupled_diloco.syncer.checkpoint import Checkpoints
from syncer_run import SyncerRun, syncer_run
from syncer_state import answers_until, finished, versions
from waiting import wait_for


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
