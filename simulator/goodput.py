"""Goodput and uptime of a whole cluster under failures, without a model, for three systems.

goodput: share of the allocated time of all slices spent in useful steps. uptime: share of the time in which at least
one slice made useful steps. (arXiv 2604.21428, section 3.3 and Table 1.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from .failures import Absence, ChipGroup, Stretch, days, site_outages
from .settings import FailureModel, GoodputPlan

System = Literal["rigid", "elastic", "decoupled"]
"""Data-parallel without elasticity, elastic data-parallel, and decoupled learners."""
CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
TABLE_1: dict[tuple[System, int], tuple[tuple[int, int], ...]] = {
    ("rigid", 1): ((72, 72), (57, 57), (38, 38), (27, 27), (18, 18)),
    ("elastic", 1): ((88, 88), (80, 81), (69, 69), (58, 59), (40, 42)),
    ("decoupled", 2): ((94, 100), (88, 97), (80, 96), (70, 90), (54, 80)),
    ("decoupled", 4): ((96, 100), (93, 100), (89, 99), (82, 99), (73, 99)),
    ("decoupled", 8): ((98, 100), (96, 100), (94, 100), (88, 100), (80, 99)),
    ("decoupled", 16): ((99, 100), (98, 100), (96, 100), (93, 100), (86, 99)),
}
"""arXiv 2604.21428, Table 1: (goodput, uptime) in percent at CHIPS."""


@dataclass(frozen=True)
class GoodputOutcome:
    """Shares from 0 to 1."""

    goodput: float
    uptime: float


def simulate(
    system: System, learners: int, chips: int, model: FailureModel, *, steps: int, seed: int
) -> GoodputOutcome:
    """Simulate the time of `steps` inner steps. Data-parallel systems are one group, whatever `learners` is."""
    groups = learners if system == "decoupled" else 1
    seconds = steps * model.step_seconds
    useful, groups_busy = 0.0, []
    for number in range(groups):
        rng = np.random.default_rng((seed, 0, number))
        absences = list(absences_of(model, number, groups, seconds, seed))
        group = ChipGroup(model, chips / groups, rng, absences, elastic=system != "rigid")
        busy = _merge_stretches(group.life(seconds), seconds)
        groups_busy.append(busy.intervals)
        useful += busy.useful_seconds
    return GoodputOutcome(useful / (groups * seconds), _covered_seconds(groups_busy) / seconds)


@dataclass(frozen=True)
class _Busy:
    intervals: list[tuple[float, float]]
    useful_seconds: float


def _merge_stretches(life: Iterable[Stretch], seconds: float) -> _Busy:
    """Merge adjacent stretches into one interval: memory is O(interruptions)."""
    intervals: list[tuple[float, float]] = []
    useful = 0.0
    for stretch in life:
        end = min(stretch.end, seconds)
        useful += stretch.share * stretch.useful_seconds * (end - stretch.start) / (stretch.end - stretch.start)
        if intervals and stretch.start <= intervals[-1][1]:
            intervals[-1] = (intervals[-1][0], end)
        else:
            intervals.append((stretch.start, end))
    return _Busy(intervals, useful)


def _covered_seconds(groups_busy: Iterable[list[tuple[float, float]]]) -> float:
    """Seconds covered by at least one interval."""
    covered, reached = 0.0, 0.0
    for start, end in sorted(interval for life in groups_busy for interval in life):
        if end > reached:
            covered += end - max(start, reached)
            reached = end
    return covered


def absences_of(model: FailureModel, number: int, groups: int, seconds: float, seed: int) -> Iterator[Absence]:
    """Absences of many slices of group `number` together. A single group spans all sites; else each has one."""
    sites = range(model.sites) if groups == 1 else [number % model.sites]
    for site in sites:
        for start, end in site_outages(model, site, seconds, seed):
            yield Absence(start, end, 1.0 / len(sites))
    if groups == 1:
        yield from (Absence(start, end, model.scavenged_share) for start, end in days(model, seconds))
    elif number >= round(groups * (1 - model.scavenged_share)):
        yield from (Absence(start, end, 1.0) for start, end in days(model, seconds))


def outages(model: FailureModel, plan: GoodputPlan) -> int:
    """Number of site failures in the simulated time."""
    seconds = plan.steps(model) * model.step_seconds
    return sum(len(site_outages(model, site, seconds, plan.seed)) for site in range(model.sites))


def compare_systems(plan: GoodputPlan, model: FailureModel) -> dict[System, GoodputOutcome]:
    """The three systems on the same chips."""
    model.check_slices(plan.chips, plan.learners)
    systems: tuple[System, ...] = ("rigid", "elastic", "decoupled")
    return {
        system: simulate(system, plan.learners, plan.chips, model, steps=plan.steps(model), seed=plan.seed)
        for system in systems
    }


def table_1(model: FailureModel, *, steps: int, seed: int) -> list[dict[str, Any]]:
    """Cells of the paper's Table 1 and ours, all as shares."""
    cells = []
    for (system, learners), row in TABLE_1.items():
        for chips, (goodput, uptime) in zip(CHIPS, row, strict=True):
            ours = simulate(system, learners, chips, model, steps=steps, seed=seed)
            cells.append(
                {
                    "system": system, "learners": learners, "chips": chips,
                    "goodput": round(ours.goodput, 4), "uptime": round(ours.uptime, 4),
                    "paper_goodput": goodput / 100, "paper_uptime": uptime / 100,
                }
            )  # fmt: skip
    return cells


def largest_difference(cells: Iterable[dict[str, Any]]) -> float:
    """Largest difference from the paper in any cell, as a share."""
    return max(abs(float(c[what]) - float(c[f"paper_{what}"])) for c in cells for what in ("goodput", "uptime"))


def sensitivity(
    model: FailureModel, *, steps: int, seed: int, by: float = 0.25, on_progress: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Mean goodput over Table 1's cells with each parameter a fourth lower and higher, as shares."""
    idle = {"sites", *([] if model.slowdowns_a_chip_year else ["slowdown_seconds", "slowdown_factor"])}
    idle |= {
        *([] if model.site_failures_a_year else ["site_seconds"]),
        *([] if model.scavenged_share else ["night_hours"]),
    }
    rows = []
    for field in fields(FailureModel):
        value = getattr(model, field.name)
        if not value or field.name in idle:
            continue
        on_progress(f"{field.name}: two tables of {sum(map(len, TABLE_1.values()))} cells")
        row: dict[str, Any] = {"parameter": field.name, "value": value}
        for name, factor in (("less", 1 - by), ("more", 1 + by)):
            most = {"scavenged_share": 1.0, "night_hours": 24.0}.get(field.name, math.inf)
            changed = replace(model, **{field.name: type(value)(min(most, value * factor))})
            cells = table_1(changed, steps=steps, seed=seed)
            row[name] = round(sum(c["goodput"] for c in cells) / len(cells), 4)
        rows.append(row)
    return rows
