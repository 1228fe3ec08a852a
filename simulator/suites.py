"""What is compared with what: each suite is a list of cells, and which of them is held against which.

A suite's cells are trained for every seed. `quick` shows in minutes that all of it works; the others are what the
project's evidence is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..common.config import TaskSettings, preset
from ..common.errors import SettingError
from .methods import Cell
from .variant import Variant

SMALL = TaskSettings(layers=1, width=32, sequence_length=64, batch_sequences=8)
"""The model of the suites, 43,200 parameters: small enough for many runs on two cores."""
QUICK = replace(SMALL, sequence_length=32)
TOKEN_SECONDS = 8e-6
"""Of one core, for a token at this size: a forward and a backward pass, and all around it."""
T, H = 480, 24
MEAN = Variant(merge="mean")
EXACT: Mapping[str, Any] = {"codec_up": "f32", "codec_down": "f32"}
PUBLISHED: Mapping[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9}
"""DiLoCo's outer step in its paper."""
BOUNDS: Mapping[int, float] = {2: 0.02, 4: 0.04, 8: 0.08}
"""M -> by how much Decoupled may exceed data-parallel at equal tokens, at the end of a long run."""

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
"""Method -> M -> its own best inner learning rate at SMALL's size and T steps, by suite `inner-lr`."""
BUDGETS = (600, 1700, 4800)
LONG_LR: Mapping[str, Mapping[int, float]] = {
    "data-parallel": {600: 12e-3, 1700: 12e-3, 4800: 12e-3},
    "lone, its share": {600: 12e-3, 1700: 6e-3, 4800: 6e-3},
    "Decoupled": {600: 12e-3, 1700: 12e-3, 4800: 12e-3},
}
"""Method -> steps -> the same for M = 2 and longer runs, by suite `inner-lr-long`; for larger M as many times more as
in INNER_LR."""
RATES = (12e-3, 24e-3, 48e-3)
"""Tried with every method, and then the neighbours of the best."""


Equal = Literal["trained", "merged", "neither"]


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """One claim: `cell` against `against`, whose loss it may exceed by `within` at most (a share), if that is asked."""

    cell: str
    against: str
    within: float | None = None
    equal: Equal = "trained"
    """Which tokens are to be as many in both; neither: that they differ is what is asked."""
    alone: str = ""
    """A lone learner's cell: how much of what `against` gains over it does `cell` keep?"""
    line: str = ""
    """In a picture of trends: the line that this contrast belongs to."""
    at: float = 0.0
    """Where on that line it stands."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    name: str
    asks: str
    """In a sentence."""
    cells: tuple[Cell, ...]
    contrasts: tuple[Contrast, ...] = ()
    seeds: int = 8
    part: Literal["A", "B"] = "B"
    """The held-out part that it is judged on: A where it is there to choose settings."""
    figures: tuple[str, ...] = ()
    """Further columns of its table."""
    along: str = ""
    """What the lines of a picture of trends go along."""
    groups: Sequence[tuple[str, ...]] = field(default=())
    """Of a search: the cells of which the best one is wanted, in the order of what varies."""

    @property
    def core_hours(self) -> float:
        """About how long it takes on one core, with all its seeds."""
        steps = (cell.steps * (1 if cell.method == "lone" else cell.learners) for cell in self.cells)
        tokens = (cell.task.tokens_per_step * count for cell, count in zip(self.cells, steps, strict=True))
        return self.seeds * sum(tokens) * TOKEN_SECONDS / 3600

    def __post_init__(self) -> None:
        names = [cell.name for cell in self.cells]
        assert len(set(names)) == len(names), names  # noqa: S101 a slip in this file
        assert {n for c in self.contrasts for n in (c.cell, c.against, c.alone) if n} <= set(names)  # noqa: S101
        assert {name for group in self.groups for name in group} <= set(names)  # noqa: S101


def suite(name: str) -> Suite:
    """The suite called `name`; SettingError if there is none."""
    if name not in SUITES:
        raise SettingError(f"no suite is named {name!r}; there are {', '.join(SUITES)}, and full for all of them")
    return SUITES[name](name)


def methods(
    task: TaskSettings, learners: int, steps: int, rates: Mapping[str, Mapping[int, float]] = INNER_LR
) -> dict[str, Cell]:
    """The same tokens by every method (a lone learner's share apart), H = 24, each at its inner learning rate in
    `rates`, of the methods that stand there. Ancestors merge by the plain mean and in f32, and Streaming DiLoCo blends.
    All take the outer step that is best in runs of this length (lr 1, no momentum), and DiLoCo its published one, too.
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


def _inner(name: str) -> Suite:
    made = (cell for m in (2, 4, 8) for cell in methods(SMALL, m, T).values())
    return _searched(name, "What is each method's own best inner learning rate?", made, seeds=2)


def _inner_long(name: str) -> Suite:
    made = (cell for steps in BUDGETS for cell in _long(2, steps))
    return _searched(name, "And for each length of run, M = 2?", made, seeds=1, rates=())


def _long(learners: int, steps: int) -> tuple[Cell, Cell, Cell]:
    """Data-parallel, a lone learner and Decoupled in a run of that many steps."""
    rates: dict[str, dict[int, float]] = {}
    for kind, own in LONG_LR.items():
        short = INNER_LR[kind]
        rates[kind] = {m: own[steps] * short[m] / short[min(short)] for m in short if m in (1, learners)}
    made = methods(SMALL, learners, steps, rates)
    parallel, alone, ours = (
        replace(made[kind], name=f"{made[kind].name}, {steps} steps")
        for kind in ("data-parallel", "lone, its share", "Decoupled")
    )
    return parallel, alone, ours


def _searched(
    name: str, asks: str, cells: Iterable[Cell], *, seeds: int, rates: Sequence[float] = RATES
) -> Suite:  # fmt: skip
    """Each cell at `rates` and at its own inner learning rate and the neighbours of that."""
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


def _learners(name: str) -> Suite:
    cells = {cell.name: cell for m in (2, 4, 8) for cell in methods(SMALL, m, T).values()}
    return Suite(
        name=name,
        asks="Does Decoupled train as well as data-parallel, DiLoCo and Streaming DiLoCo, for M = 2, 4, 8?",
        cells=tuple(cells.values()),
        contrasts=tuple(contrast for m in (2, 4, 8) for contrast in _against_ancestors(m)),
    )


def _two(name: str) -> Suite:
    """Of two learners single runs scatter most."""
    kept = ("DiLoCo", "Streaming DiLoCo", "Decoupled")
    made = methods(SMALL, 2, T, {kind: INNER_LR[kind] for kind in kept})
    ours = made["Decoupled"].name
    return Suite(
        name=name, asks="And for M = 2, with more seeds?", cells=tuple(made.values()), seeds=24,
        contrasts=tuple(Contrast(cell=ours, against=made[kind].name, within=0.005) for kind in kept[:2]),
    )  # fmt: skip


def _budget(name: str) -> Suite:
    cells: dict[str, Cell] = {}
    contrasts: list[Contrast] = []
    for steps in BUDGETS:
        for learners, bound in BOUNDS.items():
            parallel, alone, ours = _long(learners, steps)
            cells |= {cell.name: cell for cell in (parallel, alone, ours)}
            contrasts.append(
                Contrast(
                    cell=ours.name, against=parallel.name, within=bound if steps == BUDGETS[-1] else None,
                    alone=alone.name, line=f"M = {learners}", at=steps,
                )
            )  # fmt: skip
    return Suite(
        name=name, asks="Does the gap to data-parallel close as the run gets longer?",
        cells=tuple(cells.values()), contrasts=tuple(contrasts), seeds=3, along="steps of each learner",
    )  # fmt: skip


def _batch(name: str) -> Suite:
    """As many tokens in smaller and larger batches."""
    cells, groups = [], []
    for batch in (2, 4, 8, 16, 32, 64):
        alone = methods(replace(SMALL, batch_sequences=batch), 4, T * 32 // batch)["lone, its share"]
        rows = [
            replace(alone, name=f"{batch * SMALL.sequence_length} tokens, lr {rate:g}",
                    task=replace(alone.task, inner_lr=rate))
            for rate in (6e-3, *RATES)
        ]  # fmt: skip
        cells += rows
        groups.append(tuple(row.name for row in rows))
    asks = "From which batch on does a learner lose by a larger one at equal tokens (the critical batch)?"
    return Suite(name=name, asks=asks, cells=tuple(cells), seeds=2, part="A", groups=groups)


def _varied(
    name: str, asks: str, rows: Mapping[str, Mapping[str, Any]], against: str, within: Mapping[str, float],
    *, learners: int = 4, steps: int = T, seeds: int = 8, **more: Any,
) -> Suite:  # fmt: skip
    """Decoupled runs that differ in the fields of `rows`, each held against the row `against`."""
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


def _merge(name: str) -> Suite:
    rows: dict[str, dict[str, Any]] = {
        f"{kind}, M={m}": {"variant": Variant(merge=kind), "learners": m} for m in (2, 4, 8) for kind in ("rda", "mean")
    }
    asks = "Is Radial-Directional Averaging better than the weighted mean?"
    made = _varied(name, asks, rows, "mean, M=2", {}, seeds=5)
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
            **rows[f"{codec} up, {codec} down"], "variant": Variant(feedback=False)
        }  # fmt: skip
    bound = {"int4 up, int4 down": 0.005}
    return _varied(name, "What does quantization cost?", rows, "f32 up, f32 down", bound, seeds=6)


def _int4(name: str) -> Suite:
    made = _codecs(name)
    names = ("int4 up, int4 down", "f32 up, f32 down")
    return replace(
        made, asks="And int4 both ways, with more seeds?", seeds=16,
        cells=tuple(cell for cell in made.cells if cell.name in names),
        contrasts=tuple(c for c in made.contrasts if c.cell == names[0] and c.against == names[1]),
    )  # fmt: skip


def _pace(name: str) -> Suite:
    """Paper, Table 5; all merge the same tokens."""
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
    made = _varied(
        name, "Who waits for whom when speeds differ?", rows, "all equal", {"one at half speed, K=1, grace": 0.0},
        figures=("virtual_seconds", "merge_participation", "goodput"), seeds=6,
    )  # fmt: skip
    graced, not_graced = (
        replace(cell, name=f"{cell.name}, same T", equal_tokens=False)
        for cell in made.cells if cell.name.startswith("up to") and cell.name.endswith(("gamma 0.8", "no grace"))
    )  # fmt: skip
    same_time = Contrast(cell=not_graced.name, against=graced.name)
    return replace(made, cells=(*made.cells, graced, not_graced), contrasts=(*made.contrasts, same_time))


def _failures(name: str) -> Suite:
    """Paper, Table 2."""
    rows: dict[str, dict[str, Any]] = {"none": {}}
    rows |= {
        f"{chips // 1000}k chips": {"cluster": {"chips": chips}, "equal_tokens": True}
        for chips in (150_000, 600_000, 1_200_000, 2_400_000)
    }
    return _varied(
        name, "What do failing chips cost, M = 8, at equal merged tokens?", rows, "none", {"1200k chips": 0.01},
        learners=8, figures=("goodput", "uptime", "merge_participation"), seeds=5,
    )  # fmt: skip


def _absence(name: str) -> Suite:
    away = {share: {"cluster": {"absent": share}} for share in (0.1, 0.3, 0.5)}
    rows: dict[str, dict[str, Any]] = {"always there": {}}
    rows |= {f"{share:.0%} absent": {**fields, "equal_tokens": True} for share, fields in away.items()}
    made = _varied(
        name, "What does it cost that learners die and come back?", rows, "always there", {"30% absent": 0.01},
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
    """Paper, Table 4: half of the tokens by four learners, half by four and those that came."""
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
        name=name, asks="How much sooner is a run of four over, if others come for half of its tokens?",
        cells=tuple(cells), contrasts=tuple(contrasts), seeds=3, figures=("virtual_seconds", "useful_share"),
    )  # fmt: skip


def _adoption(name: str) -> Suite:
    rows: dict[str, dict[str, Any]] = {
        f"{how}, M={m}": {"settings": {"adopt": how}, "learners": m}
        for m in (2, 4, 8) for how in ("overwrite", "rebase", "mix")
    }  # fmt: skip
    tag = ", one at half speed, no grace"
    apart = {"cluster": {"slowest": 2.0, "stragglers": 1}}
    rows |= {
        f"{how}{tag}": {**apart, "settings": {"adopt": how, "grace_seconds": 0.0}} for how in ("overwrite", "rebase")
    }
    rows["keep" + tag] = {**rows["rebase" + tag], "variant": Variant(keeps=True)}
    made = _varied(name, "Which adoption is best?", rows, "overwrite, M=2", {}, seeds=5)
    pairs = [
        Contrast(cell=f"{how}, M={m}", against=f"overwrite, M={m}") for m in (2, 4, 8) for how in ("rebase", "mix")
    ]
    pairs += [Contrast(cell=how + tag, against="overwrite" + tag, equal="neither") for how in ("rebase", "keep")]
    return replace(made, contrasts=tuple(pairs), part="A")


def _outer(name: str) -> Suite:
    grid = [(lr, mu) for lr in (0.4, 0.7, 1.0, 1.3) for mu in (0.0, 0.3, 0.6, 0.9)]
    rows: dict[str, dict[str, Any]] = {
        f"lr {lr:g}, momentum {mu:g}": {"settings": {"outer_lr": lr, "outer_momentum": mu}} for lr, mu in grid
    }
    asks = "Which outer learning rate and momentum, M = 4, H = 24?"
    return _varied(name, asks, rows, "lr 1, momentum 0", {}, seeds=3, part="A")


OUTER_CHOICES = ((1.0, 0.0), (0.7, 0.3), (0.7, 0.9))
"""The best two of suite `outer`, and the lineage's."""


def _outer_elsewhere(name: str) -> Suite:
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
    made = _varied(name, "Do the best outer steps stay the best at other M and H?", rows, contrasts[0].against, {})
    return replace(made, contrasts=tuple(contrasts), part="A", seeds=3)


def _cadence(name: str) -> Suite:
    """H = 1 by the synchronous method: a fragment that travels takes as long as a step."""
    rows: dict[str, dict[str, Any]] = {f"H={h}": {"settings": {"sync_every": h}} for h in (1, 6, 12, 24, 48, 96)}
    rows["H=1"]["method"] = "synchronous"
    return _varied(
        name, "How often must a fragment be merged?", rows, "H=24", {}, seeds=3, part="A", figures=("useful_share",)
    )


def _warm(name: str) -> Suite:
    """Every method begins with what a lone learner came to in half as many steps."""
    warm = Variant(warm_steps=T // 2, warm_lr=INNER_LR["lone, its share"][1])
    cells, contrasts = [], []
    for variant, tag in ((Variant(), "from scratch"), (warm, "warm")):
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
    return Suite(
        name=name, asks="Does it matter whether a run begins from scratch or with a model that was trained before?",
        cells=tuple(cells), contrasts=tuple(contrasts), seeds=3,
    )  # fmt: skip


def _gap(name: str) -> Suite:
    """What the gap to data-parallel could be closed by."""
    made = methods(SMALL, 4, T)
    ours, parallel, alone, diloco = (
        made[kind] for kind in ("Decoupled", "data-parallel", "lone, its share", "DiLoCo")
    )  # fmt: skip

    def other(what: str, settings: Mapping[str, Any], **variant: Any) -> Cell:
        return replace(ours, name=what, settings={**ours.settings, **settings}, variant=Variant(**variant))

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
        task=replace(ours.task, batch_sequences=4 * SMALL.batch_sequences),
    )  # fmt: skip
    cells = [parallel, alone, ours, *tried, larger]
    contrasts = [
        Contrast(cell=cell.name, against=parallel.name, alone=alone.name) for cell in (ours, *tried, larger)
    ] + [Contrast(cell=cell.name, against=ours.name) for cell in tried]
    return Suite(
        name=name, asks="What closes the gap to data-parallel, M = 4?", cells=tuple(cells),
        contrasts=tuple(contrasts), seeds=3, part="A",
    )  # fmt: skip


SUITES: dict[str, Callable[[str], Suite]] = {
    "quick": _quick,
    "inner-lr": _inner,
    "inner-lr-long": _inner_long,
    "batch": _batch,
    "learners": _learners,
    "two": _two,
    "budget": _budget,
    "gap": _gap,
    "merge": _merge,
    "codecs": _codecs,
    "int4": _int4,
    "pace": _pace,
    "failures": _failures,
    "absence": _absence,
    "scavenging": _scavenging,
    "adoption": _adoption,
    "outer": _outer,
    "outer-elsewhere": _outer_elsewhere,
    "cadence": _cadence,
    "warm": _warm,
}
