"""What is compared with what: each suite is a list of cells, and which of them is held against which.

A suite's first question stands in its name; its cells are trained for every seed. `quick` shows in minutes that all of
it works; the others are what the project's evidence is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..common.config import TaskSettings
from ..common.errors import SettingError
from .methods import Cell

SMALL = TaskSettings(layers=2, width=64, sequence_length=64, batch_sequences=8)
"""The model of the suites: small enough for many runs on two cores."""
QUICK = TaskSettings(layers=1, width=32, sequence_length=32, batch_sequences=8)
H = 24


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """One claim: `cell` against `against`, whose loss it may exceed by `within` at most (a share), if that is asked."""

    cell: str
    against: str
    within: float | None = None
    unequal: bool = False
    """Their tokens differ, and that is what is asked."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    name: str
    asks: str
    """In a sentence."""
    cells: tuple[Cell, ...]
    contrasts: tuple[Contrast, ...]
    seeds: int = 8
    part: Literal["A", "B"] = "B"
    """The held-out part that it is judged on: A where it is there to choose settings."""

    def __post_init__(self) -> None:
        names = [cell.name for cell in self.cells]
        assert len(set(names)) == len(names), names  # noqa: S101 a slip in this file
        assert {n for c in self.contrasts for n in (c.cell, c.against)} <= set(names)  # noqa: S101


def suite(name: str) -> Suite:
    """The suite called `name`; SettingError if there is none."""
    if name not in SUITES:
        raise SettingError(f"no suite is named {name!r}; there are {', '.join(SUITES)}")
    return SUITES[name](name)


def methods(task: TaskSettings, learners: int, steps: int, **settings: Any) -> list[Cell]:
    """The same tokens by every method, H = 24. All that merge take the same outer step (lr 1, no momentum), the best
    one known for runs of this length; the ancestors merge by the plain mean, as they were published.
    """
    tag = f", M={learners}"
    base = Cell(name="", method="decoupled", learners=learners, steps=steps, task=task)
    plain: Mapping[str, Any] = {"sync_every": H, **settings}
    return [
        replace(base, name="data-parallel" + tag, method="data-parallel"),
        replace(base, name="lone, its share" + tag, method="lone"),
        replace(base, name="lone, all tokens" + tag, method="lone", steps=steps * learners),
        replace(base, name="averaging each step" + tag, method="synchronous", merge="mean",
                settings={"sync_every": 1, "codec_up": "f32", "codec_down": "f32"}),
        replace(base, name="DiLoCo" + tag, method="synchronous", merge="mean",
                settings={**plain, "codec_up": "f32", "codec_down": "f32"}),
        replace(base, name="Streaming DiLoCo" + tag, merge="mean",
                settings={**plain, "quorum": learners, "codec_up": "f32", "codec_down": "f32", "adopt": "mix"}),
        replace(base, name="Decoupled" + tag, settings=plain),
    ]  # fmt: skip


def _quick(name: str) -> Suite:
    return Suite(
        name=name,
        asks="Does Decoupled train as well as its ancestors, on the smallest model there is?",
        cells=tuple(methods(QUICK, 2, 192)),
        contrasts=_against_ancestors(2),
        seeds=3,
    )


def _against_ancestors(learners: int) -> tuple[Contrast, ...]:
    tag = f", M={learners}"
    bound = {2: 0.02, 4: 0.04, 8: 0.08}[learners]
    return (
        Contrast(cell="Decoupled" + tag, against="DiLoCo" + tag, within=0.005),
        Contrast(cell="Decoupled" + tag, against="Streaming DiLoCo" + tag, within=0.005),
        Contrast(cell="Decoupled" + tag, against="data-parallel" + tag, within=bound),
        Contrast(cell="Decoupled" + tag, against="lone, its share" + tag, unequal=True),
        Contrast(cell="averaging each step" + tag, against="data-parallel" + tag),
    )


def _learners(name: str) -> Suite:
    cells = [cell for m in (2, 4, 8) for cell in methods(SMALL, m, 960)]
    return Suite(
        name=name,
        asks="Does Decoupled train as well as data-parallel, DiLoCo and Streaming DiLoCo, for M = 2, 4, 8?",
        cells=tuple(cells),
        contrasts=tuple(contrast for m in (2, 4, 8) for contrast in _against_ancestors(m)),
    )


def _budget(name: str) -> Suite:
    cells: list[Cell] = []
    contrasts: list[Contrast] = []
    for steps in (1200, 2400, 4800):
        for learners, bound in ((2, 0.02), (4, 0.04), (8, 0.08)):
            kept = {"data-parallel", "lone, its share", "Decoupled"}
            made = {c.name.rpartition(", ")[0]: c for c in methods(SMALL, learners, steps)}
            cells += [replace(made[k], name=f"{k}, M={learners}, {steps} steps") for k in sorted(kept)]
            tag = f", M={learners}, {steps} steps"
            longest = bound if steps == 4800 else None
            contrasts.append(Contrast(cell="Decoupled" + tag, against="data-parallel" + tag, within=longest))
            contrasts.append(Contrast(cell="lone, its share" + tag, against="data-parallel" + tag, unequal=True))
    return Suite(
        name=name, asks="Does the gap to data-parallel close as the run gets longer?",
        cells=tuple(cells), contrasts=tuple(contrasts), seeds=3,
    )  # fmt: skip


def _varied(
    name: str, asks: str, rows: Mapping[str, Mapping[str, Any]], against: str, within: Mapping[str, float],
    *, learners: int = 4, steps: int = 960, seeds: int = 8,
) -> Suite:  # fmt: skip
    """Decoupled runs that differ in the fields of `rows`, each held against the row `against`."""
    base = Cell(name="", method="decoupled", learners=learners, steps=steps, task=SMALL)
    cells = tuple(replace(base, name=row, **fields) for row, fields in rows.items())
    contrasts = tuple(Contrast(cell=row, against=against, within=within.get(row)) for row in rows if row != against)
    return Suite(name=name, asks=asks, cells=cells, contrasts=contrasts, seeds=seeds)


def _merge(name: str) -> Suite:
    rows: dict[str, dict[str, Any]] = {
        f"{kind}, M={m}": {"merge": kind, "learners": m} for m in (2, 4, 8) for kind in ("rda", "mean")
    }
    made = _varied(name, "Is Radial-Directional Averaging better than the weighted mean?", rows, "mean, M=2", {})
    pairs = tuple(Contrast(cell=f"rda, M={m}", against=f"mean, M={m}") for m in (2, 4, 8))
    return replace(made, contrasts=pairs)


def _codecs(name: str) -> Suite:
    rows: dict[str, dict[str, Any]] = {
        f"{up} up, {down} down": {"settings": {"codec_up": up, "codec_down": down}}
        for up, down in (("f32", "f32"), ("bf16", "bf16"), ("int8", "int8"), ("int4", "int4"), ("int4", "f32"),
                         ("f32", "int4"))
    }  # fmt: skip
    rows["int4 up, int4 down, no feedback"] = {**rows["int4 up, int4 down"], "feedback": False}
    return _varied(name, "What does quantization cost?", rows, "f32 up, f32 down", {"int4 up, int4 down": 0.005})


def _pace(name: str) -> Suite:
    slow = {"cluster": {"slowest": 2.0}}
    rows: dict[str, dict[str, Any]] = {
        "all equal": {},
        "unequal, K=1, grace": dict(slow),
        "unequal, K=1, no grace": {**slow, "settings": {"grace_seconds": 0.0}},
        "unequal, K=M, no grace": {**slow, "settings": {"quorum": 4, "grace_seconds": 0.0}},
    }
    return _varied(
        name, "Who waits for whom when speeds differ?", rows, "all equal", {"unequal, K=1, grace": 0.0}
    )  # fmt: skip


def _failures(name: str) -> Suite:
    rows: dict[str, dict[str, Any]] = {"none": {}}
    rows |= {
        f"{chips // 1000}k chips": {"cluster": {"chips": chips}} for chips in (150_000, 600_000, 1_200_000, 2_400_000)
    }
    asks = "What do failing chips cost, M = 8?"
    return _varied(name, asks, rows, "none", {"1200k chips": 0.01}, learners=8)


def _absence(name: str) -> Suite:
    rows: dict[str, dict[str, Any]] = {"always there": {}}
    rows |= {f"{share:.0%} absent": {"cluster": {"absent": share}} for share in (0.1, 0.3, 0.5)}
    return _varied(
        name, "What does it cost that learners die and come back?", rows, "always there", {"30% absent": 0.01}
    )  # fmt: skip


def _adoption(name: str) -> Suite:
    rows: dict[str, dict[str, Any]] = {
        f"{how}, M={m}": {"settings": {"adopt": how}, "learners": m}
        for m in (2, 4) for how in ("overwrite", "rebase", "mix")
    }  # fmt: skip
    made = _varied(name, "Which adoption is best?", rows, "overwrite, M=2", {})
    pairs = tuple(
        Contrast(cell=f"{how}, M={m}", against=f"overwrite, M={m}") for m in (2, 4) for how in ("rebase", "mix")
    )
    return replace(made, contrasts=pairs, part="A")


def _outer(name: str) -> Suite:
    rows: dict[str, dict[str, Any]] = {
        f"lr {lr:g}, momentum {mu:g}": {"settings": {"outer_lr": lr, "outer_momentum": mu}}
        for lr in (0.4, 0.7, 1.0, 1.3) for mu in (0.0, 0.5, 0.9)
    }  # fmt: skip
    asks = "Which outer learning rate and momentum, M = 4, H = 24?"
    return replace(_varied(name, asks, rows, "lr 1, momentum 0", {}, seeds=3), part="A")


def _cadence(name: str) -> Suite:
    rows: dict[str, dict[str, Any]] = {f"H={h}": {"settings": {"sync_every": h}} for h in (1, 12, 24, 48, 96)}
    rows["H=1"] = {"settings": {"sync_every": 1, "fragments": 1, "overlap": 1}}
    return replace(_varied(name, "How often must a fragment be merged?", rows, "H=24", {}, seeds=3), part="A")


def _inner(name: str) -> Suite:
    cells: list[Cell] = []
    for rate in (0.75e-3, 1.5e-3, 3e-3, 6e-3):
        cells += [
            replace(cell, name=f"{cell.name}, lr {rate:g}", task=replace(SMALL, inner_lr=rate))
            for cell in methods(SMALL, 4, 960)
        ]
    return Suite(
        name=name, asks="What is each method's own best inner learning rate (judged on part A)?",
        cells=tuple(cells), contrasts=(), seeds=2,
    )  # fmt: skip


SUITES: dict[str, Callable[[str], Suite]] = {
    "quick": _quick,
    "learners": _learners,
    "budget": _budget,
    "inner-lr": _inner,
    "merge": _merge,
    "codecs": _codecs,
    "pace": _pace,
    "failures": _failures,
    "absence": _absence,
    "adoption": _adoption,
    "outer": _outer,
    "cadence": _cadence,
}
