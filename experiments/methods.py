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
from ..simulator.ablation import UNCHANGED, Ablation
from ..simulator.cost_only import CostOnlyModel
from ..simulator.real_training import TrainedModel, version_zero
from ..simulator.settings import ClusterPlan, FailureModel
from ..simulator.virtual_cluster import incarnation_of
from ..simulator.virtual_run import cluster_of
from ..syncer.aggregate import token_weight

Method = Literal["data-parallel", "lone", "synchronous", "decoupled"]
METHODS: tuple[Method, ...] = get_args(Method)
"""data-parallel: one model on the batches of all learners. lone: a single learner. synchronous: all learners merge
every H steps (DiLoCo; with H = 1, averaging at every step). decoupled: a virtual run."""
REVISION = 3
"""Revision of the methods: raise it when a method changes, so that older results are ignored."""
LEAD_STEPS = 3
"""Inner steps that learners of a virtual run take beyond its T: before the first round opens, and while the last rounds
drain. T is shorter by this than the steps of the other methods."""
USES: Mapping[Method, Collection[str]] = {
    "data-parallel": {"warm_steps", "warm_lr", "late", "late_seconds", "step_seconds"},
    "lone": {"warm_steps", "warm_lr"},
    "synchronous": {"warm_steps", "warm_lr", "merge", "outer_lr_end", "momentum_warmup", "sync_every_end"},
    "decoupled": {f.name for kind in (Ablation, ClusterPlan, FailureModel) for f in fields(kind)} - {"sync_every_end"},
}
"""Fields of a cell's variant, cluster and failures that affect each method; any other is an error."""
TOKEN_TOLERANCE = 0.002
"""Relative tolerance of equal tokens."""
MAX_STRETCH = 32
"""Maximum factor by which a run is lengthened."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run of a comparison; with a seed it is a function of these fields."""

    name: str
    """Name in tables."""
    method: Method
    learners: int = 2
    """M."""
    steps: int = 240
    """T, in steps of each learner; a lone learner takes all of them."""
    task: TaskSettings = field(default_factory=TaskSettings)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of RunSettings."""
    cluster: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of ClusterPlan."""
    failures: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of FailureModel."""
    variant: Ablation = UNCHANGED
    """Ablation; not a setting of a run."""
    equal_tokens: bool = False
    """Lengthen the run until it merges as many tokens as `steps` would without failures."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise SettingError(f"no method is named {self.method!r}; there are {', '.join(METHODS)}")
        tried = {name for name, value in vars(self.variant).items() if value != getattr(UNCHANGED, name)}
        idle = sorted((tried | self.cluster.keys() | self.failures.keys()) - set(USES[self.method]))
        idle += ["equal_tokens"] * (self.equal_tokens and self.method != "decoupled")
        idle += ["keeps"] * (self.variant.keeps and self.settings.get("adopt") != "rebase")
        if self.variant.keeps and self.equal_tokens:
            raise SettingError(f"{self.name}: what keeping merges is not known by counting, so equal_tokens cannot be")
        if idle:
            raise SettingError(f"{self.name}: {idle[0]} has no effect on {self.method}")

    @property
    def identity(self) -> str:
        """Hash of all fields of this cell, defaults included: 16 hex digits."""
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
    """Result of one cell with one seed."""

    val_a: float
    """Nats per byte on held-out part A, for choosing settings."""
    val_b: float
    """The same on part B, for reporting."""
    tokens: int
    """Tokens trained on by all learners together."""
    tokens_merged: int
    """Those of them that were merged into the model."""
    figures: Mapping[str, Any]
    """Further figures of a decoupled run: uptime, participation, and others."""


def train(cell: Cell, seed: int, corpus: Corpus) -> Result:
    """Train one cell. SettingError if its settings conflict, Diverged if its loss is not finite."""
    torch.set_num_threads(1)
    kinds = {"data-parallel": _data_parallel, "lone": _lone, "synchronous": _synchronous, "decoupled": _decoupled}
    trial = kinds[cell.method](cell, seed, corpus, initial_model(cell, seed, corpus))
    a, b = (_evaluate(trial.model, corpus, part, cell.task, seed) for part in ("A", "B"))
    if not math.isfinite(a + b):
        raise Diverged(f"{cell.name}, seed {seed}: the model's loss is not finite; lower the inner learning rate")
    merged = int(trial.figures.get("tokens_merged", trial.tokens))
    return Result(round(a, 6), round(b, 6), trial.tokens, merged, trial.figures)


def initial_model(cell: Cell, seed: int, corpus: Corpus) -> Transformer:
    """Initial model of every method: determined by the seed, optionally trained by a lone learner (warm_steps)."""
    model, task = Transformer(cell.task, seed), cell.task
    optimizer = make_optimizer(model)
    data = batches(
        corpus.train, task.batch_sequences, task.sequence_length, seed=seed, name="before", incarnation=1
    )  # fmt: skip
    for step in range(cell.variant.warm_steps):
        inner_step(model, optimizer, *next(data), cell.variant.warm_lr * schedule(0.0, step))
    return model


def _evaluate(model: nn.Module, corpus: Corpus, part: str, task: TaskSettings, seed: int) -> float:
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
class _Trial:
    """A method's outcome."""

    model: nn.Module
    tokens: int
    figures: Mapping[str, Any] = field(default_factory=dict)


def _data_parallel(cell: Cell, seed: int, corpus: Corpus, model: Transformer) -> _Trial:
    """Train on the batches of all learners at every step. Late learners enlarge the batch from when they join."""
    plan = cell.cluster_plan()
    optimizer, data, tokens = make_optimizer(model), streams(cell, seed, corpus, plan.learners + plan.late), 0
    for step in range(cell.steps):
        present = plan.learners + (plan.late if step * plan.step(0.0) >= plan.late_seconds else 0)
        drawn = [next(stream) for stream in data[:present]]
        inputs, targets = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        rate = cell.task.inner_lr * schedule(step / cell.steps, step)
        inner_step(model, optimizer, inputs, targets, rate)
        tokens += targets.numel()
    return _Trial(model, tokens, {"virtual_seconds": cell.steps * plan.step(0.0)})


def _lone(cell: Cell, seed: int, corpus: Corpus, model: Transformer) -> _Trial:
    """One learner on its own batches."""
    return _data_parallel(replace(cell, learners=1), seed, corpus, model)


def _synchronous(cell: Cell, seed: int, corpus: Corpus, model: Transformer) -> _Trial:
    """All learners take H steps, then merge their whole models and continue from the result; nothing overlaps."""
    variant, settings = cell.variant, replace(cell.run_settings(seed), fragments=1, overlap=1)
    state, plan = version_zero(settings, cell.task, variant.merge, model)
    (fragment,) = plan.fragments
    models = [model, *(Transformer(cell.task, seed) for _ in range(cell.learners - 1))]
    replicas, optimizers = [Replica(each, plan) for each in models], [make_optimizer(each) for each in models]
    for replica in replicas:
        replica.overwrite(fragment, state.public[0])
    data, since = streams(cell, seed, corpus, cell.learners), 0
    for step in range(cell.steps):
        rate = cell.task.inner_lr * schedule(step / cell.steps, step)
        for each, optimizer, stream in zip(models, optimizers, data, strict=True):
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
    return _Trial(models[0], cell.steps * cell.learners * cell.task.tokens_per_step)


def _delta(public: Tensor, theta: Tensor, settings: RunSettings) -> Tensor:
    payload = encode_delta(settings.codec_up, public, theta)
    return decode_delta(settings.codec_up, public, payload.numpy().data)


def _decoupled(cell: Cell, seed: int, corpus: Corpus, model: Transformer) -> _Trial:
    """A virtual run of the production parts."""
    plan, failures, settings = cell.cluster_plan(), FailureModel(**cell.failures), cell.run_settings(seed)
    settings = replace(settings, steps=max(1, settings.steps - LEAD_STEPS))
    if cell.equal_tokens:
        settings = replace(settings, steps=_steps_for_equal_tokens(plan, failures, settings, cell.task))
    trained = TrainedModel(settings, cell.task, corpus, variant=cell.variant, model=model)
    outcome = cluster_of(plan, failures, settings, trained).run()
    Replica(model, trained.plan).show(trained.state.public)
    names = ("uptime", "merge_participation", "useful_share", "tokens_merged", "merges", "cycles")
    figures = {name: outcome.figures[name] for name in names}
    figures["goodput"] = outcome.goodput
    figures["virtual_seconds"] = round(outcome.virtual_seconds, 3)
    return _Trial(model, outcome.figures["tokens_reported"], figures)


def _steps_for_equal_tokens(
    plan: ClusterPlan, failures: FailureModel, settings: RunSettings, task: TaskSettings
) -> int:  # fmt: skip
    """T with which this cluster merges as many tokens as `settings.steps` would without failures and stragglers.

    Found by cost-only runs: failures depend on the seed and not on the training. SettingError if the run would be too
    long.
    """
    _, cut = version_zero(settings, task)

    def merged(plan: ClusterPlan, failures: FailureModel, steps: int) -> int:
        chosen = replace(settings, steps=steps)
        counted = CostOnlyModel(
            chosen, parameters=cut.parameters, tokens_a_step=task.tokens_per_step, fragments=cut.P
        )  # fmt: skip
        return int(cluster_of(plan, failures, chosen, counted).run().figures["tokens_merged"])

    wanted = merged(ClusterPlan(learners=plan.learners), FailureModel(), settings.steps)
    below, above = 0, settings.steps
    while merged(plan, failures, above) < wanted * (1 - TOKEN_TOLERANCE):
        below, above = above, 2 * above
        if above > MAX_STRETCH * settings.steps:
            raise SettingError(f"even {below} steps do not merge as many tokens as {settings.steps} without failures")
    while above - below > 1:
        middle = (below + above) // 2
        if merged(plan, failures, middle) < wanted * (1 - TOKEN_TOLERANCE):
            below = middle
        else:
            above = middle
    return above
