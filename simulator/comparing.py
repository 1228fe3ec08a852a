"""Comparisons: train every cell of a suite with every seed, keep each result, and say what the numbers show.

Results stand in DIR/SUITE.jsonl, a line each, so that a suite that is broken off goes on where it was. What is said of
them is made from that file alone: paired by seed, the mean of the relative differences and its 95 % interval.
"""

from __future__ import annotations

import csv
import json
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import torch

from ..common.errors import DilocoError, SettingError
from ..common.log import configure
from ..learner.text import load_corpus
from .methods import Cell, train
from .suites import Contrast, Suite

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STUDENT_95 = (
    math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
    2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the last one it is a little too wide."""


UNEQUAL_TOKENS = 0.02
"""Cells whose tokens differ by more, with any seed, are not held against each other, unless that is the question."""


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
    """By how much more of its tokens were counted (trained on, or merged); of the share with the seed where it differs
    most.
    """
    unequal: bool = False
    """That they differ is what is asked."""
    kept: float | None = None
    """Of what the reference gains over a lone learner, the share that the cell gains as well."""
    line: str = ""
    at: float = 0.0
    """Where it stands in a picture of trends (simulator/suites.py)."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; an interval that one seed does not give is null."""
        ends = {name: end if math.isfinite(end) else None for name, end in (("low", self.low), ("high", self.high))}
        return {**vars(self), **ends, "verdict": self.verdict}

    @property
    def verdict(self) -> str:
        """What the interval lets us say."""
        if abs(self.tokens) > UNEQUAL_TOKENS and not self.unequal:
            return f"nothing: {self.tokens:+.1%} tokens"
        if self.within is None:
            return "better" if self.high < 0 else "worse" if self.low > 0 else "no difference shown"
        if self.high <= self.within:
            return f"within {self.within:+.1%}: shown"
        return f"within {self.within:+.1%}: not shown" if self.low <= self.within else f"more than {self.within:+.1%}"


def differences(suite: Suite, rows: Sequence[dict[str, Any]]) -> list[Difference]:
    """Every contrast of the suite for which there are seeds, on the held-out part that it is judged on."""
    figure = f"val_{suite.part.lower()}"
    return [found for contrast in suite.contrasts if (found := _difference(contrast, rows, figure)) is not None]


def _difference(contrast: Contrast, rows: Sequence[dict[str, Any]], figure: str) -> Difference | None:
    names = [name for name in (contrast.cell, contrast.against, contrast.alone) if name]
    losses = [_by_seed(rows, name, figure) for name in names]
    seeds = sorted(set.intersection(*(set(found) for found in losses)))
    if not seeds:
        return None
    ours, theirs, *alone = ([found[seed] for seed in seeds] for found in losses)
    counted = "tokens_merged" if contrast.equal == "merged" else "tokens"
    tokens, others = (_by_seed(rows, name, counted) for name in names[:2])
    relative = [a / b - 1 for a, b in zip(ours, theirs, strict=True)]
    low, high = interval(relative)
    return Difference(
        contrast.cell, contrast.against, contrast.within, mean(relative), low, high, len(seeds),
        max((tokens[s] / others[s] - 1 for s in seeds), key=abs), contrast.equal == "neither",
        (mean(alone[0]) - mean(ours)) / (mean(alone[0]) - mean(theirs)) if alone else None,
        contrast.line, contrast.at,
    )  # fmt: skip


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


COLUMNS = {"cell", "name", "seed", "val_a", "val_b", "tokens", "tokens_merged", "core_seconds", "text"}


class Results:
    """The file of one suite's results."""

    def __init__(self, folder: Path, suite: Suite, text: str) -> None:
        """text: sha256 of what is trained on. SettingError if the folder cannot be used, or holds something else."""
        self.path, self.suite, self._text = folder / f"{suite.name}.jsonl", suite, text
        try:
            folder.mkdir(parents=True, exist_ok=True)
            written = self._whole_lines()
        except (OSError, UnicodeDecodeError) as wrong:
            raise SettingError(f"{self.path} cannot be used: {_why(wrong)}; name another --out") from wrong
        known = {cell.identity: cell.name for cell in suite.cells}
        self.rows = [row for row in self._parsed(written) if row["cell"] in known and row["text"] == text]
        """Of this suite and text as they are now; what was trained with other settings does not count."""

    def missing(self, seeds: int) -> Iterator[tuple[Cell, int]]:
        """What is to be trained still, seed by seed."""
        done = {(row["cell"], row["seed"]) for row in self.rows}
        for seed in range(seeds):
            for cell in self.suite.cells:
                if (cell.identity, seed) not in done:
                    yield cell, seed

    def add(self, row: dict[str, Any]) -> None:
        row = {**row, "text": self._text}
        self.rows.append(row)
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as wrong:
            raise DilocoError(f"{self.path} cannot be written: {_why(wrong)}") from wrong

    def _whole_lines(self) -> list[str]:
        """What stands in the file; half a line, which one who was killed left at the end, is taken away."""
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            os.truncate(self.path, len(whole))
        return whole.decode().splitlines()

    def _parsed(self, lines: Sequence[str]) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except ValueError as wrong:
                raise SettingError(f"{self.path}, line {number}: no result of a comparison") from wrong
            if not isinstance(row, dict) or not row.keys() >= COLUMNS:
                raise SettingError(f"{self.path}, line {number}: no result of a comparison")
            yield row


def _why(wrong: OSError | UnicodeDecodeError) -> str:
    return wrong.strerror or str(wrong) if isinstance(wrong, OSError) else "it is no text"


def run(
    suite: Suite,
    folder: Path,
    *,
    data: Path | None,
    seeds: int,
    jobs: int,
    minutes: float,
    said: Callable[[str], None],
) -> tuple[Results, list[str]]:
    """Train what is missing of the suite, `jobs` at a time, for `minutes` at most; what is begun is finished, also
    after a first Ctrl-C. Gives the results, and which cells could not be trained.
    """
    ends_at = time.monotonic() + 60 * minutes
    corpus = load_corpus(data, max(cell.task.sequence_length for cell in suite.cells))
    if not corpus.holds_out:
        raise SettingError(f"{corpus.source} is too small to hold anything out for judging; give --data more text")
    results = Results(folder, suite, corpus.sha256)
    waits, total, failed = list(results.missing(seeds)), len(suite.cells) * seeds, list[str]()
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_own_threads) as pool:
        running: dict[Future[dict[str, Any]], tuple[Cell, int]] = {}

        def collect() -> None:
            done = next(as_completed(running))
            cell, seed = running.pop(done)
            try:
                results.add(done.result())
            except BrokenProcessPool as wrong:
                raise DilocoError(f"a process that trained {cell.name} was killed; is there memory for it?") from wrong
            except DilocoError as wrong:  # another cell may well be trained
                said(f"{cell.name}, seed {seed}: {wrong}")
                failed.append(f"{cell.name}, seed {seed}")
                return
            left = total - len([r for r in results.rows if r["seed"] < seeds])
            loss = results.rows[-1][f"val_{suite.part.lower()}"]
            said(f"{cell.name}, seed {seed}: {loss:.4f} nats per byte ({left} of {total} left)")

        try:
            while waits or running:
                while waits and len(running) < jobs and time.monotonic() < ends_at:
                    cell, seed = waits.pop(0)
                    running[pool.submit(_one, cell, seed, data)] = (cell, seed)
                if not running:
                    break
                collect()
        except KeyboardInterrupt:
            said("what is being trained is finished and kept; Ctrl-C once more drops it")
            try:
                while running:
                    collect()
            except KeyboardInterrupt:
                for process in pool._processes.values():  # noqa: SLF001 nothing public ends them
                    process.terminate()
            raise
    return results, failed


def _own_threads() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who broke off speaks to the parent
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    configure("compare", level="warning")


def _end_with_parent() -> None:
    """A pool's process waits for work for ever, also from a parent that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _one(cell: Cell, seed: int, data: Path | None) -> dict[str, Any]:
    began, cpu = time.perf_counter(), time.process_time()
    result = train(cell, seed, load_corpus(data, cell.task.sequence_length))
    return {
        **result.figures, "cell": cell.identity, "name": cell.name, "seed": seed,
        "val_a": result.val_a, "val_b": result.val_b, "tokens": result.tokens, "tokens_merged": result.tokens_merged,
        "seconds": round(time.perf_counter() - began, 3), "core_seconds": round(time.process_time() - cpu, 3),
    }  # fmt: skip


# --- what is left behind ---------------------------------------------------------------------------------------------
def write(results: Results, folder: Path) -> list[Path]:
    """SUITE.csv, SUITE.md and SUITE.png; a suite without contrasts has no picture."""
    name = results.suite.name
    table, page, picture = (folder / f"{name}.{kind}" for kind in ("csv", "md", "png"))
    columns = list(dict.fromkeys(key for row in results.rows for key in row))
    try:
        with table.open("w", newline="") as file:
            rows = csv.DictWriter(file, columns)
            rows.writeheader()
            rows.writerows(sorted(results.rows, key=lambda r: (r["name"], r["seed"])))
        page.write_text(markdown(results))
        if not differences(results.suite, results.rows):
            return [table, page]
        draw(results, picture)
    except OSError as wrong:
        raise DilocoError(f"{folder} cannot be written: {_why(wrong)}") from wrong
    return [table, page, picture]


def markdown(results: Results) -> str:
    """The suite's tables, as they stand in docs/results.md."""
    suite, rows = results.suite, results.rows
    hours = sum(row["core_seconds"] for row in rows) / 3600
    seeds = sorted({row["seed"] for row in rows})
    asks = suite.asks + (" Judged on part A." if suite.part == "A" else "")
    lines = [
        f"## {suite.name}: {asks}", "",
        f"{_sizes(suite)}; {len(seeds)} seeds; {hours:.2f} core-hours.", "",
        f"    diloco compare --suite {suite.name} --seeds {len(seeds)}", "",
        _row(["cell", "tokens", "merged", "part A", "part B", *(f.replace("_", " ") for f in suite.figures),
              "seeds"]),
        "|---" * (6 + len(suite.figures)) + "|",
    ]  # fmt: skip
    for cell in suite.cells:
        own = [row for row in rows if row["name"] == cell.name]
        if own:
            lines.append(_row([
                cell.name, *(f"{mean(r[count] for r in own):,.0f}" for count in ("tokens", "tokens_merged")),
                *(f"{mean(r[part] for r in own):.4f}" for part in ("val_a", "val_b")),
                *(_figure(figure, own) for figure in suite.figures), str(len(own)),
            ]))  # fmt: skip
    return "\n".join([*lines, *_contrasts(differences(suite, rows)), *_bests(suite, rows)]) + "\n"


def _row(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |"


def _sizes(suite: Suite) -> str:
    """What the cells' models and batches are, in words."""
    tasks = [cell.task for cell in suite.cells]
    models = sorted({(t.layers, t.width) for t in tasks})
    batches = sorted({(t.batch_sequences, t.sequence_length) for t in tasks})
    model = ", ".join(f"{layers} layer{'s' * (layers > 1)} of width {width}" for layers, width in models)
    return f"{model}; {' or '.join(f'{n} x {length}' for n, length in batches)} bytes a learner and step"


def _figure(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Its mean over the rows that have it: seconds as they are, shares in percent."""
    found = [row[name] for row in rows if name in row]
    if not found:
        return ""
    return f"{mean(found):,.0f}" if name.endswith("seconds") else f"{mean(found):.1%}"


def _contrasts(found: Sequence[Difference]) -> list[str]:
    if not found:
        return []
    keeps = any(d.kept is not None for d in found)
    head = ["cell", "against", "difference", "95 % interval", "seeds", "tokens", "what it shows"] + [
        "gain kept"
    ] * keeps
    lines = ["", _row(head), "|---" * len(head) + "|"]
    for d in found:
        span = f"{d.low:+.2%} to {d.high:+.2%}" if math.isfinite(d.high) else "one seed"
        kept = [f"{d.kept:.0%}" if d.kept is not None else ""] if keeps else []
        lines.append(
            _row([d.cell, d.against, f"{d.mean:+.2%}", span, str(d.seeds), f"{d.tokens:+.1%}", d.verdict, *kept])
        )
    return lines


def _bests(suite: Suite, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Of each group of a search its best cell over the seeds that all have, and whether a better one may lie beyond."""
    lines = ["", _row(["best", "part " + suite.part, "where", "seeds"]), "|---|---|---|---|"] if suite.groups else []
    for group in suite.groups:
        losses = {name: _by_seed(rows, name, f"val_{suite.part.lower()}") for name in group}
        seeds = set.intersection(*(set(found) for found in losses.values()))
        if seeds:
            means = {name: mean(found[seed] for seed in seeds) for name, found in losses.items()}
            best = min(means, key=means.__getitem__)
            where = "at the grid's edge" if best in (group[0], group[-1]) else "inside the grid"
            lines.append(_row([best, f"{means[best]:.4f}", where, str(len(seeds))]))
    return lines


def draw(results: Results, path: Path) -> None:
    """Every contrast as its mean and interval, and the bound that was asked; or as lines, for a trend."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to load, and only the picture needs it

    found = differences(results.suite, results.rows)
    figure = Figure(figsize=(9, 1.2 + 0.4 * max(1, len(found))), layout="constrained")
    axes = figure.subplots()
    if results.suite.along:
        _draw_trends(axes, found, results.suite)
    else:
        _draw_contrasts(axes, found)
    axes.set_title(f"{results.suite.name}: {results.suite.asks}", fontsize=10)
    figure.savefig(path, dpi=120)


def _draw_contrasts(axes: Axes, found: Sequence[Difference]) -> None:
    for height, d in enumerate(reversed(found)):
        half = 100 * (d.high - d.mean) if math.isfinite(d.high) else 0.0
        axes.errorbar(100 * d.mean, height, xerr=half, fmt="o", color="#1f5fa8", capsize=3)
        if d.within is not None:
            axes.plot([100 * d.within] * 2, [height - 0.3, height + 0.3], color="#b03a2e")
    axes.axvline(0, color="#8a8a8a", linewidth=0.8)
    axes.set_yticks(range(len(found)), [f"{d.cell} against {d.against}" for d in reversed(found)], fontsize=8)
    axes.set_xlabel("difference of held-out loss in %, mean and 95 % interval (red: the bound that is asked)")


def _draw_trends(axes: Axes, found: Sequence[Difference], suite: Suite) -> None:
    for number, line in enumerate(dict.fromkeys(d.line for d in found)):
        points = sorted((d for d in found if d.line == line), key=lambda d: d.at)
        halves = [100 * (d.high - d.mean) if math.isfinite(d.high) else 0.0 for d in points]
        color = f"C{number}"
        axes.errorbar([d.at for d in points], [100 * d.mean for d in points], yerr=halves, fmt="o-", capsize=3,
                      color=color, label=line)  # fmt: skip
        for d in points:
            if d.within is not None:
                axes.plot(d.at, 100 * d.within, "v", color=color)
            if d.kept is not None:
                axes.annotate(f" {d.kept:.0%} kept", (d.at, 100 * d.mean), fontsize=7, color=color)
    axes.axhline(0, color="#8a8a8a", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel(suite.along)
    axes.set_ylabel("difference of held-out loss in %\n(triangle: the bound that is asked)")
    axes.legend()
