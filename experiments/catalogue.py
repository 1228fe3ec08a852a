"""Catalogue of all comparison suites. `quick` checks in a minute that everything works; the others are the evidence of
docs/results.md. Each suite's question is its field `asks`; suites that choose settings are in tuning_suites.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..common.errors import SettingError
from ..simulator.ablation import Ablation
from . import tuning_suites
from .methods import Cell
from .suites import INNER_LR, PUBLISHED, SMALL, Contrast, Suite, T, methods, searched, varied

QUICK = replace(SMALL, sequence_length=32)
BOUNDS: Mapping[int, float] = {2: 0.02, 4: 0.04, 8: 0.08}
"""M -> bound on the loss of Decoupled relative to data-parallel at equal tokens, after a long run."""


def suite(name: str) -> Suite:
    """The suite called `name`; SettingError if there is none."""
    if name not in SUITES:
        raise SettingError(f"no suite is named {name!r}; there are {', '.join(SUITES)}, and full for all of them")
    return SUITES[name](name)


def _against_ancestors(learners: int) -> Iterator[Contrast]:
    tag = f", M={learners}"
    ours, parallel, alone = "Decoupled" + tag, "data-parallel" + tag, "lone, its share"
    yield Contrast(cell=ours, against="DiLoCo" + tag, within=0.005)
    yield Contrast(cell=ours, against="DiLoCo, lr 0.7, momentum 0.9" + tag, within=0.005)
    yield Contrast(cell=ours, against="Streaming DiLoCo" + tag, within=0.005)
    yield Contrast(cell=ours, against=parallel, alone=alone)
    yield Contrast(cell="DiLoCo" + tag, against=parallel, alone=alone)
    yield Contrast(cell="averaging each step" + tag, against=parallel, alone=alone)
    yield Contrast(cell=ours, against="lone, all tokens" + tag)
    yield Contrast(cell=ours, against=alone, equal="neither")


def _quick(name: str) -> Suite:
    return Suite(
        name=name,
        asks="Does Decoupled train as well as its ancestors, on the smallest model and in the shortest run?",
        cells=tuple(methods(QUICK, 2, 192).values()),
        contrasts=tuple(_against_ancestors(2)),
        seeds=3,
    )


def _learners(name: str) -> Suite:
    cells = {cell.name: cell for m in (2, 4, 8) for cell in methods(SMALL, m, T).values()}
    return Suite(
        name=name,
        asks="Does Decoupled train as well as data-parallel, DiLoCo and Streaming DiLoCo, for M = 2, 4, 8?",
        cells=tuple(cells.values()),
        contrasts=tuple(contrast for m in (2, 4, 8) for contrast in _against_ancestors(m)),
    )


def _two(name: str) -> Suite:
    """Two learners, whose single runs scatter most, with other seeds than suite `learners`."""
    kept = ("DiLoCo", "Streaming DiLoCo", "Decoupled")
    made = methods(SMALL, 2, T, {kind: INNER_LR[kind] for kind in kept})
    ours = made["Decoupled"].name
    return Suite(
        name=name, asks="The same for M = 2, with other seeds?", cells=tuple(made.values()), seeds=16, first_seed=8,
        contrasts=tuple(Contrast(cell=ours, against=made[kind].name, within=0.005) for kind in kept[:2]),
    )  # fmt: skip


def _budget(name: str) -> Suite:
    cells: dict[str, Cell] = {}
    contrasts: list[Contrast] = []
    for steps in tuning_suites.BUDGETS:
        for learners, bound in BOUNDS.items():
            parallel, alone, ours = tuning_suites.long_run(learners, steps)
            cells |= {cell.name: cell for cell in (parallel, alone, ours)}
            contrasts.append(
                Contrast(
                    cell=ours.name, against=parallel.name, within=bound if steps == tuning_suites.BUDGETS[-1] else None,
                    alone=alone.name, line=f"M = {learners}", at=steps,
                )
            )  # fmt: skip
            contrasts.append(
                Contrast(
                    cell=alone.name, against=parallel.name, equal="neither",
                    line=f"lone, its share, for M = {learners}", at=steps,
                )
            )  # fmt: skip
    return Suite(
        name=name, asks="Does the gap to data-parallel close as the run gets longer?",
        cells=tuple(cells.values()), contrasts=tuple(contrasts), seeds=3, along="steps of each learner",
    )  # fmt: skip


def _merge(name: str) -> Suite:
    rows: dict[str, dict[str, Any]] = {
        f"{kind}, M={m}": {"variant": Ablation(merge=kind), "learners": m}
        for m in (2, 4, 8)
        for kind in ("rda", "mean")
    }
    asks = "Is Radial-Directional Averaging better than the weighted mean?"
    made = varied(name, asks, rows, "mean, M=2", {}, seeds=5)
    pairs = tuple(Contrast(cell=f"rda, M={m}", against=f"mean, M={m}") for m in (2, 4, 8))
    return replace(made, contrasts=pairs)


def _codecs(name: str) -> Suite:
    rows: dict[str, dict[str, Any]] = {
        f"{up} up, {down} down": {"settings": {"codec_up": up, "codec_down": down}}
        for up, down in (("f32", "f32"), ("bf16", "bf16"), ("int8", "int8"), ("int4", "int4"), ("int4", "f32"),
                         ("f32", "int4"))
    }  # fmt: skip
    for codec in ("int4", "int8"):
        rows[f"{codec} up, {codec} down, no feedback"] = {
            **rows[f"{codec} up, {codec} down"], "variant": Ablation(feedback=False)
        }  # fmt: skip
    bound = {"int4 up, int4 down": 0.005}
    return varied(name, "What does quantization cost?", rows, "f32 up, f32 down", bound, seeds=6)


def _int4(name: str) -> Suite:
    made = _codecs(name)
    names = ("int4 up, int4 down", "f32 up, f32 down")
    return replace(
        made, asks="The same for int4 both ways, with other seeds?", seeds=10, first_seed=6,
        cells=tuple(cell for cell in made.cells if cell.name in names),
        contrasts=tuple(c for c in made.contrasts if c.cell == names[0] and c.against == names[1]),
    )  # fmt: skip


def _pace(name: str) -> Suite:
    """arXiv 2604.21428, Table 5; all merge the same tokens."""
    half = {"cluster": {"slowest": 2.0, "stragglers": 1}, "equal_tokens": True}
    spread = {"cluster": {"slowest": 1.7}, "equal_tokens": True}
    rows: dict[str, dict[str, Any]] = {
        "all equal": {},
        "one at half speed, K=1, grace": half,
        "one at half speed, K=1, no grace": {**half, "settings": {"grace_seconds": 0.0}},
        "one at half speed, K=M, no grace": {**half, "settings": {"quorum": 4, "grace_seconds": 0.0}},
        "up to 1.7 times as slow, K=1, gamma 0.8": spread,
        "up to 1.7 times as slow, K=1, gamma 0.4": {**spread, "settings": {"gamma": 0.4}},
        "up to 1.7 times as slow, K=1, gamma 0.2": {**spread, "settings": {"gamma": 0.2}},
        "up to 1.7 times as slow, K=1, no grace": {**spread, "settings": {"grace_seconds": 0.0}},
    }
    made = varied(
        name, "How long should rounds wait when learners differ in speed?", rows, "all equal",
        {"one at half speed, K=1, grace": 0.0},
        figures=("virtual_seconds", "merge_participation", "goodput"), seeds=6,
    )  # fmt: skip
    graced, not_graced = (
        replace(cell, name=f"{cell.name}, same T", equal_tokens=False)
        for cell in made.cells if cell.name.startswith("up to") and cell.name.endswith(("gamma 0.8", "no grace"))
    )  # fmt: skip
    same_time = Contrast(cell=not_graced.name, against=graced.name)
    return replace(made, cells=(*made.cells, graced, not_graced), contrasts=(*made.contrasts, same_time))


def _failures(name: str) -> Suite:
    """arXiv 2604.21428, Table 2."""
    rows: dict[str, dict[str, Any]] = {"none": {}}
    rows |= {
        f"{chips // 1000}k chips": {"cluster": {"chips": chips}, "equal_tokens": True}
        for chips in (150_000, 600_000, 1_200_000, 2_400_000)
    }
    return varied(
        name, "What do failing chips cost, M = 8, at equal merged tokens?", rows, "none", {"1200k chips": 0.01},
        learners=8, figures=("goodput", "uptime", "merge_participation"), seeds=5,
    )  # fmt: skip


def _absence(name: str) -> Suite:
    away = {share: {"cluster": {"absent": share}} for share in (0.1, 0.3, 0.5)}
    rows: dict[str, dict[str, Any]] = {"always there": {}}
    rows |= {f"{share:.0%} absent": {**fields, "equal_tokens": True} for share, fields in away.items()}
    made = varied(
        name, "What does it cost when learners die and return?", rows, "always there", {"30% absent": 0.01},
        figures=("goodput", "uptime", "virtual_seconds"), seeds=6,
    )  # fmt: skip
    shorter = replace(
        next(c for c in made.cells if c.name == "30% absent"), name="30% absent, same T", equal_tokens=False
    )
    return replace(
        made,
        cells=(*made.cells, shorter),
        contrasts=(*made.contrasts, Contrast(cell=shorter.name, against="always there", equal="neither")),
    )


def _scavenging(name: str) -> Suite:
    """arXiv 2604.21428, Table 4: half of the tokens by four learners, half by these and the late ones."""
    cells, contrasts = [], []
    for extra in (0, 1, 2, 4, 12):
        steps = T // 2 + round(T / 2 * 4 / (4 + extra))
        late = {"late": extra, "late_seconds": T / 2} if extra else {}
        for kind in ("Decoupled", "data-parallel"):
            cell = methods(SMALL, 4, steps)[kind]
            cells.append(replace(cell, name=f"{kind}, +{extra * 25}%", cluster=late))
            if extra:
                contrasts.append(Contrast(cell=cells[-1].name, against=f"{kind}, +0%"))
    return Suite(
        name=name, asks="How much sooner does a run of four learners finish if others join for half of its tokens?",
        cells=tuple(cells), contrasts=tuple(contrasts), seeds=3, figures=("virtual_seconds", "useful_share"),
    )  # fmt: skip


def _warm(name: str) -> Suite:
    """Every method starts from the model of a lone learner after half as many steps."""
    warm = Ablation(warm_steps=T // 2, warm_lr=INNER_LR["lone, its share"][1])
    cells, contrasts = [], []
    for variant, tag in ((Ablation(), "from scratch"), (warm, "warm")):
        made = methods(SMALL, 4, T)
        named = {
            kind: replace(made[kind], name=f"{kind}, {tag}",
                          variant=replace(made[kind].variant, warm_steps=variant.warm_steps, warm_lr=variant.warm_lr))
            for kind in ("data-parallel", "DiLoCo", "Decoupled", "lone, its share")
        }  # fmt: skip
        ours = named["Decoupled"]
        momentum = replace(
            ours, name=f"Decoupled, lr 0.7, momentum 0.9, {tag}",
            settings={**ours.settings, **PUBLISHED},
        )  # fmt: skip
        cells += [*named.values(), momentum]
        alone = named["lone, its share"].name
        contrasts += [
            Contrast(cell=ours.name, against=named["data-parallel"].name, alone=alone),
            Contrast(cell=ours.name, against=named["DiLoCo"].name),
            Contrast(cell=momentum.name, against=ours.name),
        ]
    return tuning_suites.tuned(
        Suite(
            name=name, asks="Does it matter whether a run starts from scratch or from a pretrained model?",
            cells=tuple(cells), contrasts=tuple(contrasts), seeds=3,
        )
    )  # fmt: skip


def _rates_elsewhere(name: str) -> Suite:
    suites = (
        tuning_suites.gap("gap"),
        tuning_suites.cadence("cadence"),
        tuning_suites.outer_elsewhere("outer-elsewhere"),
        _warm("warm"),
    )
    made = {cell.name: cell for each in suites for cell in each.cells if cell.name in tuning_suites.ELSEWHERE_LR}
    asks = "The same with another H, outer step, batch size or initialization?"
    return searched(name, asks, made.values(), seeds=2, rates=())


SUITES: dict[str, Callable[[str], Suite]] = {
    "quick": _quick,
    "inner-lr": tuning_suites.inner_rates,
    "inner-lr-long": tuning_suites.inner_rates_long,
    "inner-lr-elsewhere": _rates_elsewhere,
    "batch": tuning_suites.batch,
    "learners": _learners,
    "two": _two,
    "budget": _budget,
    "gap": tuning_suites.gap,
    "merge": _merge,
    "codecs": _codecs,
    "int4": _int4,
    "pace": _pace,
    "failures": _failures,
    "absence": _absence,
    "scavenging": _scavenging,
    "adoption": tuning_suites.adoption,
    "outer": tuning_suites.outer,
    "outer-elsewhere": tuning_suites.outer_elsewhere,
    "momentum": tuning_suites.momentum,
    "cadence": tuning_suites.cadence,
    "warm": _warm,
}
