"""kill -9 of everything that a run consists of, each in turn, and of the one that keeps it all alive."""

from __future__ import annotations

import os
import signal

import pytest
from run import Process, Run
from waiting import wait_for

pytestmark = pytest.mark.timeout(400)  # whole runs, on a machine that may be busy with others

STEPS = 3000
"""Many times as long as the kills take, since training goes on meanwhile."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run through whose processes death has gone, and which came to its end nevertheless."""
    place = tmp_path_factory.mktemp("kills")
    with Run(place, "--checkpoint-every", "50", steps=STEPS, evaluator=True) as run:
        run.wait_until_it_runs()
        die_while_nothing_can_be_written(run, "learner-2")
        versions = run.versions()
        for name in ("store", "learner-1", "broker", "evaluator", "syncer"):
            run.kill(name)
            run.wait_for_versions(2, f"after the death of the {name}")
            versions, before = run.versions(), versions
            assert all(now > then for now, then in zip(versions, before, strict=True)), (name, before, versions)
        assert run.told["faults"] == 6
        wait_for(lambda: run.events("syncer", "finished"), "the last round is over", 120)
        os.kill(run.pid_of("evaluator"), signal.SIGKILL)
        run.figures()
    return run


def die_while_nothing_can_be_written(run: Run, name: str) -> None:
    """run.json cannot be replaced for a while, as on a full disk."""
    before, pid = run.learner(name)["incarnation"], run.pid_of(name)
    obstacle = run.folder.path / "run.json.new"
    obstacle.mkdir()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: run.learner(name)["incarnation"] != before, f"another {name} has joined", 90)
    assert run.pid_of(name) == pid, "nobody could be told"
    obstacle.rmdir()
    wait_for(lambda: run.pid_of(name) not in (0, pid), "run.json says it as soon as it can")


def test_a_run_survives_the_death_of_each_of_its_processes(finished: Run) -> None:
    told = finished.check_figures()
    assert told["faults"] == 7
    assert told["steps"] == STEPS
    assert told["val_loss_last"] < told["val_loss_first"]
    assert not finished.events("syncer", "model_hash_differs")
    assert not finished.events("syncer", "drain_unmet")
    assert {row["name"] for row in told["learners"]} == {"learner-1", "learner-2"}


def test_the_final_model_is_judged_although_the_evaluator_died_before_it_could(finished: Run) -> None:
    last = finished.folder.evaluations()[-1]
    assert (last["t"], last["size"], last["part"]) == (STEPS, "full", "B")
    assert finished.check_figures()["val_loss_last"] == last["val_loss"]


def test_versions_never_go_back_whoever_dies(finished: Run) -> None:
    seen: dict[int, int] = {}
    for row in finished.events("syncer", "merged"):
        assert row["version"] > seen.get(row["fragment"], 0), row
        seen[row["fragment"]] = row["version"]
    epochs = [row["epoch"] for row in finished.events("syncer", "syncer_started")]
    assert epochs == [1, 2]


def test_a_finished_run_is_not_resumed_but_says_so_in_one_sentence(finished: Run) -> None:
    with Process(finished.place, "up", "--resume", "runs/it") as again:
        assert again.wait() == 2
        assert "has finished its 3000 steps; give a higher --steps to continue it" in again.last_words
