"""One run that suffers every fault. First part: each of its processes is killed, then it is interrupted. Second part:
it is resumed, and killed by a second Ctrl-C. Third part: it is resumed, and finishes. Its tape is replayed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decoupled_diloco.cli.commands import run_command
from decoupled_diloco.common.journal import read_journal
from decoupled_diloco.monitor.status import RunSource
from decoupled_diloco.simulator.replay import replay_decisions
from run import START_SECONDS, TEXT, Process, Run, check_token_ledger, wait_until_ended
from waiting import wait_for

pytestmark = pytest.mark.timeout(400)  # whole runs, on a machine that may be busy with others

LAST_STEPS = 60
"""Steps of the third part."""


# --- the run ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The first part. The syncer is killed early, since the replay of epoch 1 repeats all training until then."""
    with Run(tmp_path_factory.mktemp("faults"), "--tape", "--checkpoint-every", "50", evaluator=True) as run:
        run.wait_until_training()
        port = run.store_url.rpartition(":")[2].partition("/")[0]
        assert f"redis-cli -p {port} HGETALL dd:it:run" in run.output
        kill_learner(run, "learner-1")
        run.wait_for_versions(1, "with the new learner-1")
        for names in (["broker"], ["syncer"], ["store", "evaluator"]):
            run.kill(*names)
            run.wait_for_versions(2, f"after the death of {', '.join(names)}")
        guest_joins_and_leaves(run)
        kill_while_run_map_cannot_be_written(run, "learner-2")
        assert run.run_map["faults"] == 6
        pids = run.pids()
        assert run.interrupt() == 0, run.output
        wait_until_ended(pids)
        assert run.folder.summary()["state"] == "stopped"
        assert run.figures["faults"] == 6
    return run


def kill_learner(run: Run, name: str) -> None:
    before = run.learner(name)["incarnation"]
    run.kill(name)
    wait_for(lambda: run.learner(name)["incarnation"] != before, f"another {name} has joined", START_SECONDS)


def kill_while_run_map_cannot_be_written(run: Run, name: str) -> None:
    """run.json cannot be replaced for a while, as on a full disk."""
    before, pid = run.learner(name)["incarnation"], run.pid_of(name)
    obstacle = run.folder.path / "run.json.new"
    obstacle.mkdir()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: run.learner(name)["incarnation"] != before, f"another {name} has joined", START_SECONDS)
    assert run.pid_of(name) == pid, "run.json could not be written"
    obstacle.rmdir()
    wait_for(lambda: run.pid_of(name) not in (0, pid), "run.json has the new process")


def guest_joins_and_leaves(run: Run) -> None:
    """A learner that `diloco up` did not start."""
    with Process(run.place, "learner", "--broker", run.broker, "--name", "guest", "--data", TEXT) as guest:
        wait_for(lambda: run.merged_of("guest") > 0, "the guest's work is merged", START_SECONDS)
        processes = RunSource("it", run.store_url, run.folder).read().figures()["processes"]
        assert processes["guest"] == guest.pid
        assert processes["learner-1"] == run.pid_of("learner-1")
        assert guest.interrupt(30) == 0, guest.output
    wait_for(lambda: run.learner("guest").get("state") == "left", "the guest has left")


@pytest.fixture(scope="module")
def killed(stopped: Run) -> Run:
    """The second part."""
    figures, versions = stopped.figures, last_versions(stopped)
    with Run(stopped.place, resumes=True) as run:
        wait_for(lambda: run.figure("merges") > 0, "it is resumed", START_SECONDS)
        shown = run.redis_hash("dd:it:run")
        assert all(now > versions[p] for p, now in enumerate(run.versions()))
        for name in ("tokens_reported", "tokens_merged", "merges"):
            assert int(shown[name]) >= figures[name], name
        run.wait_for_versions(1, "the resumed run merges")
        wait_for(lambda: run.learner("learner-1").get("state") == "live", "learner-1 is back")
        check_token_ledger({k: int(v) for k, v in run.redis_hash("dd:it:run").items() if k.startswith("tokens_")})
        pids = run.pids()
        with run.frozen("syncer"):  # no graceful stop is possible
            run.signal(signal.SIGINT)
            run.wait_for_output("stopping")
            run.signal(signal.SIGTERM)
            assert run.wait(3) == 130
            wait_until_ended(pids, 3)
    return run


def last_versions(run: Run) -> dict[int, int]:
    return {row["fragment"]: row["version"] for row in run.events("syncer", "merged")}


@pytest.fixture(scope="module")
def finished(killed: Run) -> Run:
    """The third part. Its number of steps is lowered by hand, to end soon, which `--steps` rightly refuses."""
    setup, reached = killed.folder.setup(), killed.events("syncer", "merged")[-1]["step"]
    killed.folder.write_setup(replace(setup, settings=replace(setup.settings, steps=reached + LAST_STEPS)))
    with Run(killed.place, resumes=True) as run:
        wait_for(lambda: run.events("syncer", "finished"), "the last round is over", START_SECONDS)
        os.kill(run.pid_of("evaluator"), signal.SIGKILL)
        run.final_figures()
    return run


def merged_rounds(run: Run) -> list[dict[str, Any]]:
    """The syncer's log of its merges, each with its epoch."""
    rows, epoch = [], 0
    for row in run.log("syncer"):
        epoch = row["epoch"] if row["event"] == "syncer_started" else epoch
        rows += [{**row, "epoch": epoch}] if row["event"] == "merged" else []
    return rows


# --- what it survives ------------------------------------------------------------------------------------------------
def test_a_stopped_run_says_how_to_continue_and_ends_all_its_processes_by_itself(stopped: Run) -> None:
    figures = stopped.figures
    assert {row["name"] for row in figures["learners"]} == {"learner-1", "learner-2", "guest"}
    assert "continue with: diloco up --resume runs/it" in stopped.output
    assert not stopped.events("up", "processes_killed")


def test_a_run_that_was_killed_by_a_second_interrupt_can_be_resumed_and_finishes(stopped: Run, finished: Run) -> None:
    before, figures = stopped.figures, finished.figures
    for name in ("tokens_merged", "tokens_reported", "merges", "steps"):
        assert figures[name] > before[name], name
    assert figures["val_loss_last"] < figures["val_loss_first"]
    assert not finished.events("syncer", "model_hash_differs")
    assert not finished.events("syncer", "drain_unmet")


def test_the_final_model_is_evaluated_although_the_evaluator_was_killed_before(finished: Run) -> None:
    last, figures = finished.folder.evaluations()[-1], finished.figures
    assert (last["t"], last["size"], last["part"]) == (figures["steps"], "full", "B")
    assert figures["val_loss_last"] == last["val_loss"]


def test_versions_never_go_back(finished: Run) -> None:
    """Except after epoch 3, at whose end all processes were killed: the last checkpoint is what is left."""
    for epochs in ((1, 2, 3), (4,)):
        seen: dict[int, int] = {}
        for row in merged_rounds(finished):
            if row["epoch"] in epochs:
                assert row["version"] > seen.get(row["fragment"], 0), row
                seen[row["fragment"]] = row["version"]
    assert [row["epoch"] for row in finished.events("syncer", "syncer_started")] == [1, 2, 3, 4]


def test_a_finished_run_is_not_resumed(finished: Run) -> None:
    steps = finished.figures["steps"]
    with Process(finished.place, "up", "--resume", "runs/it") as again:
        assert again.wait() == 2
        assert f"has finished its {steps} steps; give a higher --steps to continue it" in again.error_sentence


# --- its tape --------------------------------------------------------------------------------------------------------
def test_the_decisions_of_each_epoch_are_repeated(finished: Run) -> None:
    for epoch in (1, 2, 3, 4):
        verdict = replay_decisions(read_journal(finished.folder.path / "tape" / f"syncer-{epoch}.jsonl"))
        assert verdict.merges >= sum(row["epoch"] == epoch for row in merged_rounds(finished)) > 0


def test_the_bits_of_the_first_epoch_are_repeated(stopped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    tape = stopped.folder.path / "tape" / "syncer-1.jsonl"
    assert run_command(["replay", str(tape), "--data", TEXT, "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)  # each version was compared with the tape's
    assert replayed["merges"] >= sum(row["epoch"] == 1 for row in merged_rounds(stopped)) > 0
    assert replayed["local_steps"] > 100


def test_each_incarnation_of_a_learner_has_a_tape_of_its_own(stopped: Run) -> None:
    names = [name for name, _ in read_journal(stopped.folder.path / "tape" / "syncer-1.jsonl").learners]
    assert sorted(names) == ["learner-1", "learner-1", "learner-2"]


def test_a_changed_tape_is_reported_in_one_sentence(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tape = shutil.copytree(finished.folder.path / "tape", tmp_path / "tape")
    path = tape / "syncer-1.jsonl"
    path.write_text(path.read_text().replace('"refused":""', '"refused":"late"', 1))
    assert run_command(["replay", str(path), "--decisions"]) == 2
    sentence = capsys.readouterr().err
    assert "an answer's refusal differ" in sentence
    assert sentence.count("\n") == 1
