"""docs/results.md: its tables are what the results beside it give, for the suites and settings as they are now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from decoupled_diloco.simulator.findings import markdown
from decoupled_diloco.simulator.questions import SUITES, suite

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "results.md").read_text(encoding="utf-8")
LINES = set(PAGE.splitlines())
FILES = sorted((DOCS / "results").glob("*.jsonl"))


def test_every_suite_has_results_or_is_said_to_have_none() -> None:
    assert len(FILES) > 5
    missing = {name for name in SUITES if f"`{name}`" not in PAGE and f"## {name}" not in LINES}
    assert not missing
    assert {path.stem for path in FILES} == {name for name in SUITES if f"## {name}" in LINES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_tables_are_those_of_the_results_and_no_result_is_of_other_settings_than_now(path: Path) -> None:
    made = suite(path.stem)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert {row["cell"] for row in rows} <= {cell.identity for cell in made.cells}
    assert len({(row["cell"], row["seed"]) for row in rows}) == len(rows)
    assert len({row["text"] for row in rows}) == 1
    tables = [line for line in markdown(made, rows).splitlines() if line.startswith(("|", "    diloco"))]
    assert tables
    assert [line for line in tables if line not in LINES] == []
