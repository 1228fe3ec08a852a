"""docs/results.md: its tables are what the results beside it give, for the suites and settings as they are now.

So is each figure of its text, and of README.md's, that comes from them.

A figure in the text has its source in a comment after its paragraph or table, `<!-- rows`, in the order of the text:

    budget: X, M={2,4} / Y, M={2,4}       two figures, X against Y: the mean and, where quoted, its interval
    momentum, part A: C / D - A / B       by how much the one difference exceeds the other, paired by seed
    codecs + int4: A / B                  over the seeds of both suites; `learners without 0 1` leaves two seeds out
    warm: kept A / B / C                  share of B's gain over C that A keeps; where quoted, a seed's least and most
    pace: merge_participation of A        a column's mean; `virtual_seconds of A / B`: the ratio of two
    goodput: 150000                       what `diloco simulate goodput --simulated-steps 480` says of so many chips

Without a name before the colon the heading's suite is meant. What rows give is written without a space before the
percent sign, all else (settings, the paper's figures) with one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from decoupled_diloco.common.config import MOMENTUM_ROUNDS, RunSettings
from decoupled_diloco.experiments.analysis import _difference, _kept, differences, interval, markdown
from decoupled_diloco.experiments.catalogue import SUITES, suite
from decoupled_diloco.experiments.suites import SMALL, Contrast, H
from decoupled_diloco.experiments.tuning_suites import BUDGETS
from decoupled_diloco.learner.task.transformer import Transformer
from decoupled_diloco.simulator.goodput import simulate
from decoupled_diloco.simulator.settings import FailureModel

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGE = (DOCS / "results.md").read_text(encoding="utf-8")
TROUBLESHOOTING = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
LINES = set(PAGE.splitlines())
BLOCK_SIZE = "block-size"
"""Results of benchmarks/block_size.py, which no suite can give: the size is a constant of the wire."""
FILES = sorted(path for path in (DOCS / "results").glob("*.jsonl") if path.stem != BLOCK_SIZE)
NUMBER = r"[+-]?\d+(?:\.\d+)?"
FIGURE = re.compile(
    rf"(?:\| (?P<bound>{NUMBER}%)? ?\| )?(?<![\w.+-])(?P<mean>{NUMBER})(?:%| times as long)"
    rf"(?: [(|] ?(?P<low>{NUMBER})% to (?P<high>{NUMBER})%)?(?: \| (?P<seeds>\d+) \| (?P<verdict>[^|]*) \|)?"
)
SOURCES = re.compile(r"<!-- rows\n(.*?)\n-->", re.DOTALL)
OF_OTHERS = {"95 %", "30 %", "80 %"}
"""Percentages that are no results: of intervals, of a setting, and the paper's."""


@cache
def rows_of(name: str) -> list[dict[str, Any]]:
    lines = (DOCS / "results" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@cache
def tables(name: str) -> list[str]:
    return [line for line in markdown(suite(name), rows_of(name)).splitlines() if line.startswith(("|", "    diloco"))]


def test_every_suite_has_results_or_is_said_to_have_none() -> None:
    assert len(FILES) > 5
    missing = {name for name in SUITES if f"`{name}`" not in PAGE and f"## {name}" not in LINES}
    assert not missing
    assert {path.stem for path in FILES} == {name for name in SUITES if f"## {name}" in LINES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_tables_are_those_of_the_results_and_no_result_is_of_other_settings_than_now(path: Path) -> None:
    rows = rows_of(path.stem)
    assert {row["cell"] for row in rows} <= {cell.identity for cell in suite(path.stem).cells}
    assert len({(row["cell"], row["seed"]) for row in rows}) == len(rows)
    assert len({row["text"] for row in rows}) == 1
    assert tables(path.stem)
    assert [line for line in tables(path.stem) if line not in LINES] == []


class Source:
    """One line of such a comment."""

    def __init__(self, line: str, section: str) -> None:
        where, _, self.what = line.rpartition(": ")
        where, _, without = (where or section).partition(" without ")
        where, _, self.part = where.partition(", part ")
        self.names = where.split(" + ")
        skipped = {int(seed) for seed in without.split()}
        self.rows = (
            [row for name in self.names for row in rows_of(name) if row["seed"] not in skipped]
            if self.names != ["goodput"]
            else []
        )

    @property
    def _suite_part(self) -> str:
        return "A" if self.names == [BLOCK_SIZE] else suite(self.names[0]).part

    def losses(self, name: str) -> dict[int, float]:
        figure = f"val_{(self.part or self._suite_part).lower()}"
        found = {row["seed"]: row[figure] for row in self.rows if row["name"] == name}
        assert found, f"{self.names} have no cell {name!r}"
        return found

    def differences(self, contrast: str) -> dict[int, float]:
        ours, theirs = map(self.losses, contrast.split(" / "))
        return {seed: ours[seed] / theirs[seed] - 1 for seed in ours if seed in theirs}

    def column(self, name: str, cell: str) -> float:
        return float(mean(row[name] for row in self.rows if row["name"] == cell))

    def figures(self) -> tuple[float, ...]:
        """The figure, and where there is one the interval."""
        if self.names == ["goodput"]:
            chips = int(self.what)
            return (simulate("decoupled", 8, chips, FailureModel(), steps=480, seed=0).goodput,)
        if column := re.match(r"(\w+) of (.*)", self.what):
            first, *second = (self.column(column[1], cell) for cell in column[2].split(" / "))
            return (first / second[0] if second else first,)
        if self.what.startswith("kept "):
            shares = _kept(*(list(self.losses(c).values()) for c in self.what.removeprefix("kept ").split(" / ")))
            return tuple(share for share in shares if share is not None)
        more, *less = (self.differences(contrast) for contrast in self.what.split(" - "))
        values = [more[seed] - sum(other[seed] for other in less) for seed in more]
        return (mean(values), *interval(values))

    def claim(self) -> tuple[str, str, str]:
        """Of a row of the table of claims: bound, seeds and verdict."""
        cell, against = self.what.split(" / ")
        asked = [c for name in self.names for c in suite(name).contrasts if (c.cell, c.against) == (cell, against)]
        contrast = asked[0] if asked else Contrast(cell=cell, against=against)
        found = _difference(contrast, self.rows, f"val_{self._suite_part.lower()}")
        assert found
        bound = "" if found.within is None else f"{found.within:+.1%}"
        return bound, str(found.seeds), found.verdict.rpartition(": ")[2]


def expanded(line: str) -> Iterator[str]:
    """`M={2,4} / M={2,4}` -> `M=2 / M=2` and `M=4 / M=4`."""
    between = re.split(r"\{.*?\}", line)
    choices = [found.split(",") for found in re.findall(r"\{(.*?)\}", line)]
    for chosen in zip(*choices, strict=True) if choices else [()]:
        yield "".join(chain(*zip_longest(between, chosen, fillvalue="")))


def spelled(value: float, like: str) -> str:
    """`value` as `like` is written: with as many decimals, and a sign where that has one."""
    decimals = len(like.partition(".")[2])
    return f"{value:{'+' if like[0] in '+-' else ''}.{decimals}f}"


def wrong(figure: re.Match[str], source: Source) -> str:
    """Empty, or what the rows say instead."""
    scale = 1 if figure[0].endswith("long") else 100
    quoted = [figure[name] for name in ("mean", "low", "high") if figure[name] is not None]
    found = [scale * value for value in source.figures()][: len(quoted)]
    rows = [spelled(value, like) for value, like in zip(found, quoted, strict=True)]
    if figure["verdict"] is not None:
        quoted += [figure["bound"] or "", figure["seeds"], figure["verdict"]]
        rows += source.claim()
    return "" if quoted == rows else f"{figure[0]!r} is by the rows {', '.join(rows)} ({source.what})"


def hand_written(page: str) -> Iterator[tuple[str, str, list[str] | None]]:
    """(heading, text, the sources of its figures or None) of a page, what is generated or shown as code left out."""
    for section in re.split(r"^#+ ", page, flags=re.MULTILINE):
        heading, _, body = section.partition("\n")
        generated = {*tables(heading)} if heading in SUITES else set()
        lines = [line for line in body.splitlines() if line not in generated and not line.startswith("    ")]
        *pairs, last = SOURCES.split("\n".join(lines))
        for text, sources in zip(pairs[::2], pairs[1::2], strict=True):
            yield heading, " ".join(text.split()), [one for line in sources.splitlines() for one in expanded(line)]
        yield heading, " ".join(last.split()), None


CHECKED = [
    pytest.param(heading, text, sources, id=f"{heading}-{n}")
    for n, (heading, text, sources) in enumerate([*hand_written(PAGE), *hand_written(TROUBLESHOOTING)])
    if sources
]


@pytest.mark.parametrize(("heading", "text", "sources"), CHECKED)
def test_each_figure_of_the_text_is_what_the_rows_give(heading: str, text: str, sources: Sequence[str]) -> None:
    figures = list(FIGURE.finditer(text))
    assert len(figures) == len(sources), [(figure[0]) for figure in figures]
    said = [wrong(figure, Source(line, heading)) for figure, line in zip(figures, sources, strict=True)]
    assert [one for one in said if one] == []


def test_no_figure_of_the_page_is_without_a_source() -> None:
    for heading, text, sources in hand_written(PAGE):
        assert sources or not FIGURE.search(text), f"{heading}: {FIGURE.findall(text)} has no <!-- rows"
        assert set(re.findall(r"[\d.]+ %", text)) <= OF_OTHERS, heading


def test_a_figure_that_is_changed_is_found() -> None:
    """Each digit of each figure, raised by one."""
    heading, text, sources = next(one for one in hand_written(PAGE) if one[0] == "budget")
    assert sources
    for number, line in enumerate(sources):
        figure = list(FIGURE.finditer(text))[number]
        for at in range(figure.start(), figure.end()):
            if text[at].isdigit():
                other = f"{text[:at]}{(int(text[at]) + 1) % 10}{text[at + 1 :]}"
                assert wrong(list(FIGURE.finditer(other))[number], Source(line, heading)), figure[0]


def test_what_the_page_says_of_all_suites_is_so() -> None:
    hours = sum(row["core_seconds"] for path in FILES for row in rows_of(path.stem)) / 3600
    assert f"took {hours:.1f} core-hours" in PAGE.replace("\n", " ")
    assert f"{sum(p.numel() for p in Transformer(SMALL, seed=0).parameters()):,} parameters in one layer" in PAGE
    sizes = {row["name"]: row["bytes_a_parameter"] for row in rows_of(BLOCK_SIZE)}
    assert f"at {', '.join(f'{size:.4f}' for size in sizes.values())} bytes a parameter for {', '.join(sizes)}" in PAGE
    settings = RunSettings()
    for option, default in re.findall(r"^\| `--([\w-]+)` \| ([\w.]+) \|", PAGE, re.MULTILINE):
        assert default == f"{getattr(settings, option.replace('-', '_'))}", option


def test_no_momentum_was_shown_to_end_better_in_as_many_rounds_as_the_advice_says() -> None:
    assert BUDGETS[-1] // H == MOMENTUM_ROUNDS
    found = [d for path in FILES for d in differences(suite(path.stem), rows_of(path.stem))]
    pairs = [d for d in found if has_momentum(d.cell) and not has_momentum(d.against) and "data-par" not in d.against]
    assert len(pairs) > 30
    assert [d for d in pairs if d.verdict == "better"] == []


def has_momentum(cell: str) -> bool:
    return any(float(mu) > 0 for mu in re.findall(r"momentum ([\d.]*\d)", cell))
