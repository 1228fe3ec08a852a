"""A real run with a tape, done again: the same decisions and the same bits, whatever happened in it. (test_up.py does a
run that went through all its steps again.)
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from decoupled_diloco.cli.commands import run_command
from decoupled_diloco.common.journal import read_journal
from decoupled_diloco.simulator.replay import replay_decisions
from run import TEXT, Run
from waiting import wait_for

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def taped(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Of a learner one life ends by kill -9 in it, and the broker is killed, so that messages are lost; then it is
    stopped.
    """
    with Run(tmp_path_factory.mktemp("taped"), "--tape") as run:
        run.wait_until_it_runs()
        before = run.learner("learner-1")["incarnation"]
        run.kill("learner-1")
        wait_for(lambda: run.learner("learner-1")["incarnation"] != before, "another learner-1 has joined", 90)
        run.wait_for_versions(1, "with the new learner-1")
        run.kill("broker")
        run.wait_for_versions(1, "with the new broker")
        run.signal(signal.SIGINT)
        run.figures()
    return run


def test_a_real_run_s_decisions_are_taken_again(taped: Run) -> None:
    verdict = replay_decisions(read_journal(taped.folder.path))
    assert verdict.merges == taped.check_figures()["merges"]


def test_a_real_run_s_bits_are_made_again(taped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["replay", str(taped.folder.path), "--data", TEXT, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)  # each version was compared with the tape's, or it had ended
    assert told["merges"] == taped.check_figures()["merges"]
    assert told["local_steps"] > 100


def test_each_life_of_a_learner_has_a_tape_of_its_own(taped: Run) -> None:
    names = [name for name, _ in read_journal(taped.folder.path).learners]
    assert sorted(names) == ["learner-1", "learner-1", "learner-2"]


def test_a_tape_that_was_touched_is_told_in_a_sentence(taped: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder: Path = taped.folder.path / "tape"
    (path,) = folder.glob("syncer-*.jsonl")
    path.write_text(path.read_text().replace('"refused":""', '"refused":"late"', 1))
    assert run_command(["replay", str(folder), "--decisions"]) == 2
    said = capsys.readouterr().err
    assert "an answer's refusal differ" in said
    assert said.count("\n") == 1
