"""Comparison suite types and builders: a suite is a list of cells and the contrasts between them.

The suites themselves are in catalogue.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..common.config import TaskSettings, preset
from ..simulator.ablation import Ablation
from .methods import Cell

SMALL = TaskSettings(layers=1, width=32, sequence_length=64, batch_sequences=8)
"""The model of the suites, 43,200 parameters: small enough for many runs on two cores."""
TOKEN_SECONDS = 8e-6
"""Seconds of one core per token at this size, overhead included."""
T, H = 480, 24
MEAN = Ablation(merge="mean")
EXACT: Mapping[str, Any] = {"codec_up": "f32", "codec_down": "f32"}
PUBLISHED: Mapping[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9}
"""Outer step of the DiLoCo paper."""
INNER_LR: Mapping[str, Mapping[int, float]] = {
    "data-parallel": {2: 24e-3, 4: 48e-3, 8: 48e-3},
    "lone, its share": {1: 24e-3},
    "lone, all tokens": {2: 12e-3, 4: 12e-3, 8: 6e-3},
    "averaging each step": {2: 48e-3, 4: 48e-3, 8: 48e-3},
    "DiLoCo": {2: 12e-3, 4: 24e-3, 8: 24e-3},
    "DiLoCo, lr 0.7, momentum 0.9": {2: 12e-3, 4: 24e-3, 8: 24e-3},
    "Streaming DiLoCo": {2: 24e-3, 4: 24e-3, 8: 24e-3},
    "Decoupled": {2: 12e-3, 4: 24e-3, 8: 24e-3},
}
"""Method -> M -> its best inner learning rate at SMALL's size and T steps, from suite `inner-lr`."""

Equal = Literal["trained", "merged", "neither"]


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """One claim: the loss of `cell` relative to `against`, optionally with an upper bound `within` (a share)."""

    cell: str
    against: str
    within: float | None = None
    equal: Equal = "trained"
    """Which tokens must be equal in both; neither: unequal tokens are intended."""
    alone: str = ""
    """Cell of a lone learner: what share of the gain of `against` over it does `cell` keep?"""
    line: str = ""
    """Line of this contrast in a trend plot."""
    at: float = 0.0
    """Position on that line."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    name: str
    asks: str
    """The question it answers, in a sentence."""
    cells: tuple[Cell, ...]
    contrasts: tuple[Contrast, ...] = ()
    seeds: int = 8
    first_seed: int = 0
    """A suite that repeats the question of another one uses its own seeds."""
    part: Literal["A", "B"] = "B"
    """Held-out part of its evaluation: A if the suite chooses settings."""
    figures: tuple[str, ...] = ()
    """Additional table columns."""
    along: str = ""
    """x-axis label of a trend plot; empty = no trend plot."""
    groups: Sequence[tuple[str, ...]] = field(default=())
    """For a search: groups of cells to find the best of, in the order of the varied value."""

    @property
    def core_hours(self) -> float:
        """Approximate time on one core, with all its seeds."""
        steps = (cell.steps * (1 if cell.method == "lone" else cell.learners) for cell in self.cells)
        tokens = (cell.task.tokens_per_step * count for cell, count in zip(self.cells, steps, strict=True))
        return self.seeds * sum(tokens) * TOKEN_SECONDS / 3600

    def __post_init__(self) -> None:
        names = [cell.name for cell in self.cells]
        assert len(set(names)) == len(names), names  # noqa: S101 a mistake in this file
        assert {n for c in self.contrasts for n in (c.cell, c.against, c.alone) if n} <= set(names)  # noqa: S101
        assert {name for group in self.groups for name in group} <= set(names)  # noqa: S101


def methods(
    task: TaskSettings, learners: int, steps: int, rates: Mapping[str, Mapping[int, float]] = INNER_LR
) -> dict[str, Cell]:
    """Cells of the methods in `rates`, each at its inner learning rate there, with H = 24 and equal tokens (except a
    lone learner's share). Ancestors merge by the plain mean in f32, and Streaming DiLoCo blends. All use the best outer
    step for runs of this length (lr 1, no momentum); DiLoCo also its published one.
    """
    base = Cell(name="", method="decoupled", learners=learners, steps=steps, task=task)
    diloco = replace(base, method="synchronous", variant=MEAN, settings={**EXACT, "sync_every": H})
    streaming = {**preset("streaming", learners), **EXACT, "adopt": "mix"}
    made = {
        "data-parallel": replace(base, method="data-parallel"),
        "lone, its share": replace(base, method="lone", learners=1),
        "lone, all tokens": replace(base, method="lone", steps=steps * learners),
        "averaging each step": replace(diloco, settings={**EXACT, "sync_every": 1}),
        "DiLoCo": diloco,
        "DiLoCo, lr 0.7, momentum 0.9": replace(diloco, settings={**diloco.settings, **PUBLISHED}),
        "Streaming DiLoCo": replace(base, variant=MEAN, settings={**streaming, "sync_every": H}),
        "Decoupled": replace(base, settings={"sync_every": H}),
    }
    return {
        name: replace(
            cell,
            name=name + ("" if cell.learners == 1 else f", M={learners}"),
            task=replace(task, inner_lr=rates[name][cell.learners]),
        )
        for name, cell in made.items()
        if name in rates
    }


def searched(
    name: str, asks: str, cells: Iterable[Cell], *, seeds: int, rates: Sequence[float]
) -> Suite:  # fmt: skip
    """Search suite: each cell at `rates`, and at half, one and two times its own inner learning rate."""
    groups: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        own = cell.task.inner_lr
        groups[cell.name] = {
            (tried := f"{cell.name}, lr {rate:g}"): replace(cell, name=tried, task=replace(cell.task, inner_lr=rate))
            for rate in sorted({*rates, own / 2, own, own * 2})
        }
    found = tuple(cell for group in groups.values() for cell in group.values())
    return Suite(
        name=name, asks=asks, cells=found, seeds=seeds, part="A", groups=[tuple(group) for group in groups.values()]
    )


def varied(
    name: str, asks: str, rows: Mapping[str, Mapping[str, Any]], against: str, within: Mapping[str, float],
    *, learners: int = 4, steps: int = T, seeds: int = 8, **more: Any,
) -> Suite:  # fmt: skip
    """Suite of decoupled runs that differ in the fields of `rows`, each compared with the row `against`."""
    base = Cell(name="", method="decoupled", learners=learners, steps=steps, task=SMALL)
    made = (replace(base, name=row, **fields) for row, fields in rows.items())
    rates = INNER_LR["Decoupled"]
    cells = tuple(replace(cell, task=replace(cell.task, inner_lr=rates[cell.learners])) for cell in made)
    reference = next(cell for cell in cells if cell.name == against)
    contrasts = tuple(
        Contrast(cell=cell.name, against=against, within=within.get(cell.name),
                 equal="merged" if cell.equal_tokens else "trained")
        for cell in cells if cell is not reference
    )  # fmt: skip
    return Suite(name=name, asks=asks, cells=cells, contrasts=contrasts, seeds=seeds, **more)
