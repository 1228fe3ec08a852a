"""Virtual run of a cluster plan: builds the learners and the backend, runs the cluster, and returns its figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..common.config import RunSettings, TaskSettings
from ..learner.replica import Replica
from ..learner.task.evaluator import evaluate, validation_windows
from ..learner.task.text import load_corpus
from ..learner.task.transformer import Transformer
from .availability import members_of
from .backend import ModelBackend
from .cost_only import CostOnlyModel
from .real_training import TrainedModel
from .settings import ClusterPlan, FailureModel
from .virtual_cluster import NetworkPath, RunOutcome, VirtualCluster, check_quorum

LONGEST = 40.0
"""So many times as long as without any failure a virtual run may take."""
ROUND_TRIPS = 10
"""So many ways there and back are added to that, which matters where the way is longer than the run."""
TELLS_LATEST_SECONDS = 2.5
"""A virtual second has no meaning for chips whose step takes many: they tell half a step apart, but within the time
after which a silent learner is lost."""


def run(
    plan: ClusterPlan,
    settings: RunSettings,
    task: TaskSettings,
    failures: FailureModel,
    *,
    data: Path | None = None,
    tape: Path | None = None,
    said: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Figures of the run, and with a model its losses on held-out part B (nats per byte)."""
    check_quorum(settings, len(members_of(plan, failures, settings.seed, 0.0)))  # before a tape is begun
    if plan.cost_only:
        counted = CostOnlyModel(settings, parameters=int(plan.params), tokens_a_step=task.tokens_per_step, tape=tape)
        return _told(cluster_of(plan, failures, settings, counted, said=said).run())
    torch.set_num_threads(1)
    corpus = load_corpus(data, task.sequence_length)
    trained = TrainedModel(settings, task, corpus, tape=tape)
    judged = validation_windows(
        corpus, "B", "full", sequence_length=task.sequence_length, seed=settings.seed
    )  # fmt: skip
    model = Transformer(task, settings.seed)
    first = evaluate(model, judged)
    outcome = cluster_of(plan, failures, settings, trained, tape=tape, said=said).run()
    Replica(model, trained.plan).show(trained.state.public)
    return _told(outcome) | {"val_loss_first": round(first, 6), "val_loss_last": round(evaluate(model, judged), 6)}


def cluster_of(
    plan: ClusterPlan,
    failures: FailureModel,
    settings: RunSettings,
    substance: ModelBackend,
    *,
    tape: Path | None = None,
    said: Callable[[int], None] = lambda _: None,
) -> VirtualCluster:
    """The virtual cluster that `plan` describes. SettingError for what cannot go together."""
    step_seconds = plan.step(failures.step_seconds) * plan.slowest
    horizon = LONGEST * (settings.steps * step_seconds + ROUND_TRIPS * 2 * plan.latency_seconds)
    return VirtualCluster(
        settings,
        substance,
        members_of(plan, failures, settings.seed, horizon),
        NetworkPath(latency_seconds=plan.latency_seconds, megabit=plan.megabit),
        tape,
        min(TELLS_LATEST_SECONDS, max(1.0, step_seconds / 2)),
        horizon,
        said,
    )


def _told(outcome: RunOutcome) -> dict[str, Any]:
    names = (
        "run", "steps_total", "cycles", "merges", "tokens_reported", "tokens_merged", "tokens_lost", "useful_share",
        "uptime", "merge_participation", "bytes_up", "bytes_down",
    )  # fmt: skip
    share = outcome.worked_seconds / outcome.real_seconds if outcome.real_seconds else 0.0
    return {name: outcome.figures[name] for name in names} | {
        "learners": [
            {name: row[name] for name in ("name", "local_steps", "tokens_reported", "tokens_merged")}
            for row in outcome.learners
        ],
        "goodput": outcome.goodput,
        "model_hash": outcome.model_hash,
        "virtual_seconds": round(outcome.virtual_seconds, 3),
        "seconds": round(outcome.real_seconds, 3),
        "in_inner_steps": round(share, 4),
    }
