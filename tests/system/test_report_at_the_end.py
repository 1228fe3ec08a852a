"""`diloco evaluator --report` in a run without `diloco up`: the same end, and again for whoever looks later."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from by_hand import evaluator, learner, syncer
from decoupled_diloco.common.config import LearnerConfig, RunSettings, TaskSettings
from decoupled_diloco.common.errors import DilocoError
from decoupled_diloco.common.run_folder import RunFolder, Setup, write_json
from decoupled_diloco.compose import evaluator_report
from decoupled_diloco.compose.evaluator_report import evaluate_and_report, is_finished
from run import Process
from scripted_syncer import running_broker
from waiting import wait_for

pytestmark = pytest.mark.timeout(300)  # whole runs, on a machine that may be busy with others


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Process]]:
    """A run that went through its steps by itself, and the evaluator that reported it."""
    place = tmp_path_factory.mktemp("finished")
    with (
        running_broker() as broker,
        evaluator(place, broker, "--report") as judged,
        syncer(place, broker) as served,
        learner(place, broker) as trained,
    ):
        assert trained.wait(120) == 0, trained.output
        assert served.wait(60) == 0, served.output
        assert judged.wait(120) == 0, judged.output
        yield place, judged


def check_shown(place: Path, process: Process) -> None:
    shown = process.out.read_text("utf-8")
    assert re.search(r"validation loss +\d\.\d+ nats per byte", shown), shown
    assert re.search(r"steps +12\b", shown), shown
    assert "200 bytes written by the model" in shown
    assert "metrics.csv" in shown
    folder = place / "runs" / "it"
    assert (folder / "loss.png").read_bytes()[1:4] == b"PNG"
    assert (folder / "metrics.csv").read_text().count("\n") > 1


def test_a_finished_run_is_shown_as_by_up(finished: tuple[Path, Process]) -> None:
    check_shown(*finished)


def test_an_evaluator_that_starts_again_after_the_end_shows_it_again_and_ends_well(
    finished: tuple[Path, Process],
) -> None:
    place, _ = finished
    for name in ("loss.png", "metrics.csv"):
        (place / "runs" / "it" / name).unlink()
    evaluations = (place / "runs" / "it" / "evaluations.jsonl").read_text()
    with evaluator(place, "tcp://127.0.0.1:1", "--report", "--join-timeout", "1") as again:
        assert again.wait(60) == 0, again.output
        check_shown(place, again)
    assert (place / "runs" / "it" / "evaluations.jsonl").read_text() == evaluations


def test_an_evaluator_whose_syncer_is_back_to_tell_the_end_ends_well(finished: tuple[Path, Process]) -> None:
    place, _ = finished
    with running_broker() as broker, evaluator(place, broker, "--report") as again, syncer(place, broker) as served:
        assert served.wait(60) == 0, served.output
        assert again.wait(60) == 0, again.output
        check_shown(place, again)


def test_without_its_run_an_evaluator_of_one_that_continues_is_at_a_loss(finished: tuple[Path, Process]) -> None:
    place, _ = finished
    folder = RunFolder(place / "runs" / "it")
    setup = (folder.path / "settings.json").read_text()
    try:
        folder.raise_steps(10_000)
        with evaluator(place, "tcp://127.0.0.1:1", "--report", "--join-timeout", "1") as again:
            assert again.wait(60) == 3, again.output
        assert not is_finished(folder)
    finally:
        (folder.path / "settings.json").write_text(setup)
    assert is_finished(folder)


def test_an_evaluator_that_is_stopped_reports_nothing(tmp_path: Path) -> None:
    with (
        running_broker() as broker,
        evaluator(tmp_path, broker, "--report") as judged,
        syncer(tmp_path, broker, steps=10**6),
        learner(tmp_path, broker),
    ):
        record = tmp_path / "runs" / "it" / "evaluations.jsonl"
        wait_for(lambda: record.exists() and record.read_text(), "it judges", 90)
        judged.signal(signal.SIGTERM)
        assert judged.wait(30) == 0, judged.output
        assert judged.out.read_text() == ""


def test_a_folder_that_never_tells_of_the_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator_report, "_SUMMARY_SECONDS", 0.3)
    folder = RunFolder.create(tmp_path / "it", Setup(settings=RunSettings(steps=20), task=TaskSettings()))
    write_json(folder.path / "summary.json", {"state": "finished", "t": 10})  # the end that it had before
    monkeypatch.setattr(
        "decoupled_diloco.learner.task.evaluator.main", lambda _config, _data, _every, then: [then(), 0][1]
    )
    with pytest.raises(DilocoError, match=r"it/summary\.json does not say so"):
        evaluate_and_report(LearnerConfig(broker="tcp://h:1", name="e", directory=folder.path), None, 1.0)
    assert json.loads((folder.path / "summary.json").read_text())["t"] == 10
