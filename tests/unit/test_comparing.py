"""Comparisons: what the numbers are said to show, what is trained only once, and that each method trains."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from decoupled_diloco.cli import run_command
from decoupled_diloco.common.config import TaskSettings
from decoupled_diloco.common.errors import DilocoError, SettingError
from decoupled_diloco.learner.text import load_corpus
from decoupled_diloco.simulator.cluster import Cluster
from decoupled_diloco.simulator.comparing import Results, differences, identity, interval, markdown, run, write
from decoupled_diloco.simulator.lives import members_of
from decoupled_diloco.simulator.methods import Cell, streams, train
from decoupled_diloco.simulator.settings import ClusterPlan, FailureModel
from decoupled_diloco.simulator.suites import SUITES, Contrast, Suite, suite
from decoupled_diloco.simulator.trained import Trained

TASK = TaskSettings(layers=1, width=32, sequence_length=32, batch_sequences=4)
OURS = Cell(name="ours", method="decoupled", steps=24, task=TASK, settings={"sync_every": 6, "fragments": 3})
THEIRS = replace(OURS, name="theirs", method="data-parallel")
PAIR = Suite(
    name="pair", asks="?", cells=(OURS, THEIRS), contrasts=(Contrast(cell="ours", against="theirs", within=0.01),)
)


def row(cell: Cell, seed: int, loss: float) -> dict[str, Any]:
    return {"cell": identity(cell), "name": cell.name, "seed": seed, "val_a": loss, "val_b": loss, "tokens": 1,
            "text": "text", "seconds": 1.0, "core_seconds": 1.0}  # fmt: skip


# --- what numbers show -----------------------------------------------------------------------------------------------
def test_the_interval_is_student_s() -> None:
    low, high = interval([1.0, 2.0, 3.0, 4.0])
    assert math.isclose((low + high) / 2, 2.5)
    assert math.isclose(high - 2.5, 3.182 * math.sqrt(5 / 3) / 2, rel_tol=1e-3)
    assert interval([1.0]) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("losses", "within", "verdict"),
    [
        ([2.0, 2.0, 2.0], 0.01, "within +1.0%: shown"),
        ([2.01, 2.0, 2.05], 0.01, "within +1.0%: not shown"),
        ([2.20, 2.21, 2.22], 0.01, "more than +1.0%"),
        ([2.20, 2.21, 2.22], None, "worse"),
        ([1.90, 1.91, 1.92], None, "better"),
        ([1.90, 2.01, 2.12], None, "no difference shown"),
        ([2.0], 0.01, "within +1.0%: not shown"),
    ],
)
def test_an_equality_is_claimed_only_where_the_interval_s_end_is_within_the_bound(
    losses: list[float], within: float | None, verdict: str
) -> None:
    judged = replace(PAIR, contrasts=(Contrast(cell="ours", against="theirs", within=within),))
    rows = [row(OURS, seed, loss) for seed, loss in enumerate(losses)]
    rows += [row(THEIRS, seed, 2.0) for seed in range(5)]
    (found,) = differences(judged, rows)
    assert found.verdict == verdict
    assert found.seeds == len(losses)
    assert math.isclose(found.mean, mean(losses) / 2 - 1, abs_tol=1e-12)


def test_seeds_are_paired() -> None:
    rows = [row(OURS, 1, 2.0), row(OURS, 2, 3.0), row(THEIRS, 2, 3.0), row(THEIRS, 3, 9.0)]
    (found,) = differences(PAIR, rows)
    assert (found.mean, found.seeds) == (0.0, 1)


# --- what is kept ----------------------------------------------------------------------------------------------------
def test_cells_that_were_trained_on_unequal_tokens_are_not_held_against_each_other() -> None:
    rows = [row(OURS, 0, 1.0) | {"tokens": 110}, row(THEIRS, 0, 2.0) | {"tokens": 100}]
    (found,) = differences(PAIR, rows)
    assert found.verdict == "nothing: +10.0% tokens"


def test_a_suite_that_chooses_settings_is_judged_on_part_a() -> None:
    rows = [row(OURS, 0, 1.0) | {"val_b": 9.0}, row(THEIRS, 0, 2.0) | {"val_b": 1.0}]
    (found,) = differences(replace(PAIR, part="A"), rows)
    assert found.mean == -0.5
    assert {name for name in SUITES if suite(name).part == "A"} == {"outer", "cadence", "adoption"}


def test_what_is_trained_already_is_not_trained_again_and_other_settings_are_other_cells(tmp_path: Path) -> None:
    results = Results(tmp_path, PAIR, "text")
    results.add(row(OURS, 0, 2.0))
    again = Results(tmp_path, PAIR, "text")
    assert [(cell.name, seed) for cell, seed in again.missing(2)] == [("theirs", 0), ("ours", 1), ("theirs", 1)]
    assert len(list(Results(tmp_path, PAIR, "another text").missing(2))) == 4
    changed = replace(PAIR, cells=(replace(OURS, steps=25), THEIRS))
    assert len(list(Results(tmp_path, changed, "text").missing(1))) == 2


@pytest.mark.parametrize("line", ["nothing", "[]", '{"cell": "x"}'])
def test_a_file_that_holds_something_else_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "pair.jsonl").write_text(f"{line}\n")
    with pytest.raises(SettingError, match=r"pair\.jsonl, line 1: no result of a comparison"):
        Results(tmp_path, PAIR, "text")


def test_tables_and_pictures_are_made_from_the_results_alone(tmp_path: Path) -> None:
    results = Results(tmp_path, PAIR, "text")
    for seed in range(3):
        results.add(row(OURS, seed, 2.0 + seed / 1000))
        results.add(row(THEIRS, seed, 2.0))
    paths = write(results, tmp_path)
    assert [path.suffix for path in paths] == [".csv", ".md", ".png"]
    assert all(path.stat().st_size for path in paths)
    assert "| ours | theirs | +0.05% |" in markdown(results)
    assert paths[0].read_text().count("\n") == 7


# --- what is trained -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cell", [
    THEIRS,
    replace(THEIRS, method="lone"),
    replace(OURS, method="synchronous"),
    OURS,
    replace(OURS, merge="mean", feedback=False),
    replace(OURS, cluster={"absent": 0.3, "absence_seconds": 3}),
    replace(OURS, cluster={"chips": 2_400_000}),
], ids=lambda cell: f"{cell.method} {dict(cell.cluster)} {cell.merge}")  # fmt: skip
def test_every_method_trains_and_is_a_function_of_its_seed(cell: Cell) -> None:
    corpus = load_corpus(None, TASK.sequence_length)
    first, again = train(cell, 1, corpus), train(cell, 1, corpus)
    assert first == again
    assert first.val_b < 5.2, "better than what it began with, 5.55"
    assert first.tokens > 0


def test_one_synchronous_learner_is_a_lone_one() -> None:
    corpus = load_corpus(None, TASK.sequence_length)
    exact = {"codec_up": "f32", "codec_down": "f32", "sync_every": 6}
    synchronous = replace(OURS, method="synchronous", learners=1, settings=exact)
    lone = replace(OURS, method="lone")
    assert math.isclose(train(synchronous, 0, corpus).val_b, train(lone, 0, corpus).val_b, rel_tol=1e-4)


def test_all_methods_draw_the_same_data_for_a_seed() -> None:
    corpus, settings = load_corpus(None, TASK.sequence_length), OURS.run_settings(5)
    substance = Trained(settings, TASK, corpus)
    outcome = Cluster(settings, substance, members_of(ClusterPlan(), FailureModel(), 5, 1e4)).run()
    drawn = []
    for learner in outcome.learners:
        worker = substance.worker(learner["name"], learner["incarnation"], None)
        drawn.append(next(worker._batches)[0])
        worker.close()
    plain = [next(stream)[0] for stream in streams(OURS, 5, corpus, 2)]
    others = [next(stream)[0] for stream in streams(OURS, 6, corpus, 2)]
    assert all(torch.equal(one, other) for one, other in zip(drawn, plain, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(drawn, others, strict=True))


def test_a_cell_that_cannot_be_trained_does_not_keep_the_others_from_it(tmp_path: Path) -> None:
    impossible = replace(OURS, name="impossible", settings={"quorum": 9})
    both = replace(PAIR, cells=(impossible, THEIRS), contrasts=())
    said: list[str] = []
    with pytest.raises(DilocoError, match=r"1 of 2 could not be trained, the first is impossible, seed 0"):
        run(both, tmp_path, data=None, seeds=1, jobs=2, minutes=math.inf, said=said.append)
    assert len(said) == 2
    assert (tmp_path / "pair.jsonl").read_text().count('"name": "theirs"') == 1


def test_a_cell_is_what_its_map_says() -> None:
    assert Cell.from_map(json.loads(json.dumps(OURS.to_map()))) == OURS
    assert identity(OURS) != identity(replace(OURS, settings={"sync_every": 7}))


# --- suites ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SUITES)
def test_every_suite_can_be_run(name: str) -> None:
    made = suite(name)
    assert made.asks.endswith(("?", ")?"))
    for cell in made.cells:
        cell.run_settings(seed=0)
        plan, failures = ClusterPlan(**{"learners": cell.learners, **cell.cluster}), FailureModel(**cell.failures)
        assert len(members_of(plan, failures, 0, 10.0)) == cell.learners


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--suite", "nonsense"], "no suite is named 'nonsense'; there are quick, "),
        (["--seeds", "-1"], "--seeds must lie between 0 and 1000"),
        (["--data", "nowhere.txt"], "cannot read nowhere.txt"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_command(["compare", "--out", str(tmp_path / "out"), *arguments]) == 2
    sentence = capsys.readouterr().err
    assert said in sentence
    assert sentence.count("\n") == 1
