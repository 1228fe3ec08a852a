from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch
from decoupled_diloco.common.config import TaskSettings
from decoupled_diloco.learner.task.evaluator import EvaluationLog, Evaluator, follow
from decoupled_diloco.learner.task.text import load_corpus
from decoupled_diloco.learner.task.transformer import Transformer
from decoupled_diloco.monitor.report import first_and_last_loss, read_evaluations

if TYPE_CHECKING:
    from decoupled_diloco.learner.observer import Observer

TASK = TaskSettings(layers=1, width=32, sequence_length=16)


class ScriptedRun:
    """What the evaluator sees of a run that goes through the given versions, one each time it loads."""

    def __init__(self, *versions: int) -> None:
        self._coming = list(versions)
        self.versions = (self._coming.pop(0),) * 2
        self.loaded: list[int] = []

    @property
    def finished(self) -> bool:
        return not self._coming

    @property
    def progress(self) -> SimpleNamespace:
        return SimpleNamespace(step=self.versions[0] * 10)

    def check(self) -> None:
        pass

    def load(self) -> None:
        self.loaded.append(self.versions[0])
        if self._coming:
            self.versions = (self._coming.pop(0),) * 2


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are many times slower with several threads on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def judge(tmp_path: Path) -> Evaluator:
    (tmp_path / "text").write_bytes(bytes(range(256)) * 20)
    corpus = load_corpus(tmp_path / "text", TASK.sequence_length)
    return Evaluator(Transformer(TASK, 0), corpus, TASK, 0)


def judged(folder: Path, judge: Evaluator, run: ScriptedRun) -> list[tuple[int, str, str]]:
    follow(cast("Observer", run), judge, EvaluationLog(folder), 0.0)
    return [(e.t, e.part, e.size) for e in read_evaluations(folder)]


def test_a_run_is_judged_in_full_at_version_zero_and_at_its_end_and_in_small_between(
    tmp_path: Path, judge: Evaluator
) -> None:
    run = ScriptedRun(0, 1, 2, 3)
    assert judged(tmp_path, judge, run) == [
        (0, "B", "full"), (10, "B", "small"), (20, "B", "small"), (30, "A", "full"), (30, "B", "full"),
    ]  # fmt: skip
    assert run.loaded == [0, 1, 2, 3]
    first_and_last = first_and_last_loss(read_evaluations(tmp_path))
    assert first_and_last is not None
    assert first_and_last[0] == pytest.approx(5.545177)


def test_an_evaluator_that_comes_too_late_for_version_zero_judges_what_the_seed_makes(
    tmp_path: Path, judge: Evaluator
) -> None:
    run = ScriptedRun(7, 8)
    assert judged(tmp_path, judge, run)[0] == (0, "B", "full")
    assert run.loaded[0] == 7


def test_an_evaluator_that_starts_again_continues_in_the_same_record(tmp_path: Path, judge: Evaluator) -> None:
    clock = iter(range(100, 1000, 5))
    first = EvaluationLog(tmp_path, lambda: float(next(clock)))
    first.add(judge.evaluate("B", "full", 0))
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"seconds": 9')
    second = EvaluationLog(tmp_path, lambda: float(next(clock)))
    assert not first.has_version_zero
    assert second.has_version_zero
    second.add(judge.evaluate("B", "small", 50))
    lines = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["seconds"] for line in lines] == [5.0, 10.0]


def test_the_record_tells_what_an_evaluation_cost_and_what_the_text_is(tmp_path: Path, judge: Evaluator) -> None:
    record = EvaluationLog(tmp_path)
    record.add(judge.evaluate("A", "small", 3))
    (row,) = read_evaluations(tmp_path)
    assert row.cpu_seconds >= 0
    assert row.t == 3
    (tmp_path / "text").write_bytes(b"abc" * 1000)
    record.write_text_facts(load_corpus(tmp_path / "text", 16))
    facts = json.loads((tmp_path / "text.json").read_text())
    assert facts["tokens"] == 3000
    assert set(facts["baselines"]["B"]) == {"uniform", "unigram", "bigram"}
