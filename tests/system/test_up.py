"""`diloco up` with all its real processes: a run that finishes, and runs that cannot start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from decoupled_diloco.cli.commands import run_command
from run import TEXT, TOKENS_A_STEP, Run

KEYS = {
    "run", "steps", "cycles", "merges", "learners", "val_loss_first", "val_loss_last", "tokens_reported",
    "tokens_merged", "tokens_pending", "tokens_lost", "faults", "uptime", "merge_participation", "goodput",
    "useful_share", "stall_share", "bytes_up", "bytes_down", "bytes_f32_allreduce", "model_hash", "seconds",
}  # fmt: skip


# --- a run that finishes ---------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    with Run(tmp_path_factory.mktemp("finished"), "--tape", steps=60, evaluator=True, display_is_closed=True) as run:
        run.final_figures()
    return run


def test_a_run_ends_with_one_line_of_json_and_nothing_else_on_stdout(finished: Run) -> None:
    figures = finished.figures
    assert set(figures) == KEYS
    assert finished.out.read_text().count("\n") == 1
    assert figures["run"] == "it"
    assert figures["steps"] == 60
    assert figures["cycles"] >= 2
    assert figures["merges"] > 0
    assert figures["faults"] == 0
    assert figures["model_hash"]


def test_a_run_whose_display_is_closed_continues_and_logs_it(finished: Run) -> None:
    lost = [(event["stream"], event["reason"]) for event in finished.events("up", "display_lost")]
    assert lost == [("stderr", "Broken pipe")]


def test_the_ledger_of_a_finished_run_agrees_to_the_token(finished: Run) -> None:
    figures = finished.figures
    whole = figures["tokens_merged"] + figures["tokens_pending"] + figures["tokens_lost"]
    assert figures["tokens_reported"] == whole
    assert figures["tokens_pending"] == 0
    assert figures["tokens_reported"] == sum(row["tokens_reported"] for row in figures["learners"])
    assert [row["name"] for row in figures["learners"]] == ["learner-1", "learner-2"]
    for row in figures["learners"]:
        assert set(row) == {"name", "local_steps", "tokens_reported", "tokens_merged", "stall_share"}
        assert row["tokens_reported"] % TOKENS_A_STEP == 0


def test_a_run_learns_and_its_shares_are_shares(finished: Run) -> None:
    figures = finished.figures
    assert figures["val_loss_last"] < figures["val_loss_first"]
    for name in ("uptime", "merge_participation", "goodput", "useful_share", "stall_share"):
        assert 0 <= figures[name] <= 1, name


def test_a_run_leaves_its_results_in_its_folder_and_no_process(finished: Run) -> None:
    folder = finished.folder
    left = {path.name for path in folder.path.iterdir()}
    expected = {"settings.json", "summary.json", "model.safetensors", "metrics.csv", "loss.png", "evaluations.jsonl"}
    assert expected <= left
    assert any((folder.path / "global").glob("checkpoint-*"))
    for name in ("up", "broker", "syncer", "evaluator", "learner-1", "learner-2"):
        events = finished.log(name)
        assert events, name
        assert all({"ts", "level", "process", "event"} <= set(event) for event in events)
    assert folder.run_map()["processes"] == {}
    assert not folder.is_up()


def test_a_finished_run_can_be_inspected(
    finished: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def output_of(*arguments: str) -> str:
        assert run_command(list(arguments)) == 0
        return capsys.readouterr().out

    monkeypatch.chdir(finished.place)
    status = json.loads(output_of("status", "it", "--json"))
    assert {name: status[name] for name in KEYS} == finished.figures
    assert status["state"] == "finished"
    assert "validation loss" in output_of("status", "it")
    assert "loss.png" in output_of("report", "it")
    assert output_of("sample", "it", "--prompt", "import ", "--bytes", "20").startswith("import ")
    assert output_of("export", "it", "--to", "copy.safetensors").strip() == "copy.safetensors"
    model = finished.folder.path / "model.safetensors"
    assert (finished.place / "copy.safetensors").read_bytes() == model.read_bytes()


def test_a_finished_run_is_replayed_to_the_same_bits(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["replay", str(finished.folder.path), "--data", TEXT, "--json"]) == 0
    replayed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (replayed["model_hash"], replayed["merges"]) == (finished.figures["model_hash"], finished.figures["merges"])
    assert replayed["complete"]


# --- runs that cannot start ------------------------------------------------------------------------------------------
def test_a_learner_that_cannot_start_ends_the_run_with_its_own_sentence(tmp_path: Path) -> None:
    with Run(tmp_path, "--device", "nonsense") as run:
        assert run.wait() == 2, run.output
        assert run.output.splitlines()[-1].startswith("diloco: --device nonsense")
        assert not run.folder.path.exists(), "the same command must work once the device is right"


def test_an_interrupt_before_any_training_leaves_nothing_behind(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.wait_for_output("is starting")
        assert run.interrupt(30) == 0, run.output
    assert not run.folder.path.exists()
