"""Tuning suites, which choose settings and are judged on held-out part A: learning rates, batch size, outer step,
adoption, cadence, and what else might close the gap to data-parallel training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..simulator.ablation import Ablation
from .methods import Cell
from .suites import MEAN, PUBLISHED, SMALL, Contrast, H, Suite, T, methods, searched, varied

BUDGETS = (600, 1700, 4800)
LONG_LR: Mapping[int, Mapping[str, Mapping[int, float]]] = {
    600: {
        "data-parallel": {2: 12e-3, 4: 24e-3, 8: 24e-3}, "lone, its share": {1: 12e-3},
        "Decoupled": {2: 12e-3, 4: 24e-3, 8: 24e-3},
    },
    1700: {
        "data-parallel": {2: 12e-3, 4: 24e-3, 8: 48e-3}, "lone, its share": {1: 6e-3},
        "Decoupled": {2: 12e-3, 4: 6e-3, 8: 12e-3},
    },
    4800: {
        "data-parallel": {2: 12e-3, 4: 6e-3, 8: 12e-3}, "lone, its share": {1: 6e-3},
        "Decoupled": {2: 12e-3, 4: 6e-3, 8: 3e-3},
    },
}  # fmt: skip
"""Steps -> inner learning rates as in INNER_LR, for longer runs, from suite `inner-lr-long`."""
RATES = (12e-3, 24e-3, 48e-3)
"""Learning rates tried with every method, before the neighbours of the best one."""
ELSEWHERE_LR: Mapping[str, float] = {
    "H=1, synchronous": 24e-3, "H=6": 24e-3, "H=12": 24e-3, "H=48": 24e-3, "H=96": 12e-3,
    "lr 1, momentum 0, M=4, H=6": 24e-3, "lr 1, momentum 0, M=4, H=12": 24e-3, "lr 1, momentum 0, M=4, H=48": 24e-3,
    "lr 0.7, momentum 0.3, M=4, H=6": 24e-3, "lr 0.7, momentum 0.9, M=4, H=6": 3e-3,
    "lr 0.7, momentum 0.3, M=4, H=12": 24e-3, "lr 0.7, momentum 0.9, M=4, H=12": 12e-3,
    "lr 0.7, momentum 0.3, M=4, H=48": 24e-3, "lr 0.7, momentum 0.9, M=4, H=48": 12e-3,
    "outer lr 1 falling to 0.5": 24e-3, "outer lr 1.5 falling to 1": 24e-3, "momentum 0.5": 12e-3,
    "momentum 0.5, rising over half of the run": 12e-3, "momentum 0.9, rising over the whole run": 6e-3,
    "DiLoCo, H growing from 8 to 40": 24e-3, "batch four times as large, as many tokens": 48e-3,
    "data-parallel, warm": 48e-3, "DiLoCo, warm": 24e-3, "Decoupled, warm": 24e-3, "lone, its share, warm": 12e-3,
    "Decoupled, lr 0.7, momentum 0.9, warm": 12e-3,
}  # fmt: skip
"""Row of the suites gap, cadence, outer-elsewhere and warm -> its best inner learning rate, if it may differ from
INNER_LR, from suite `inner-lr-elsewhere`."""
OUTER_CHOICES = ((1.0, 0.0), (0.7, 0.3), (0.7, 0.9))
"""The best two of suite `outer`, and DiLoCo's published one."""


def inner_rates(name: str) -> Suite:
    made = (cell for m in (2, 4, 8) for cell in methods(SMALL, m, T).values())
    return searched(name, "What is each method's own best inner learning rate?", made, seeds=2, rates=RATES)


def inner_rates_long(name: str) -> Suite:
    made = {cell.name: cell for steps in BUDGETS for m in (2, 4, 8) for cell in long_run(m, steps)}
    return searched(name, "And for each length of run?", made.values(), seeds=1, rates=())


def long_run(learners: int, steps: int) -> tuple[Cell, Cell, Cell]:
    """Data-parallel, a lone learner and Decoupled in a run of `steps` steps."""
    made = methods(SMALL, learners, steps, LONG_LR[steps])
    parallel, alone, ours = (
        replace(made[kind], name=f"{made[kind].name}, {steps} steps")
        for kind in ("data-parallel", "lone, its share", "Decoupled")
    )
    return parallel, alone, ours


def tuned(made: Suite) -> Suite:
    """The suite's rows at their rates in ELSEWHERE_LR, if listed there."""
    cells = tuple(
        replace(cell, task=replace(cell.task, inner_lr=ELSEWHERE_LR.get(cell.name, cell.task.inner_lr)))
        for cell in made.cells
    )
    return replace(made, cells=cells)


def batch(name: str) -> Suite:
    """The same number of tokens in smaller and larger batches."""
    beyond = {2: (3e-3,), 64: (96e-3,)}
    cells, groups = [], []
    for batch in (2, 4, 8, 16, 32, 64):
        alone = methods(replace(SMALL, batch_sequences=batch), 4, T * 32 // batch)["lone, its share"]
        rows = [
            replace(alone, name=f"{batch * SMALL.sequence_length} tokens, lr {rate:g}",
                    task=replace(alone.task, inner_lr=rate))
            for rate in sorted({6e-3, *RATES, *beyond.get(batch, ())})
        ]  # fmt: skip
        cells += rows
        groups.append(tuple(row.name for row in rows))
    asks = "From which batch on does a learner lose by a larger one at equal tokens (the critical batch)?"
    return Suite(name=name, asks=asks, cells=tuple(cells), seeds=2, part="A", groups=groups)


def outer(name: str) -> Suite:
    grid = [(lr, mu) for lr in (0.4, 0.7, 1.0, 1.3) for mu in (0.0, 0.3, 0.6, 0.9)]
    rows: dict[str, dict[str, Any]] = {
        f"lr {lr:g}, momentum {mu:g}": {"settings": {"outer_lr": lr, "outer_momentum": mu}} for lr, mu in grid
    }
    asks = "Which outer learning rate and momentum, M = 4, H = 24?"
    return varied(name, asks, rows, "lr 1, momentum 0", {}, seeds=3, part="A")


def outer_elsewhere(name: str) -> Suite:
    rows: dict[str, dict[str, Any]] = {}
    contrasts = []
    for learners, every in ((2, 24), (8, 24), (4, 12), (4, 48), (4, 6)):
        tag = f", M={learners}, H={every}"
        for lr, mu in OUTER_CHOICES:
            rows[f"lr {lr:g}, momentum {mu:g}{tag}"] = {
                "learners": learners, "settings": {"outer_lr": lr, "outer_momentum": mu, "sync_every": every}
            }  # fmt: skip
        first, *others = (f"lr {lr:g}, momentum {mu:g}{tag}" for lr, mu in OUTER_CHOICES)
        contrasts += [Contrast(cell=other, against=first) for other in others]
    made = varied(name, "Do the best outer steps stay the best at other M and H?", rows, contrasts[0].against, {})
    return tuned(replace(made, contrasts=tuple(contrasts), part="A", seeds=3))


def momentum(name: str) -> Suite:
    """DiLoCo's published outer step in runs of up to 200 rounds; it needs a lower inner learning rate."""
    cells, contrasts = [], []
    for steps in BUDGETS:
        ours = long_run(2, steps)[2]
        cells.append(ours)
        for factor in (0.5, 1.0):
            rate = factor * ours.task.inner_lr
            row = replace(
                ours, name=f"lr 0.7, momentum 0.9, inner lr {rate:g}, {steps} steps",
                settings={**ours.settings, **PUBLISHED}, task=replace(ours.task, inner_lr=rate),
            )  # fmt: skip
            cells.append(row)
            contrasts.append(Contrast(cell=row.name, against=ours.name, line=f"inner lr {rate:g}", at=steps))
    return Suite(
        name=name, asks="Does the lineage's outer momentum pay in longer runs, M = 2?", cells=tuple(cells),
        contrasts=tuple(contrasts), seeds=3, part="A", along="steps of each learner",
    )  # fmt: skip


def cadence(name: str) -> Suite:
    """Cadence; H = 1 uses the synchronous method, since a fragment in transit takes as long as a step."""
    rows: dict[str, dict[str, Any]] = {"H=1, synchronous": {"settings": {"sync_every": 1}, "method": "synchronous"}}
    rows |= {f"H={h}": {"settings": {"sync_every": h}} for h in (6, 12, 24, 48, 96)}
    asks = "How often must a fragment be merged?"
    return tuned(varied(name, asks, rows, "H=24", {}, seeds=3, part="A", figures=("useful_share",)))


def adoption(name: str) -> Suite:
    rows: dict[str, dict[str, Any]] = {
        f"{how}, M={m}": {"settings": {"adopt": how}, "learners": m}
        for m in (2, 4, 8) for how in ("overwrite", "rebase", "mix")
    }  # fmt: skip
    tag = ", one at half speed, no grace"
    apart = {"cluster": {"slowest": 2.0, "stragglers": 1}}
    rows |= {
        f"{how}{tag}": {**apart, "settings": {"adopt": how, "grace_seconds": 0.0}} for how in ("overwrite", "rebase")
    }
    rows["keep" + tag] = {**rows["rebase" + tag], "variant": Ablation(keeps=True)}
    made = varied(name, "Which adoption is best?", rows, "overwrite, M=2", {}, seeds=5)
    pairs = [
        Contrast(cell=f"{how}, M={m}", against=f"overwrite, M={m}") for m in (2, 4, 8) for how in ("rebase", "mix")
    ]
    pairs += [Contrast(cell=how + tag, against="overwrite" + tag, equal="neither") for how in ("rebase", "keep")]
    return replace(made, contrasts=tuple(pairs), part="A")


def gap(name: str) -> Suite:
    """Candidates for closing the gap to data-parallel."""
    made = methods(SMALL, 4, T)
    ours, parallel, alone, diloco = (
        made[kind] for kind in ("Decoupled", "data-parallel", "lone, its share", "DiLoCo")
    )  # fmt: skip

    def other(what: str, settings: Mapping[str, Any], **variant: Any) -> Cell:
        return replace(ours, name=what, settings={**ours.settings, **settings}, variant=Ablation(**variant))

    tried = [
        other("outer lr 1 falling to 0.5", {}, outer_lr_end=0.5),
        other("outer lr 1.5 falling to 1", {"outer_lr": 1.5}, outer_lr_end=1.0),
        other("momentum 0.5", {"outer_momentum": 0.5}),
        other("momentum 0.5, rising over half of the run", {"outer_momentum": 0.5}, momentum_warmup=0.5),
        other("momentum 0.9, rising over the whole run", {"outer_momentum": 0.9}, momentum_warmup=1.0),
        other("rebase", {"adopt": "rebase"}),
        other("H=12", {"sync_every": 12}),
        replace(diloco, name="DiLoCo, H=24"),
        replace(diloco, name="DiLoCo, H growing from 8 to 40", settings={**diloco.settings, "sync_every": 8},
                variant=replace(MEAN, sync_every_end=40)),
    ]  # fmt: skip
    larger = replace(
        ours, name="batch four times as large, as many tokens", steps=T // 4,
        settings={**ours.settings, "sync_every": H // 4},
        task=replace(ours.task, batch_sequences=4 * SMALL.batch_sequences),
    )  # fmt: skip
    cells = [parallel, alone, ours, *tried, larger]
    contrasts = [
        Contrast(cell=cell.name, against=parallel.name, alone=alone.name) for cell in (ours, *tried, larger)
    ] + [Contrast(cell=cell.name, against=ours.name) for cell in tried]
    return tuned(
        Suite(
            name=name, asks="What closes the gap to data-parallel, M = 4?", cells=tuple(cells),
            contrasts=tuple(contrasts), seeds=3, part="A",
        )
    )  # fmt: skip
