"""The suites of the evidence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decoupled_diloco.cli.commands import run_command
from decoupled_diloco.experiments.catalogue import SUITES, suite
from decoupled_diloco.simulator.availability import members_of
from decoupled_diloco.simulator.cost_only import CostOnlyModel
from decoupled_diloco.simulator.real_training import version_zero
from decoupled_diloco.simulator.settings import FailureModel
from decoupled_diloco.simulator.virtual_run import cluster_of
from decoupled_diloco.syncer.round_events import Merge


@pytest.mark.parametrize("name", SUITES)
def test_every_cell_of_a_suite_can_be_planned(name: str) -> None:
    made = suite(name)
    assert made.asks.endswith("?")
    for cell in made.cells:
        version_zero(cell.run_settings(seed=0), cell.task)
        plan, failures = cell.cluster_plan(), FailureModel(**cell.failures)
        assert len(members_of(plan, failures, 0, 10.0)) == plan.learners + plan.late


def test_cells_of_the_suite_about_pace_differ_in_what_is_merged() -> None:
    made = suite("pace")
    merged: dict[str, list[Any]] = {}
    for cell in (each for each in made.cells if not each.name.endswith("same T")):
        settings = replace(cell.run_settings(0), steps=96)
        cut = version_zero(settings, cell.task)[1]
        counted = CostOnlyModel(settings, parameters=cut.parameters, tokens_a_step=512, fragments=cut.P)
        rounds, seen = counted.rounds, merged.setdefault(cell.name, [])
        inner = rounds.merged

        def merged_too(merge: Merge, *given: Any, seen: list[Any] = seen, inner: Any = inner) -> None:
            seen.append((merge.call.slot, [(answer.who, answer.steps) for answer in merge.answers]))
            inner(merge, *given)

        rounds.merged = merged_too  # type: ignore[method-assign,assignment]
        cluster_of(cell.cluster_plan(), FailureModel(), settings, counted).run()
    assert merged["one at half speed, K=1, grace"] == merged.pop("one at half speed, K=M, no grace"), "as it should be"
    assert len({repr(log) for log in merged.values()}) == len(merged)


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
