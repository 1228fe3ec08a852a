from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from decoupled_diloco.monitor.report import first_and_last_loss, read_evaluations, write_report

ROWS: list[dict[str, Any]] = [
    {"seconds": 0.0, "t": 0, "part": "A", "size": "full", "val_loss": 5.545, "cpu_seconds": 1.0},
    {"seconds": 0.0, "t": 0, "part": "B", "size": "full", "val_loss": 5.546, "cpu_seconds": 1.0},
    {"seconds": 15.0, "t": 100, "part": "B", "size": "small", "val_loss": 2.5, "cpu_seconds": 0.2},
    {"seconds": 30.0, "t": 200, "part": "A", "size": "full", "val_loss": 1.9, "cpu_seconds": 1.0},
    {"seconds": 30.0, "t": 200, "part": "B", "size": "full", "val_loss": 2.0, "cpu_seconds": 1.0},
]
TEXT = {
    "source": "a $strange_ \u6587 folder",
    "tokens": 12_345,
    "sha256": "ab" * 32,
    "holds_out": True,
    "baselines": {"B": {"uniform": 5.545, "unigram": 3.2, "bigram": 2.5}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "text.json").write_text(json.dumps(TEXT))
    return tmp_path


def test_the_report_is_a_table_with_a_row_an_evaluation_and_a_picture(folder: Path) -> None:
    assert [path.name for path in write_report(folder)] == ["metrics.csv", "loss.png"]
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["val_loss"]) for row in rows] == [row["val_loss"] for row in ROWS]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in folder.iterdir()) == [
        "evaluations.jsonl", "loss.png", "metrics.csv", "text.json",
    ]  # fmt: skip


def test_a_report_can_be_made_of_a_single_evaluation_and_without_baselines(folder: Path) -> None:
    (folder / "evaluations.jsonl").write_text(json.dumps(ROWS[1]) + "\n")
    (folder / "text.json").unlink()
    assert len(write_report(folder)) == 2


def test_a_run_that_was_never_judged_has_an_empty_table_and_no_picture(tmp_path: Path) -> None:
    assert [path.name for path in write_report(tmp_path)] == ["metrics.csv"]
    assert (tmp_path / "metrics.csv").read_text().strip() == "seconds,t,part,size,val_loss,cpu_seconds"
    assert first_and_last_loss(read_evaluations(tmp_path)) is None


def test_half_a_line_of_a_killed_evaluator_costs_that_line_only(folder: Path) -> None:
    with (folder / "evaluations.jsonl").open("a") as file:
        file.write('{"seconds": 31.0, "t": 2')
    assert len(read_evaluations(folder)) == len(ROWS)


def test_first_and_last_loss_are_full_evaluations_of_the_reported_part(folder: Path) -> None:
    assert first_and_last_loss(read_evaluations(folder)) == (5.546, 2.0)
    assert first_and_last_loss(read_evaluations(folder), "A") == (5.545, 1.9)


def test_reading_evaluations_loads_neither_matplotlib_nor_torch(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from decoupled_diloco.monitor import report; "
        f"report.read_evaluations(Path({str(folder)!r})); print({{'torch', 'matplotlib'}} & set(sys.modules))"
    )
    told = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.strip() == "set()"
