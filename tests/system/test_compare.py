"""`diloco compare` and its processes: interrupts, kills, full disks, cells that fail."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from comparison_cells import OURS, PAIR, TASK, THEIRS, row
from decoupled_diloco.experiments import runner
from decoupled_diloco.experiments.runner import ResultsFile, run


def test_a_cell_that_cannot_be_trained_does_not_keep_the_others_from_it(tmp_path: Path) -> None:
    impossible = replace(OURS, name="impossible", settings={"quorum": 9})
    diverges = replace(THEIRS, name="diverges", task=replace(TASK, inner_lr=1e30))
    all_three = replace(PAIR, cells=(impossible, diverges, THEIRS), contrasts=())
    said: list[str] = []
    results, failed = run(all_three, tmp_path, data=None, seeds=1, jobs=2, minutes=math.inf, report=said.append)
    assert failed == ["impossible, seed 0", "diverges, seed 0"]
    assert [r["name"] for r in results.rows] == ["theirs"]
    assert len(said) == 3
    assert any("not finite" in sentence for sentence in said)


def test_ctrl_c_keeps_what_is_being_trained(tmp_path: Path) -> None:
    # two jobs: when one has just ended, another one is under way
    command = [sys.executable, "-P", "-m", "decoupled_diloco.cli", "compare", "--jobs", "2", "--out", str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    assert "(23 of 24 left)" in child.stderr.readline()
    child.send_signal(signal.SIGINT)
    rest = child.communicate()[1]
    assert child.returncode == 130, rest
    assert "what is being trained is finished and kept" in rest
    assert (tmp_path / "quick.jsonl").read_text().count("\n") == 1 + rest.count(" left)") >= 2


def test_an_interrupt_while_a_cell_is_queued_keeps_that_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(ProcessPoolExecutor):
        def submit(self, *arguments: Any, **more: Any) -> Future[Any]:
            future = super().submit(*arguments, **more)
            os.kill(os.getpid(), signal.SIGINT)
            return future

    monkeypatch.setattr(runner, "ProcessPoolExecutor", Interrupted)
    cells = tuple(replace(THEIRS, name=name, method="lone", learners=1, steps=2) for name in ("first", "second"))
    with pytest.raises(KeyboardInterrupt):
        run(replace(PAIR, cells=cells, contrasts=()), tmp_path, data=None, seeds=1, jobs=1, minutes=math.inf,
            report=lambda _: None)  # fmt: skip
    assert [json.loads(line)["name"] for line in (tmp_path / "pair.jsonl").read_text().splitlines()] == ["first"]


def test_no_process_is_left_of_a_comparison_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "decoupled_diloco.cli", "compare", "--jobs", "2", "--out", str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    assert child.stderr.readline()
    child.kill()
    rest = child.communicate()[1]  # ends when everybody has gone who held the pipe
    assert "Traceback" not in rest


def test_on_a_full_disk_a_comparison_stops_and_loses_what_it_cannot_keep_and_no_more(tmp_path: Path) -> None:
    ResultsFile(tmp_path, PAIR, "text").add(row(OURS, 0, 2.0))
    size = (tmp_path / "pair.jsonl").stat().st_size
    code = f"""
import resource, signal, math, sys
from pathlib import Path
from dataclasses import replace
from decoupled_diloco.common.config import TaskSettings
from decoupled_diloco.common.errors import DilocoError
from decoupled_diloco.experiments import methods, runner, suites
task = TaskSettings(layers=1, width=32, sequence_length=32, batch_sequences=4)
cells = tuple(methods.Cell(name=str(n), method="lone", learners=1, steps=2, task=task) for n in range(4))
suite = suites.Suite(name="pair", asks="?", cells=cells)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({size} + 40, {size} + 40))
said = []
try:
    runner.run(suite, Path({str(tmp_path)!r}), data=None, seeds=1, jobs=1, minutes=math.inf, report=said.append)
except DilocoError as wrong:
    print(wrong, said)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert "pair.jsonl cannot be written: " in done.stdout, done.stderr
    assert done.stdout.endswith("[]\n"), "nothing is said to be kept"
    assert [r["seed"] for r in ResultsFile(tmp_path, PAIR, "text").rows] == [0]
