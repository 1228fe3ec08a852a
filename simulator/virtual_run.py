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
from .network_path import NetworkPath
from .real_training import TrainedModel
from .settings import ClusterPlan, FailureModel
from .virtual_cluster import RunOutcome, VirtualCluster, check_quorum

MAX_STRETCH = 40.0
"""Limit of a virtual run's length, as a multiple of its length without failures."""
ROUND_TRIPS = 10
"""Round trips added to that limit, for a latency longer than the run."""
MAX_BEAT_SECONDS = 2.5
"""Upper limit of the beat interval. Chips whose step takes many seconds report every half step instead of every second,
but often enough not to count as lost."""


def run(
    plan: ClusterPlan,
    settings: RunSettings,
    task: TaskSettings,
    failures: FailureModel,
    *,
    data: Path | None = None,
    tape: Path | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Run a plan; returns its figures, and with a model its losses on held-out part B (nats per byte)."""
    check_quorum(settings, len(members_of(plan, failures, settings.seed, 0.0)))  # before a tape is started
    if plan.cost_only:
        counted = CostOnlyModel(settings, parameters=int(plan.params), tokens_a_step=task.tokens_per_step, tape=tape)
        return _figures(cluster_of(plan, failures, settings, counted, on_progress=on_progress).run())
    torch.set_num_threads(1)
    corpus = load_corpus(data, task.sequence_length)
    trained = TrainedModel(settings, task, corpus, tape=tape)
    windows = validation_windows(
        corpus, "B", "full", sequence_length=task.sequence_length, seed=settings.seed
    )  # fmt: skip
    model = Transformer(task, settings.seed)
    first = evaluate(model, windows)
    outcome = cluster_of(plan, failures, settings, trained, tape=tape, on_progress=on_progress).run()
    Replica(model, trained.plan).show(trained.state.public)
    return _figures(outcome) | {"val_loss_first": round(first, 6), "val_loss_last": round(evaluate(model, windows), 6)}


def cluster_of(
    plan: ClusterPlan,
    failures: FailureModel,
    settings: RunSettings,
    backend: ModelBackend,
    *,
    tape: Path | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> VirtualCluster:
    """Build the virtual cluster of `plan`. SettingError for settings that conflict."""
    step_seconds = plan.step(failures.step_seconds) * plan.slowest
    horizon = MAX_STRETCH * (settings.steps * step_seconds + ROUND_TRIPS * 2 * plan.latency_seconds)
    return VirtualCluster(
        settings,
        backend,
        members_of(plan, failures, settings.seed, horizon),
        NetworkPath(latency_seconds=plan.latency_seconds, megabit=plan.megabit),
        tape,
        min(MAX_BEAT_SECONDS, max(1.0, step_seconds / 2)),
        horizon,
        on_progress,
    )


def _figures(outcome: RunOutcome) -> dict[str, Any]:
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
