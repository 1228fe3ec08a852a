"""The results file of a comparison: rows are kept, checked, and trained once."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from comparison_cells import OURS, PAIR, THEIRS, row
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.experiments.analysis import differences, markdown
from decoupled_diloco.experiments.catalogue import SUITES, suite
from decoupled_diloco.experiments.runner import ResultsFile, run, write
from decoupled_diloco.experiments.suites import Equal


def test_cells_that_were_trained_on_unequal_tokens_are_not_held_against_each_other() -> None:
    rows = [row(OURS, seed, 1.0) | {"tokens": more, "tokens_merged": 101} for seed, more in ((0, 110), (1, 90))]
    rows += [row(THEIRS, seed, 2.0) | {"tokens": 100, "tokens_merged": 100} for seed in (0, 1)]
    (contrast,) = PAIR.contrasts
    verdicts = {
        equal: differences(replace(PAIR, contrasts=(replace(contrast, equal=equal),)), rows)[0]
        for equal in get_args(Equal)
    }
    assert verdicts["trained"].verdict == "nothing: +10.0% tokens", "too many here and too few there are not equal"
    assert verdicts["merged"].verdict == verdicts["neither"].verdict == "within +1.0%: shown"
    assert math.isclose(verdicts["neither"].tokens, 0.1), "how much they differ is told all the same"


def test_what_is_kept_of_a_gain_is_a_share_of_the_way_from_a_lone_learner_to_the_reference() -> None:
    alone = replace(THEIRS, name="alone", method="lone")
    judged = replace(PAIR, cells=(OURS, THEIRS, alone), contrasts=(replace(PAIR.contrasts[0], alone="alone"),))
    rows = [row(cell, seed, loss) for cell, loss in ((OURS, 2.2), (THEIRS, 2.0)) for seed in range(3)]
    assert differences(judged, rows) == [], "nothing is said without the lone learner"
    rows += [row(alone, seed, 3.0) for seed in range(3)]
    (found,) = differences(judged, rows)
    assert found.kept is not None
    assert math.isclose(found.kept, 0.8)
    rows[0]["val_b"], rows[-1]["val_b"] = 2.4, 2.8
    (found,) = differences(judged, rows)
    assert [round(share, 3) for share in (found.kept or 0, found.kept_least or 0, found.kept_most or 0)] == [
        0.714, 0.6, 0.8
    ]  # fmt: skip


def test_of_a_gain_that_is_not_shown_no_share_is_reported() -> None:
    alone = replace(THEIRS, name="alone", method="lone")
    judged = replace(PAIR, cells=(OURS, THEIRS, alone), contrasts=(replace(PAIR.contrasts[0], alone="alone"),))
    rows = [row(cell, seed, loss) for cell, losses in ((OURS, (2.2, 2.2)), (THEIRS, (2.0, 2.0)), (alone, (1.9, 3.0)))
            for seed, loss in enumerate(losses)]  # fmt: skip
    (found,) = differences(judged, rows)
    assert (found.kept, found.kept_least, found.kept_most) == (None, None, None)


def test_the_best_of_a_search_is_named_and_whether_the_grid_ends_there(tmp_path: Path) -> None:
    rates = [replace(OURS, name=f"lr {n}") for n in range(3)]
    results = ResultsFile(
        tmp_path, replace(PAIR, cells=tuple(rates), contrasts=(), groups=[("lr 0", "lr 1", "lr 2")]), ""
    )
    for cell, loss in zip(rates, (2.0, 1.5, 1.7), strict=True):
        results.rows.append(row(cell, 0, loss))
    assert "| lr 1 | 1.5000 | inside the grid | 1 |" in markdown(results.suite, results.rows)
    results.rows.append(row(rates[2], 1, 0.1))
    assert "| lr 1 | 1.5000 | inside the grid | 1 |" in markdown(results.suite, results.rows), (
        "the others have no second seed yet"
    )
    results.rows += [row(rates[0], 1, 2.0), row(rates[1], 1, 2.0)]
    assert "| lr 2 | 0.9000 | at the grid's edge | 2 |" in markdown(results.suite, results.rows)


def test_a_suite_that_chooses_settings_is_judged_on_part_a() -> None:
    rows = [row(OURS, 0, 1.0) | {"val_b": 9.0}, row(THEIRS, 0, 2.0) | {"val_b": 1.0}]
    (found,) = differences(replace(PAIR, part="A"), rows)
    assert found.mean == -0.5
    chooses = {name for name in SUITES if suite(name).groups} | {
        "gap",
        "outer",
        "outer-elsewhere",
        "momentum",
        "cadence",
        "adoption",
    }
    assert {name for name in SUITES if suite(name).part == "A"} == chooses


def test_what_is_trained_already_is_not_trained_again_and_other_settings_are_other_cells(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path, PAIR, "text")
    results.add(row(OURS, 0, 2.0))
    again = ResultsFile(tmp_path, PAIR, "text")
    assert [(cell.name, seed) for cell, seed in again.missing(2)] == [("theirs", 0), ("ours", 1), ("theirs", 1)]
    assert len(list(ResultsFile(tmp_path, PAIR, "another text").missing(2))) == 4
    changed = replace(PAIR, cells=(replace(OURS, steps=25), THEIRS))
    assert len(list(ResultsFile(tmp_path, changed, "text").missing(1))) == 2


def test_half_a_line_that_a_killed_run_left_is_taken_away_and_the_file_continues_behind_it(tmp_path: Path) -> None:
    ResultsFile(tmp_path, PAIR, "text").add(row(OURS, 0, 2.0))
    path = tmp_path / "pair.jsonl"
    path.write_bytes(path.read_bytes() + b'{"cell": "x')
    again = ResultsFile(tmp_path, PAIR, "text")
    with again.exclusive():
        again.add(row(THEIRS, 0, 2.0))
    assert [r["name"] for r in ResultsFile(tmp_path, PAIR, "text").rows] == ["ours", "theirs"]


def test_a_suite_that_asks_again_takes_seeds_of_its_own(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path, PAIR, "text")
    for seed in range(4):
        results.add(row(OURS, seed, 2.0))
    again = ResultsFile(tmp_path, replace(PAIR, first_seed=3), "text")
    assert [r["seed"] for r in again.rows] == [3]
    assert [(cell.name, seed) for cell, seed in again.missing(2)] == [("theirs", 3), ("ours", 4), ("theirs", 4)]


def test_two_comparisons_do_not_write_to_one_file(tmp_path: Path) -> None:
    with (
        ResultsFile(tmp_path, PAIR, "text").exclusive(),
        pytest.raises(SettingError, match="by another comparison; wait"),
    ):
        run(PAIR, tmp_path, data=None, seeds=1, jobs=1, minutes=math.inf, report=lambda _: None)
    assert (tmp_path / "pair.jsonl").read_bytes() == b""


def test_a_foreign_file_is_not_touched(tmp_path: Path) -> None:
    for content in (b"a note without an end", b"{}\nanother", b'{"whose": 1}\n{"cut'):
        (tmp_path / "pair.jsonl").write_bytes(content)
        with pytest.raises(SettingError, match="no result of a comparison; name another --out"):
            run(PAIR, tmp_path, data=None, seeds=1, jobs=1, minutes=math.inf, report=lambda _: None)
        assert (tmp_path / "pair.jsonl").read_bytes() == content


def test_a_file_that_is_no_text_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "pair.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(SettingError, match=r"pair\.jsonl cannot be used: it is no text; name another --out"):
        ResultsFile(tmp_path, PAIR, "text")


@pytest.mark.parametrize(
    ("column", "value"),
    [("cell", []), ("name", 5), ("seed", "0"), ("seed", 0.5), ("seed", True), ("val_b", None), ("val_a", math.nan),
     ("val_b", 0.0), ("tokens", 0), ("core_seconds", "1")],
)  # fmt: skip
def test_a_row_that_no_comparison_wrote_is_named(tmp_path: Path, column: str, value: object) -> None:
    (tmp_path / "pair.jsonl").write_text(json.dumps(row(OURS, 0, 2.0) | {column: value}) + "\n")
    with pytest.raises(SettingError, match=r"line 1: no result of a comparison"):
        ResultsFile(tmp_path, PAIR, "text")


def test_a_result_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    lines = [row(OURS, 0, 2.0), row(OURS, 1, 2.1), row(OURS, 0, 3.0)]
    (tmp_path / "pair.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(r["seed"], r["val_b"]) for r in ResultsFile(tmp_path, PAIR, "text").rows] == [(0, 2.0), (1, 2.1)]


def test_what_is_no_file_is_one_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pair.jsonl")
    with pytest.raises(SettingError, match=r"pair\.jsonl is no file; name another --out"):
        ResultsFile(tmp_path, PAIR, "text")


@pytest.mark.parametrize("line", ["nothing", "[]", '{"cell": "x"}', "[" * 100_000])
def test_a_file_that_holds_something_else_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "pair.jsonl").write_text(f"{line}\n")
    with pytest.raises(SettingError, match=r"pair\.jsonl, line 1: no result of a comparison"):
        ResultsFile(tmp_path, PAIR, "text")


def test_tables_and_pictures_are_made_from_the_results_alone(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path, PAIR, "text")
    for seed in range(3):
        results.add(row(OURS, seed, 2.0 + seed / 1000))
        results.add(row(THEIRS, seed, 2.0))
    paths = write(results, tmp_path)
    assert [path.suffix for path in paths] == [".csv", ".md", ".png"]
    assert all(path.stat().st_size for path in paths)
    assert "| ours | theirs | +0.05% |" in markdown(results.suite, results.rows)
    assert paths[0].read_text().count("\n") == 7
    assert paths[0].read_text().startswith("name,method,M,T,H,inner_lr,outer_lr,outer_momentum,cell,seed,")
    results.rows.clear()
    assert write(results, tmp_path) == paths[:2]
    assert not paths[2].exists(), "of other results"


def test_how_much_of_a_suite_is_missing_is_above_its_table() -> None:
    some = [row(OURS, seed, 2.0) for seed in range(3)]
    assert "; 3 seeds (3 of 16 trainings); " in markdown(PAIR, some)
    assert "; 3 seeds; " in markdown(replace(PAIR, cells=(OURS,), contrasts=(), seeds=3), some)


def test_a_trend_is_drawn_as_lines(tmp_path: Path) -> None:
    trend = replace(PAIR, along="steps", contrasts=(replace(PAIR.contrasts[0], line="M = 2", at=24),))
    results = ResultsFile(tmp_path, trend, "text")
    results.rows += [row(OURS, 0, 2.1), row(THEIRS, 0, 2.0)]
    assert write(results, tmp_path)[2].stat().st_size > 1000
