"""Ways to train one model, each from the same seed to a global model that is judged: what a comparison is made of.

All of them take the same inner step, data and schedule; a seed changes initial weights, data order and (where there
are any) failures together. The reference methods are written here as plainly as they can be; what is compared with
them is the production code in a virtual cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from ..common.codec import decode_delta, encode_delta
from ..common.config import RunSettings, TaskSettings
from ..common.errors import SettingError
from ..learner.evaluate import evaluate, validation_windows
from ..learner.loop import inner_step, make_optimizer, schedule
from ..learner.replica import Replica
from ..learner.text import Batches, Corpus, batches
from ..learner.transformer import Transformer
from ..syncer.merge import token_weight
from .cluster import incarnation_of
from .running import cluster_of
from .settings import ClusterPlan, FailureModel
from .trained import Trained, version_zero

Method = Literal["data-parallel", "lone", "synchronous", "decoupled"]
METHODS: tuple[Method, ...] = get_args(Method)
"""data-parallel: one model on the batches of all learners at once. lone: one learner by itself. synchronous: all wait
for one another every H steps (DiLoCo; with H = 1 averaging at every step). decoupled: a virtual run."""


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
    merge: Literal["rda", "mean"] = "rda"
    """mean: the weighted mean for every tensor, instead of RDA where it applies."""
    feedback: bool = True
    """False: what the code of the way down could not carry is forgotten."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise SettingError(f"no method is named {self.method!r}; there are {', '.join(METHODS)}")

    def to_map(self) -> dict[str, Any]:
        """Plain values: the identity of this cell in a file of results."""
        return asdict(self)

    @classmethod
    def from_map(cls, rows: Mapping[str, Any]) -> Self:
        return cls(**{**rows, "task": TaskSettings(**rows["task"])})

    def run_settings(self, seed: int) -> RunSettings:
        return RunSettings(**{"steps": self.steps, "seed": seed, **self.settings})


@dataclass(frozen=True)
class Result:
    """What one cell came to with one seed."""

    val_a: float
    """Nats per byte on held-out part A, for choosing settings."""
    val_b: float
    """The same on part B, for reporting."""
    tokens: int
    """Trained on by all learners together."""
    figures: Mapping[str, Any]
    """Of a decoupled run: uptime, participation and the like."""


def train(cell: Cell, seed: int, corpus: Corpus) -> Result:
    """Run one cell. SettingError where its settings cannot be."""
    torch.set_num_threads(1)
    kinds = {"data-parallel": _data_parallel, "lone": _lone, "synchronous": _synchronous, "decoupled": _decoupled}
    model, tokens, figures = kinds[cell.method](cell, seed, corpus)
    a, b = (_judge(model, corpus, part, cell.task, seed) for part in ("A", "B"))
    return Result(round(a, 6), round(b, 6), tokens, figures)


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


Trial = tuple[nn.Module, int, dict[str, Any]]
"""(the model at the end, tokens, figures)"""


def _data_parallel(cell: Cell, seed: int, corpus: Corpus) -> Trial:
    """The gradient of all batches at every step."""
    model = Transformer(cell.task, seed)
    optimizer = make_optimizer(model)
    drawn_from = streams(cell, seed, corpus, cell.learners)
    for step in range(cell.steps):
        drawn = [next(stream) for stream in drawn_from]
        inputs, targets = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        rate = cell.task.inner_lr * schedule(step / cell.steps, step)
        inner_step(model, optimizer, inputs, targets, rate)
    return model, cell.steps * cell.learners * cell.task.tokens_per_step, {}


def _lone(cell: Cell, seed: int, corpus: Corpus) -> Trial:
    """One learner on its own batches."""
    return _data_parallel(replace(cell, learners=1), seed, corpus)


def _synchronous(cell: Cell, seed: int, corpus: Corpus) -> Trial:
    """H steps each, then everybody's whole model is merged and everybody goes on from the result; nothing overlaps."""
    settings = replace(cell.run_settings(seed), fragments=1, overlap=1)
    state, plan = version_zero(settings, cell.task, cell.merge)
    (fragment,) = plan.fragments
    models = [Transformer(cell.task, seed) for _ in range(cell.learners)]
    replicas, optimizers = [Replica(model, plan) for model in models], [make_optimizer(model) for model in models]
    drawn_from = streams(cell, seed, corpus, cell.learners)
    since = 0
    for step in range(cell.steps):
        rate = cell.task.inner_lr * schedule(step / cell.steps, step)
        for model, optimizer, stream in zip(models, optimizers, drawn_from, strict=True):
            inner_step(model, optimizer, *next(stream), rate)
        since += 1
        if since == settings.sync_every or step == cell.steps - 1:
            weight = token_weight(since * cell.task.tokens_per_step, since)
            state.merge(0, [_delta(state.public[0], r.vector(fragment), settings) for r in replicas],
                        [weight] * cell.learners)  # fmt: skip
            for replica in replicas:
                replica.overwrite(fragment, state.public[0])
            since = 0
    state.finalize()
    replicas[0].overwrite(fragment, state.public[0])
    return models[0], cell.steps * cell.learners * cell.task.tokens_per_step, {}


def _delta(public: Tensor, theta: Tensor, settings: RunSettings) -> Tensor:
    payload = encode_delta(settings.codec_up, public, theta)
    return decode_delta(settings.codec_up, public, payload.numpy().data)


def _decoupled(cell: Cell, seed: int, corpus: Corpus) -> Trial:
    """A virtual run of the production parts."""
    plan = ClusterPlan(**{"learners": cell.learners, **cell.cluster})
    failures, settings = FailureModel(**cell.failures), cell.run_settings(seed)
    trained = Trained(settings, cell.task, corpus, merge=cell.merge, feedback=cell.feedback)
    outcome = cluster_of(plan, failures, settings, trained).run()
    model = Transformer(cell.task, seed)
    Replica(model, trained.plan).show(trained.state.public)
    names = ("uptime", "merge_participation", "useful_share", "tokens_merged", "merges", "cycles")
    figures = {name: outcome.figures[name] for name in names}
    figures["goodput"] = outcome.goodput
    figures["virtual_seconds"] = round(outcome.virtual_seconds, 3)
    return model, outcome.figures["tokens_reported"], figures
