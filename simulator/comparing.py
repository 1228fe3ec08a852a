"""Comparisons: train every cell of a suite with every seed, keep each result, and say what the numbers show.

Results stand in DIR/SUITE.jsonl, a line each, so that a suite that is broken off goes on where it was. What is said of
them is made from that file alone: paired by seed, the mean of the relative differences and its 95 % interval.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from ..common.errors import DilocoError, SettingError
from ..common.log import configure
from ..learner.text import load_corpus
from .methods import Cell, train
from .suites import Suite

STUDENT_95 = (
    math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
    2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the last one it is a little too wide."""


UNEQUAL_TOKENS = 0.02
"""Cells whose tokens differ by more are not held against each other."""


@dataclass(frozen=True)
class Difference:
    """One contrast, over all seeds that both cells have."""

    cell: str
    against: str
    within: float | None
    mean: float
    """Of (loss / reference loss - 1) over seeds."""
    low: float
    high: float
    """95 % interval of the mean; infinite with a single seed."""
    seeds: int
    tokens: float = 0.0
    """By how much more the cell was trained on, as a share."""

    @property
    def verdict(self) -> str:
        """What the interval lets us say."""
        if abs(self.tokens) > UNEQUAL_TOKENS:
            return f"nothing: {self.tokens:+.1%} tokens"
        if self.within is None:
            return "better" if self.high < 0 else "worse" if self.low > 0 else "no difference shown"
        if self.high <= self.within:
            return f"within {self.within:+.1%}: shown"
        return f"within {self.within:+.1%}: not shown" if self.low <= self.within else f"more than {self.within:+.1%}"


def differences(suite: Suite, rows: Sequence[dict[str, Any]]) -> list[Difference]:
    """Every contrast of the suite for which there are seeds, on the held-out part that it is judged on."""
    found = []
    for contrast in suite.contrasts:
        ours, theirs = (_by_seed(rows, n, f"val_{suite.part.lower()}") for n in (contrast.cell, contrast.against))
        trained, reference = (_by_seed(rows, n, "tokens") for n in (contrast.cell, contrast.against))
        seeds = sorted(ours.keys() & theirs.keys())
        if seeds:
            relative = [ours[s] / theirs[s] - 1 for s in seeds]
            low, high = interval(relative)
            found.append(
                Difference(
                    contrast.cell, contrast.against, contrast.within, mean(relative), low, high, len(seeds),
                    0.0 if contrast.unequal else mean(trained[s] / reference[s] - 1 for s in seeds),
                )
            )  # fmt: skip
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of `values`, by Student's t."""
    count = len(values)
    if count < 2:
        return -math.inf, math.inf
    t = STUDENT_95[min(count - 1, len(STUDENT_95) - 1)]
    half = t * stdev(values) / math.sqrt(count)
    return mean(values) - half, mean(values) + half


def _by_seed(rows: Sequence[dict[str, Any]], name: str, figure: str) -> dict[int, float]:
    return {row["seed"]: row[figure] for row in rows if row["name"] == name}


COLUMNS = {"cell", "name", "seed", "val_a", "val_b", "tokens", "core_seconds", "text"}


class Results:
    """The file of one suite's results."""

    def __init__(self, folder: Path, suite: Suite, text: str) -> None:
        """text: sha256 of what is trained on. SettingError if the folder cannot be used, or holds something else."""
        self.path, self.suite, self._text = folder / f"{suite.name}.jsonl", suite, text
        try:
            folder.mkdir(parents=True, exist_ok=True)
            written = self.path.read_text("utf-8") if self.path.exists() else ""
        except OSError as wrong:
            raise SettingError(f"{folder} cannot be used: {wrong.strerror or wrong}; name another --out") from wrong
        known = {identity(cell): cell.name for cell in suite.cells}
        self.rows = [row for row in self._parsed(written) if row["cell"] in known and row["text"] == text]
        """Of this suite and text as they are now; what was trained with other settings does not count."""

    def missing(self, seeds: int) -> Iterator[tuple[Cell, int]]:
        """What is to be trained still, seed by seed."""
        done = {(row["cell"], row["seed"]) for row in self.rows}
        for seed in range(seeds):
            for cell in self.suite.cells:
                if (identity(cell), seed) not in done:
                    yield cell, seed

    def add(self, row: dict[str, Any]) -> None:
        row = {**row, "text": self._text}
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _parsed(self, written: str) -> Iterator[dict[str, Any]]:
        lines = written.split("\n")[:-1]  # one that was killed leaves half a line behind the last whole one
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except ValueError as wrong:
                raise SettingError(f"{self.path}, line {number}: no result of a comparison") from wrong
            if not isinstance(row, dict) or not row.keys() >= COLUMNS:
                raise SettingError(f"{self.path}, line {number}: no result of a comparison")
            yield row


def identity(cell: Cell) -> str:
    """What a cell is, in 16 hex digits: another setting, another cell."""
    return hashlib.sha256(json.dumps(cell.to_map(), sort_keys=True).encode()).hexdigest()[:16]


def run(
    suite: Suite,
    folder: Path,
    *,
    data: Path | None,
    seeds: int,
    jobs: int,
    minutes: float,
    said: Callable[[str], None],
) -> Results:
    """Train what is missing of the suite, `jobs` at a time, for `minutes` at most (what is begun is finished)."""
    began = time.monotonic()
    longest = max(cell.task.sequence_length for cell in suite.cells)
    results = Results(folder, suite, load_corpus(data, longest).sha256)
    failed: list[str] = []
    waits, total = list(results.missing(seeds)), len(suite.cells) * seeds
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_own_threads) as pool:
        running: dict[Future[dict[str, Any]], tuple[Cell, int]] = {}
        while waits or running:
            while waits and len(running) < jobs and time.monotonic() - began < 60 * minutes:
                cell, seed = waits.pop(0)
                running[pool.submit(_one, cell, seed, data)] = (cell, seed)
            if not running:
                break
            done = next(as_completed(running))
            cell, seed = running.pop(done)
            try:
                results.add(done.result())
            except DilocoError as wrong:  # another cell may well be trained
                said(f"{cell.name}, seed {seed}: {wrong}")
                failed.append(f"{cell.name}, seed {seed}")
                continue
            left = total - len([r for r in results.rows if r["seed"] < seeds])
            said(f"{cell.name}, seed {seed}: {results.rows[-1]['val_b']:.4f} nats per byte ({left} of {total} left)")
    if failed:
        raise DilocoError(f"{len(failed)} of {total} could not be trained, the first is {failed[0]}; the rest is kept")
    return results


def _own_threads() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who broke off speaks to the parent
    torch.set_num_threads(1)
    configure("compare", level="warning")


def _one(cell: Cell, seed: int, data: Path | None) -> dict[str, Any]:
    began, cpu = time.perf_counter(), time.process_time()
    result = train(cell, seed, load_corpus(data, cell.task.sequence_length))
    return {
        "cell": identity(cell), "name": cell.name, "seed": seed, "val_a": result.val_a, "val_b": result.val_b,
        "tokens": result.tokens, "seconds": round(time.perf_counter() - began, 3),
        "core_seconds": round(time.process_time() - cpu, 3), **result.figures,
    }  # fmt: skip


# --- what is left behind ---------------------------------------------------------------------------------------------
def write(results: Results, folder: Path) -> list[Path]:
    """SUITE.csv, SUITE.md and SUITE.png."""
    name = results.suite.name
    table, page, picture = (folder / f"{name}.{kind}" for kind in ("csv", "md", "png"))
    columns = list(dict.fromkeys(key for row in results.rows for key in row))
    with table.open("w", newline="") as file:
        rows = csv.DictWriter(file, columns)
        rows.writeheader()
        rows.writerows(sorted(results.rows, key=lambda r: (r["name"], r["seed"])))
    page.write_text(markdown(results))
    draw(results, picture)
    return [table, page, picture]


def markdown(results: Results) -> str:
    """The suite's tables, as they stand in docs/results.md."""
    suite, rows = results.suite, results.rows
    hours = sum(row["core_seconds"] for row in rows) / 3600
    seeds = sorted({row["seed"] for row in rows})
    task = suite.cells[0].task
    size = (
        f"{task.layers} layers of width {task.width}, {task.batch_sequences} sequences of {task.sequence_length} bytes"
    )
    lines = [
        f"## {suite.name}: {suite.asks}", "",
        f"{size} a learner and step; seeds {', '.join(map(str, seeds))}; {hours:.2f} core-hours.", "",
        f"    diloco compare --suite {suite.name} --seeds {len(seeds)}", "",
        "| cell | tokens | part A | part B | seeds |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for cell in suite.cells:
        own = [row for row in rows if row["name"] == cell.name]
        if own:
            a, b = mean(r["val_a"] for r in own), mean(r["val_b"] for r in own)
            lines.append(f"| {cell.name} | {mean(r['tokens'] for r in own):,.0f} | {a:.4f} | {b:.4f} | {len(own)} |")
    found = differences(suite, rows)
    if found:
        lines += ["", "| cell | against | difference | 95 % interval | what it shows |", "|---|---|---|---|---|"]
    for d in found:
        span = f"{d.low:+.2%} to {d.high:+.2%}" if math.isfinite(d.high) else "one seed"
        lines.append(f"| {d.cell} | {d.against} | {d.mean:+.2%} | {span} | {d.verdict} |")
    return "\n".join(lines) + "\n"


def draw(results: Results, path: Path) -> None:
    """Every contrast as its mean and interval, and the bound that was asked."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to load, and only the picture needs it

    found = differences(results.suite, results.rows)
    figure = Figure(figsize=(9, 1.2 + 0.4 * max(1, len(found))), layout="constrained")
    axes = figure.subplots()
    for height, d in enumerate(reversed(found)):
        half = 100 * (d.high - d.mean) if math.isfinite(d.high) else 0.0
        axes.errorbar(100 * d.mean, height, xerr=half, fmt="o", color="#1f5fa8", capsize=3)
        if d.within is not None:
            axes.plot([100 * d.within] * 2, [height - 0.3, height + 0.3], color="#b03a2e")
    axes.axvline(0, color="#8a8a8a", linewidth=0.8)
    axes.set_yticks(range(len(found)), [f"{d.cell} against {d.against}" for d in reversed(found)], fontsize=8)
    axes.set_xlabel("difference of held-out loss in %, mean and 95 % interval (red: the bound that is asked)")
    axes.set_title(f"{results.suite.name}: {results.suite.asks}", fontsize=10)
    figure.savefig(path, dpi=120)
