"""Text tables of the simulator's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .goodput import CHIPS, GoodputOutcome, System
from .settings import GoodputPlan, LinkModel

if TYPE_CHECKING:  # it loads torch
    from .replay import Verdict

NAMES: Mapping[System, str] = {
    "rigid": "data-parallel, no elasticity",
    "elastic": "data-parallel, elastic",
    "decoupled": "decoupled",
}


def outcomes(plan: GoodputPlan, found: Mapping[System, GoodputOutcome], hours: float, outages: int | None) -> str:
    rows = [
        [NAMES[system] + (f", {plan.learners} learners" if system == "decoupled" else ""),
         f"{outcome.goodput:.1%}", f"{outcome.uptime:.1%}"]
        for system, outcome in found.items()
    ]  # fmt: skip
    of_sites = "" if outages is None else f", {outages} outages of sites (few say little: raise --simulated-steps)"
    return f"{plan.chips:,} chips, {hours:,.1f} hours{of_sites}\n" + _table(["system", "goodput", "uptime"], rows)


def table_1(cells: Sequence[Mapping[str, Any]], worst: float) -> str:
    """Goodput / uptime in percent, with the paper's in brackets."""
    rows: dict[tuple[System, int], list[str]] = {}
    for cell in cells:
        rows.setdefault((cell["system"], cell["learners"]), []).append(
            f"{100 * cell['goodput']:.0f}/{100 * cell['uptime']:.0f} "
            f"({100 * cell['paper_goodput']:.0f}/{100 * cell['paper_uptime']:.0f})"
        )
    lines = [
        [f"{NAMES[system]}, {n}" if system == "decoupled" else NAMES[system], *row] for (system, n), row in rows.items()
    ]
    head = ["learners", *(f"{chips // 1000}k chips" for chips in CHIPS)]
    return (
        _table(head, lines)
        + f"\ngoodput/uptime in %, the paper's in brackets; largest difference {100 * worst:.1f} points"
    )


def sensitivity(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [[row["parameter"], f"{row['value']:g}", f"{row['less']:.1%}", f"{row['more']:.1%}"] for row in rows]
    return (
        _table(["parameter", "value", "a fourth less", "a fourth more"], lines) + "\nmean goodput over Table 1's cells"
    )


def table_13(cells: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        [f"{c['step_seconds']} s, {c['sites']} sites", c["method"], f"{c['bits']} bits", f"{c['utilization']:.0%}",
         f"{c['gbit']:.3g}", f"{c['paper_gbit']:g}"]
        for c in cells
    ]  # fmt: skip
    return _table(["setting", "method", "sent as", "computing", "Gbit/s", "paper"], lines)


def link(model: LinkModel, published: Mapping[str, float], ours: Mapping[str, float]) -> str:
    setup = f"{model.params:.3g} parameters, {model.step_seconds:g} s a step, {model.sites} sites"
    sections = [
        f"{setup}; chips compute {model.utilization:.0%} of the time\n",
        _table(["published form", "Gbit/s"], [[name, f"{gbit:.3g}"] for name, gbit in published.items()]),
        "",
        _table(
            [f"this system ({model.codec_up} up, {model.codec_down} down, H = {model.sync_every})", "Gbit/s"],
            [[name.replace("_", ", "), f"{gbit:.3g}"] for name, gbit in ours.items() if not name.startswith("bytes")],
        ),
    ]
    cycle = f"{ours['bytes_a_cycle_up']:,.0f} up, {ours['bytes_a_cycle_down']:,.0f} down"
    return "\n".join([*sections, f"a learner's bytes a cycle of {model.sync_every} steps: {cycle}"])


def run(result: Mapping[str, Any]) -> str:
    """Figures of a virtual run."""
    rows = [
        [name.replace("_", " "), _format(value)] for name, value in result.items() if name != "learners" and value != ""
    ]
    names = ["name", "local_steps", "tokens_reported", "tokens_merged"]
    learners = [[_format(row[name]) for name in names] for row in result["learners"]]
    return "\n\n".join(
        [
            _table(["figure", "value"], rows),
            _table(["learner", *(name.replace("_", " ") for name in names[1:])], learners),
        ]
    )


def verdict(found: Verdict) -> str:
    """Result of a replay, in a sentence or two."""
    same = f"the same {found.decisions} decisions and {found.merges} merges"
    ends = "" if found.complete else "; the tape ends before the run did"
    if not found.local_steps:
        return same + ends
    until = f"model {found.model_hash[:16]}" if found.model_hash else "up to there"
    same += ends
    return f"{same}, {found.local_steps} inner steps trained anew, the same bits: {until}"


def _format(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text table with headers: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[n]) for row in [head, *rows]) for n in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if n else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [head, ["-" * width for width in widths], *rows]
    )
