"""Statistical analysis of a suite's results, as Markdown tables and plots: relative loss differences paired by seed,
their mean and its 95 % confidence interval. A pure function of the results.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, Any

from .suites import Contrast, Suite

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STUDENT_95 = (
    math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
    2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the last one it is a little too wide."""


BLUE, OUTLIER = "#1f5fa8", 12.0
"""Points this many times the median distance from zero are written at the plot's edge, to keep the others visible."""
UNEQUAL_TOKENS = 0.02
"""Cells whose tokens differ by more, with any seed, are not compared, unless the contrast is about that."""


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
    """Relative difference of the tokens (trained or merged), for the seed where it is largest."""
    unequal: bool = False
    """Whether unequal tokens are intended."""
    kept: float | None = None
    """Share of the reference's gain over a lone learner that the cell keeps, from mean losses; None if no such gain is
    shown.
    """
    kept_least: float | None = None
    kept_most: float | None = None
    """Its minimum and maximum over seeds."""
    line: str = ""
    at: float = 0.0
    """Position in a trend plot (experiments/suites.py)."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; the interval is null with a single seed."""
        ends = {name: end if math.isfinite(end) else None for name, end in (("low", self.low), ("high", self.high))}
        return {**vars(self), **ends, "verdict": self.verdict}

    @property
    def verdict(self) -> str:
        """Conclusion that the interval allows."""
        if abs(self.tokens) > UNEQUAL_TOKENS and not self.unequal:
            return f"nothing: {self.tokens:+.1%} tokens"
        if self.seeds == 1:
            return "nothing: one seed"
        if self.within is None:
            return "better" if self.high < 0 else "worse" if self.low > 0 else "no difference shown"
        if self.high <= self.within:
            return f"within {self.within:+.1%}: shown"
        return f"within {self.within:+.1%}: not shown" if self.low <= self.within else f"more than {self.within:+.1%}"


def differences(suite: Suite, rows: Sequence[dict[str, Any]]) -> list[Difference]:
    """Every contrast of the suite that has seeds, on the suite's held-out part."""
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
        *(_kept(ours, theirs, alone[0]) if alone else (None, None, None)), contrast.line, contrast.at,
    )  # fmt: skip


def _kept(
    ours: Sequence[float], theirs: Sequence[float], alone: Sequence[float]
) -> tuple[float | None, float | None, float | None]:
    """Share of a gain: of the means, and the minimum and maximum of single seeds."""
    gains = [a - t for a, t in zip(alone, theirs, strict=True)]
    if interval(gains)[0] <= 0:
        return None, None, None
    shares = [(a - o) / gain for a, o, gain in zip(alone, ours, gains, strict=True) if gain > 0]
    return (mean(alone) - mean(ours)) / mean(gains), min(shares), max(shares)


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


def markdown(suite: Suite, rows: Sequence[dict[str, Any]]) -> str:
    """Markdown tables of the suite, as in docs/results.md."""
    hours = sum(row["core_seconds"] for row in rows) / 3600
    seeds = sorted({row["seed"] for row in rows})
    asks = suite.asks + (" Judged on part A." if suite.part == "A" else "")
    lines = [
        f"## {suite.name}: {asks}", "",
        f"{_sizes(suite)}; {_counted(len(seeds), 'seed')}{_so_far(suite, rows)}; {hours:.2f} core-hours.", "",
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


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _so_far(suite: Suite, rows: Sequence[dict[str, Any]]) -> str:
    """Number of finished trainings, if the suite is incomplete."""
    total, seeds = len(suite.cells) * suite.seeds, range(suite.first_seed, suite.first_seed + suite.seeds)
    done = sum(row["seed"] in seeds for row in rows)
    return "" if done >= total else f" ({done} of {total} trainings)"


def _row(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |"


def _sizes(suite: Suite) -> str:
    """Description of the cells' models and batches."""
    tasks = [cell.task for cell in suite.cells]
    models = sorted({(t.layers, t.width) for t in tasks})
    batches = sorted({(t.batch_sequences, t.sequence_length) for t in tasks})
    model = ", ".join(f"{layers} layer{'s' * (layers > 1)} of width {width}" for layers, width in models)
    return f"{model}; {' or '.join(f'{n} x {length}' for n, length in batches)} bytes a learner and step"


def _figure(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Mean over the rows that have this figure: seconds as numbers, shares in percent."""
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
        kept = [_format_kept(d)] if keeps else []
        lines.append(
            _row([d.cell, d.against, f"{d.mean:+.2%}", span, str(d.seeds), f"{d.tokens:+.1%}", d.verdict, *kept])
        )
    return lines


def _format_kept(d: Difference) -> str:
    return "" if d.kept is None else f"{d.kept:.0%} ({d.kept_least:.0%} to {d.kept_most:.0%})"


def _bests(suite: Suite, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Best cell of each search group over their common seeds, and whether it is at the edge of the grid."""
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


def draw(suite: Suite, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot every contrast as its mean, interval and bound; or as lines, for a trend."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to load, and only the picture needs it

    found = differences(suite, rows)
    height = 5.0 if suite.along else 1.4 + 0.3 * len(found)
    figure = Figure(figsize=(10, height), layout="constrained")
    axes = figure.subplots()
    if suite.along:
        _draw_trends(axes, found, suite)
    else:
        _draw_contrasts(axes, found, suite.part)
    figure.suptitle(textwrap.fill(f"{suite.name}: {suite.asks}", 90), fontsize=10)
    figure.savefig(path, dpi=120)


def _half(d: Difference) -> float:
    """Half width of its interval in percent; 0 with one seed."""
    return 100 * (d.high - d.mean) if math.isfinite(d.high) else 0.0


def _draw_contrasts(axes: Axes, found: Sequence[Difference], part: str) -> None:
    lows, highs = ([100 * d.mean + sign * _half(d) for d in found] for sign in (-1, 1))
    ends = [abs(end) for end in (*lows, *highs)]
    most = 1.05 * (min(max(ends), OUTLIER * median(ends)) or max(ends)) or 1.0  # zeros alone have no scale
    for height, d in enumerate(reversed(found)):
        mean_, half = 100 * d.mean, _half(d)
        if abs(mean_) > most:
            beyond = f"{mean_:+.0f} % {'→' if mean_ > 0 else '←'}"
            axes.annotate(beyond, (math.copysign(most, mean_), height), va="center", fontsize=8,
                          ha="right" if mean_ > 0 else "left", color=BLUE)  # fmt: skip
        else:
            axes.errorbar(mean_, height, xerr=half, fmt="o", color=BLUE, capsize=3, mfc=BLUE if d.seeds > 1 else "w")
        if d.within is not None:
            axes.plot([100 * d.within] * 2, [height - 0.3, height + 0.3], color="#b03a2e")
    axes.axvline(0, color="#8a8a8a", linewidth=0.8)
    axes.set_yticks(range(len(found)), [f"{d.cell} against {d.against}" for d in reversed(found)], fontsize=8)
    bound = "; red: the bound that is asked" if any(d.within is not None for d in found) else ""
    hollow = "; hollow: one seed" if any(d.seeds == 1 for d in found) else ""
    axes.set_xlabel(f"difference of the loss on part {part} in %\n(mean, 95 % interval{bound}{hollow})", fontsize=9)
    left, right = max(-most, min(0.0, *lows)), min(most, max(0.0, *highs))
    room = 0.05 * (right - left or most)
    axes.set_xlim(left - room, right + room)
    axes.set_ylim(-0.6, len(found) - 0.4)


def _draw_trends(axes: Axes, found: Sequence[Difference], suite: Suite) -> None:
    lines, colors = list(dict.fromkeys(d.line for d in found)), dict[str, str]()
    for number, line in enumerate(lines):
        points = sorted((d for d in found if d.line == line), key=lambda d: d.at)
        aside = 1.03 ** (number - (len(lines) - 1) / 2)  # so that intervals do not overlap
        of = line.rpartition(" for ")[2]  # lines for the same M share a colour
        color = colors.setdefault(of, f"C{len(colors)}")
        axes.errorbar([d.at * aside for d in points], [100 * d.mean for d in points], yerr=[*map(_half, points)],
                      fmt="o-" if of == line else "s:", capsize=3, color=color, label=line)  # fmt: skip
        for d in points:
            if d.within is not None:
                axes.plot(d.at * aside, 100 * d.within, "v", color=color, markeredgecolor="k", zorder=3)
            if d.kept is not None:
                axes.annotate(f"{d.kept:.0%} kept", (d.at * aside, 100 * d.mean), xytext=(6, 5),
                              textcoords="offset points", fontsize=8, color=color)  # fmt: skip
    axes.axhline(0, color="#8a8a8a", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks(sorted({d.at for d in found}), [f"{at:,.0f}" for at in sorted({d.at for d in found})], minor=False)
    axes.minorticks_off()
    axes.margins(x=0.12)
    axes.set_xlabel(suite.along)
    bound = "\n(triangle: the bound that is asked)" if any(d.within is not None for d in found) else ""
    axes.set_ylabel(f"difference of the loss on part {suite.part} in %{bound}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
