"""Run report: metrics.csv, and loss.png with the baselines of models that need no training.

Both are made from evaluations.jsonl and text.json, which the evaluator writes into the run's folder. They can be
written at any time, also during a run or after one that was aborted.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.log import get_logger
from ..common.printable import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

log = get_logger("report")

EVALUATIONS = "evaluations.jsonl"
TEXT = "text.json"
COLUMNS = ("seconds", "t", "part", "size", "val_loss", "cpu_seconds")
REPORTED_PART = "B"
"""The held-out part used in summaries. The other, A, is for choosing settings."""
LETTERS = 160
LINE, MARK = "#1f5fa8", "#8a8a8a"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One line of evaluations.jsonl: one evaluation of the global model."""

    seconds: float
    """Since the evaluator's first start in this run."""
    t: int
    """Global step."""
    part: str
    """Held-out part, A or B."""
    size: str
    """small: every few seconds, on a few windows. full: at version 0 and at the end."""
    val_loss: float
    """Nats per byte."""
    cpu_seconds: float = 0.0
    """CPU time of this evaluation."""

    @property
    def is_valid(self) -> bool:
        """Whether each value has its type; in a file edited by hand it may not."""
        numbers, texts = (self.seconds, self.t, self.val_loss, self.cpu_seconds), (self.part, self.size)
        return all(isinstance(n, int | float) for n in numbers) and all(isinstance(text, str) for text in texts)


def read_evaluations(folder: Path) -> list[Evaluation]:
    """All evaluations of the run in `folder`, oldest first; empty if there is no file yet."""
    path = folder / EVALUATIONS
    lines = path.read_text("utf-8", "replace").splitlines() if path.exists() else []
    return list(_parsed(lines))


def _parsed(lines: Sequence[str]) -> Iterator[Evaluation]:
    names = Evaluation.__dataclass_fields__
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            evaluation = Evaluation(**{name: value for name, value in row.items() if name in names})
            if not evaluation.is_valid:
                raise TypeError
            yield evaluation
        except (ValueError, TypeError, AttributeError, RecursionError):
            # a process killed while writing leaves half a line; the others are still valid
            log.warning("evaluation_unreadable", file=EVALUATIONS, line=number)


def first_and_last_loss(evaluations: Sequence[Evaluation], part: str = REPORTED_PART) -> tuple[float, float] | None:
    """Validation loss at version 0 and in the newest full evaluation on `part`; None if there is none."""
    full = [e for e in evaluations if e.size == "full" and e.part == part]
    return (full[0].val_loss, full[-1].val_loss) if full else None


def _read_text_facts(folder: Path) -> dict[str, Any]:
    """Facts on the run's text: source, tokens, sha256, holds_out, baselines {part: {uniform, unigram, bigram}}."""
    path = folder / TEXT
    if not path.exists():
        return {}
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        texts = isinstance(facts["source"], str) and isinstance(facts["sha256"], str)
        marks = [nats for part in facts.get("baselines", {}).values() for nats in part.values()]
        if texts and all(isinstance(number, int | float) for number in (facts["tokens"], *marks)):
            return facts
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    log.warning("text_facts_unreadable", file=TEXT)
    return {}


def write_report(folder: Path) -> list[Path]:
    """Write metrics.csv and, if there is an evaluation, loss.png into the run's folder; returns the written files."""
    evaluations = read_evaluations(folder)
    written = [_write_metrics(folder / "metrics.csv", evaluations)]
    if evaluations:
        written.append(_draw_loss(folder / "loss.png", evaluations, _read_text_facts(folder)))
    return written


def _write_metrics(path: Path, evaluations: Sequence[Evaluation]) -> Path:
    """Write one row per evaluation, atomically."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for e in evaluations:
            table.writerow([getattr(e, name) for name in COLUMNS])
    temporary.replace(path)
    return path


def _draw_loss(path: Path, evaluations: Sequence[Evaluation], text: dict[str, Any]) -> Path:
    """Plot validation loss over global steps as a PNG, with the baselines of the same part."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to load, and only the report needs it

    figure = Figure(figsize=(9, 5.4), dpi=130, layout="constrained")
    axes = figure.subplots()
    last_step = max(e.t for e in evaluations) or 1
    _draw_marks(axes, text.get("baselines", {}).get(REPORTED_PART, {}), last_step)
    _draw_curve(axes, [e for e in evaluations if e.part == REPORTED_PART])
    axes.set_title("Validation loss of the global model", loc="left", fontsize=13, fontweight="bold", pad=14)
    axes.set_xlabel("global step")
    axes.set_ylabel("nats per byte (lower is better)")
    axes.set_xlim(-0.02 * last_step, last_step * 1.02)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    if text:
        source, million = _printable_in_font(text["source"]), text["tokens"] / 1e6
        origin = f"{source}, {million:.1f} million bytes, sha256 {_printable_in_font(text['sha256'])[:12]}"
        figure.text(0.995, 0.005, origin, ha="right", va="bottom", fontsize=7, color=MARK, parse_math=False)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png")
    temporary.replace(path)
    return path


def _draw_marks(axes: Axes, baselines: dict[str, float], last_step: int) -> None:
    """A dashed line for each baseline, with its name and value above its right end."""
    for name, nats in baselines.items():
        axes.axhline(nats, color=MARK, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f"{_printable_in_font(name)[:20]} {nats:.2f}", (last_step, nats), xytext=(0, 3), textcoords="offset points",
            ha="right", va="bottom", fontsize=9, color="#5a5a5a", zorder=5, parse_math=False,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
        )  # fmt: skip


def _printable_in_font(text: str) -> str:
    """`text` in characters that the font has, shortened to fit the figure."""
    return printable(text).encode("ascii", "replace").decode()[:LETTERS]


def _draw_curve(axes: Axes, evaluations: Sequence[Evaluation]) -> None:
    """The loss as a line with a dot per evaluation, larger for full ones, and the last value as text."""
    if not evaluations:
        return
    for segment in _segments(evaluations):
        axes.plot([e.t for e in segment], [e.val_loss for e in segment], color=LINE, linewidth=2, zorder=3)
    for size, area in (("small", 14), ("full", 48)):
        dots = [e for e in evaluations if e.size == size]
        axes.scatter([e.t for e in dots], [e.val_loss for e in dots], s=area, color=LINE, zorder=4)
    last = evaluations[-1]
    axes.annotate(
        f"{last.val_loss:.2f}", (last.t, last.val_loss), xytext=(0, -9), textcoords="offset points",
        ha="right", va="top", fontsize=12, fontweight="bold", color=LINE,
    )  # fmt: skip


def _segments(evaluations: Sequence[Evaluation]) -> list[list[Evaluation]]:
    """Evaluations split wherever the step decreases: a run resumed from a checkpoint starts a new segment."""
    segments: list[list[Evaluation]] = []
    for e in evaluations:
        if not segments or e.t < segments[-1][-1].t:
            segments.append([])
        segments[-1].append(e)
    return segments
