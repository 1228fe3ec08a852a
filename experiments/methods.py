"""Training methods that comparisons evaluate. Each trains one model from the same seed to a global model.

All methods use the same inner step, data and schedule; the seed determines initial weights, data order and failures
together. The reference methods are deliberately simple implementations; they are compared with the production code in
a virtual cluster.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..common.codec import decode_delta, encode_delta
from ..common.config import RunSettings, TaskSettings
from ..common.errors import Diverged, SettingError
from ..learner.replica import Replica
from ..learner.task.evaluator import evaluate, validation_windows
from ..learner.task.loop import inner_step, make_optimizer, schedule
from ..learner.task.text import Batches, Corpus, batches
from ..learner.task.transformer import Transformer
from ..simulator.ablation import USUAL, Ablation
from ..simulator.cost_only import CostOnlyModel
from ..simulator.real_training import TrainedModel, version_zero
from ..simulator.settings import ClusterPlan, FailureModel
from ..simulator.virtual_cluster import incarnation_of
from ..simulator.virtual_run import cluster_of
from ..syncer.aggregate import token_weight

Method = Literal["data-parallel", "lone", "synchronous", "decoupled"]
METHODS: tuple[Method, ...] = get_args(Method)
"""data-parallel: one model on the batches of all learners at once. lone: one learner by itself. synchronous: all wait
for one another every H steps (DiLoCo; with H = 1 averaging at every step). decoupled: a virtual run."""
REVISION = 3
"""Of what is trained by a cell: to be raised when a method changes, so that older results do not count."""
LEAD_STEPS = 3
"""Inner steps that learners of a virtual run take beyond its T: until the first round opens, and while the last ones
are drained. T is so much shorter than the steps of the other methods."""
USES: Mapping[Method, Collection[str]] = {
    "data-parallel": {"warm_steps", "warm_lr", "late", "late_seconds", "step_seconds"},
    "lone": {"warm_steps", "warm_lr"},
    "synchronous": {"warm_steps", "warm_lr", "merge", "outer_lr_end", "momentum_warmup", "sync_every_end"},
    "decoupled": {f.name for kind in (Ablation, ClusterPlan, FailureModel) for f in fields(kind)} - {"sync_every_end"},
}
"""What of a cell's variant, cluster and failures has an effect on each method; anything else is an error."""
NEARLY = 0.002
"""Share by which tokens may differ where they are made equal."""
LONGEST_STRETCH = 32
"""So many times as long a run is made at most."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run of a comparison; with a seed it is a function of these fields."""

    name: str
    """As it stands in tables."""
    method: Method
    learners: int = 2
    """M."""
    steps: int = 240
    """T, in steps of each learner; a lone one takes all of them alone."""
    task: TaskSettings = field(default_factory=TaskSettings)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Changes of RunSettings."""
    cluster: Mapping[str, Any] = field(default_factory=dict)
    """Changes of ClusterPlan."""
    failures: Mapping[str, Any] = field(default_factory=dict)
    """Changes of FailureModel."""
    variant: Ablation = USUAL
    """What is tried that is no setting of a run."""
    equal_tokens: bool = False
    """The run is made as much longer as it takes until as many tokens are merged as in `steps` without any failure."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise SettingError(f"no method is named {self.method!r}; there are {', '.join(METHODS)}")
        tried = {name for name, value in vars(self.variant).items() if value != getattr(USUAL, name)}
        idle = sorted((tried | self.cluster.keys() | self.failures.keys()) - set(USES[self.method]))
        idle += ["equal_tokens"] * (self.equal_tokens and self.method != "decoupled")
        idle += ["keeps"] * (self.variant.keeps and self.settings.get("adopt") != "rebase")
        if self.variant.keeps and self.equal_tokens:
            raise SettingError(f"{self.name}: what keeping merges is not known by counting, so equal_tokens cannot be")
        if idle:
            raise SettingError(f"{self.name}: {idle[0]} has no effect on {self.method}")

    @property
    def identity(self) -> str:
        """16 hex digits that stand for all that this cell is made of, defaults included."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        made = {
            "settings": self.run_settings(0), "task": self.task, "variant": self.variant,
            "cluster": self.cluster_plan(), "failures": FailureModel(**self.failures),
        }  # fmt: skip
        whole = own | {name: vars(part) for name, part in made.items()} | {"revision": REVISION}
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]

    def run_settings(self, seed: int) -> RunSettings:
        return RunSettings(**{"steps": self.steps, "seed": seed, **self.settings})

    def cluster_plan(self) -> ClusterPlan:
        return ClusterPlan(**{"learners": self.learners, **self.cluster})


@dataclass(frozen=True)
class Result:
    """What one cell came to with one seed."""

    val_a: float
    """Nats per byte on held-out part A, for choosing settings."""
    val_b: float
    """The same on part B, for reporting."""
    tokens: int
    """Trained on by all learners together."""
    tokens_merged: int
    """Of them, those whose work went into the model."""
    figures: Mapping[str, Any]
    """Of a decoupled run: uptime, participation and the like."""


def train(cell: Cell, seed: int, corpus: Corpus) -> Result:
    """Run one cell. SettingError where its settings cannot be, Diverged where no number comes out."""
    torch.set_num_threads(1)
    kinds = {"data-parallel": _data_parallel, "lone": _lone, "synchronous": _synchronous, "decoupled": _decoupled}
    trial = kinds[cell.method](cell, seed, corpus, begun(cell, seed, corpus))
    a, b = (_judge(trial.model, corpus, part, cell.task, seed) for part in ("A", "B"))
    if not math.isfinite(a + b):
        raise Diverged(f"{cell.name}, seed {seed}: the model's loss is not finite; lower the inner learning rate")
    merged = int(trial.figures.get("tokens_merged", trial.tokens))
    return Result(round(a, 6), round(b, 6), trial.tokens, merged, trial.figures)


def begun(cell: Cell, seed: int, corpus: Corpus) -> Transformer:
    """The model that every method begins with: what the seed makes, or what a lone learner has made of that."""
    model, task = Transformer(cell.task, seed), cell.task
    optimizer = make_optimizer(model)
    drawn_from = batches(
        corpus.train, task.batch_sequences, task.sequence_length, seed=seed, name="before", incarnation=1
    )  # fmt: skip
    for step in range(cell.variant.warm_steps):
        inner_step(model, optimizer, *next(drawn_from), cell.variant.warm_lr * schedule(0.0, step))
    return model


def _judge(model: nn.Module, corpus: Corpus, part: str, task: TaskSettings, seed: int) -> float:
    windows = validation_windows(corpus, part, "full", sequence_length=task.sequence_length, seed=seed)
    return evaluate(model, windows)


def streams(cell: Cell, seed: int, corpus: Corpus, learners: int) -> list[Batches]:
    """Each learner's batches, the same in every method."""
    task = cell.task
    return [
        batches(
            corpus.train, task.batch_sequences, task.sequence_length,
            seed=seed, name=f"learner-{n}", incarnation=incarnation_of(seed, f"learner-{n}", 1),
        )
        for n in range(1, learners + 1)
    ]  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """A method's outcome."""

    model: nn.Module
    tokens: int
    figures: Mapping[str, Any] = field(default_factory=dict)


def _data_parallel(cell: Cell, seed: int, corpus: Corpus, model: Transformer) -> Trial:
    """The gradient of all batches at every step. Learners that come late make the batch larger from then on."""
    plan = cell.cluster_plan()
    optimizer, drawn_from, tokens = make_optimizer(model), streams(cell, seed, corpus, plan.learners + plan.late), 0
    for step in range(cell.steps):
        there = plan.learners + (plan.late if step * plan.step(0.0) >= plan.late_seconds else 0)
        drawn = [next(stream) for stream in drawn_from[:there]]
        inputs, targets = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        rate = cell.task.inner_lr * schedule(step / cell.steps, step)
        inner_step(model, optimizer, inputs, targets, rate)
        tokens += targets.numel()
    return Trial(model, tokens, {"virtual_seconds": cell.steps * plan.step(0.0)})


def _lone(cell: Cell, seed: int, corpus: Corpus, model: Transformer) -> Trial:
    """One learner on its own batches."""
    return _data_parallel(replace(cell, learners=1), seed, corpus, model)


def _synchronous(cell: Cell, seed: int, corpus: Corpus, model: Transformer) -> Trial:
    """H steps each, then everybody's whole model is merged and everybody goes on from the result; nothing overlaps."""
    variant, settings = cell.variant, replace(cell.run_settings(seed), fragments=1, overlap=1)
    state, plan = version_zero(settings, cell.task, variant.merge, model)
    (fragment,) = plan.fragments
    models = [model, *(Transformer(cell.task, seed) for _ in range(cell.learners - 1))]
    replicas, optimizers = [Replica(each, plan) for each in models], [make_optimizer(each) for each in models]
    for replica in replicas:
        replica.overwrite(fragment, state.public[0])
    drawn_from, since = streams(cell, seed, corpus, cell.learners), 0
    for step in range(cell.steps):
        rate = cell.task.inner_lr * schedule(step / cell.steps, step)
        for each, optimizer, stream in zip(models, optimizers, drawn_from, strict=True):
            inner_step(each, optimizer, *next(stream), rate)
        since += 1
        fraction = (step + 1) / cell.steps
        if since >= variant.sync_every(settings, fraction) or step == cell.steps - 1:
            weight = token_weight(since * cell.task.tokens_per_step, since)
            state.settings = variant.outer(settings, fraction)
            state.merge(0, [_delta(state.public[0], r.vector(fragment), settings) for r in replicas],
                        [weight] * cell.learners)  # fmt: skip
            for replica in replicas:
                replica.overwrite(fragment, state.public[0])
            since = 0
    state.finalize()
    replicas[0].overwrite(fragment, state.public[0])
    return Trial(models[0], cell.steps * cell.learners * cell.task.tokens_per_step)


def _delta(public: Tensor, theta: Tensor, settings: RunSettings) -> Tensor:
    payload = encode_delta(settings.codec_up, public, theta)
    return decode_delta(settings.codec_up, public, payload.numpy().data)


def _decoupled(cell: Cell, seed: int, corpus: Corpus, model: Transformer) -> Trial:
    """A virtual run of the production parts."""
    plan, failures, settings = cell.cluster_plan(), FailureModel(**cell.failures), cell.run_settings(seed)
    settings = replace(settings, steps=max(1, settings.steps - LEAD_STEPS))
    if cell.equal_tokens:
        settings = replace(settings, steps=steps_for_equal_tokens(plan, failures, settings, cell.task))
    trained = TrainedModel(settings, cell.task, corpus, variant=cell.variant, model=model)
    outcome = cluster_of(plan, failures, settings, trained).run()
    Replica(model, trained.plan).show(trained.state.public)
    names = ("uptime", "merge_participation", "useful_share", "tokens_merged", "merges", "cycles")
    figures = {name: outcome.figures[name] for name in names}
    figures["goodput"] = outcome.goodput
    figures["virtual_seconds"] = round(outcome.virtual_seconds, 3)
    return Trial(model, outcome.figures["tokens_reported"], figures)


def steps_for_equal_tokens(
    plan: ClusterPlan, failures: FailureModel, settings: RunSettings, task: TaskSettings
) -> int:  # fmt: skip
    """T with which this cluster merges as many tokens as `settings.steps` bring where nothing fails and all are alike.

    Found by runs that only count: what fails is a function of the seed, and not of what is trained. SettingError if no
    run of bearable length does.
    """
    _, cut = version_zero(settings, task)

    def merged(plan: ClusterPlan, failures: FailureModel, steps: int) -> int:
        asked = replace(settings, steps=steps)
        counted = CostOnlyModel(
            asked, parameters=cut.parameters, tokens_a_step=task.tokens_per_step, fragments=cut.P
        )  # fmt: skip
        return int(cluster_of(plan, failures, asked, counted).run().figures["tokens_merged"])

    wanted = merged(ClusterPlan(learners=plan.learners), FailureModel(), settings.steps)
    below, above = 0, settings.steps
    while merged(plan, failures, above) < wanted * (1 - NEARLY):
        below, above = above, 2 * above
        if above > LONGEST_STRETCH * settings.steps:
            raise SettingError(f"even {below} steps do not merge as many tokens as {settings.steps} without failures")
    while above - below > 1:
        middle = (below + above) // 2
        if merged(plan, failures, middle) < wanted * (1 - NEARLY):
            below = middle
        else:
            above = middle
    return above
