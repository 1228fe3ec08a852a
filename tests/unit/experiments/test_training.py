"""Each method trains; comparisons can be interrupted and killed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison_cells import OURS, PAIR, TASK, THEIRS
from decoupled_diloco.common.config import RunSettings
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.experiments.methods import METHODS, Cell, initial_model, streams, train
from decoupled_diloco.experiments.runner import run
from decoupled_diloco.experiments.suites import H
from decoupled_diloco.learner.public_model import PublicFragment
from decoupled_diloco.learner.task.text import load_corpus
from decoupled_diloco.simulator.ablation import Ablation
from decoupled_diloco.simulator.availability import members_of
from decoupled_diloco.simulator.real_training import TrainedModel
from decoupled_diloco.simulator.settings import ClusterPlan, FailureModel
from decoupled_diloco.simulator.virtual_cluster import VirtualCluster


@pytest.mark.parametrize("cell", [
    THEIRS,
    replace(THEIRS, method="lone"),
    replace(OURS, method="synchronous"),
    OURS,
    replace(OURS, variant=Ablation(merge="mean", feedback=False, warm_steps=3, warm_lr=1e-3)),
    replace(OURS, settings={**OURS.settings, "outer_momentum": 0.9},
            variant=Ablation(outer_lr_end=0.5, momentum_warmup=0.5)),
    replace(OURS, method="synchronous", variant=Ablation(sync_every_end=12)),
    replace(OURS, settings={**OURS.settings, "adopt": "rebase"}, variant=Ablation(keeps=True),
            cluster={"slowest": 3.0, "stragglers": 1}),
    replace(OURS, cluster={"late": 2, "late_seconds": 12.0}),
    replace(THEIRS, cluster={"late": 2, "late_seconds": 12.0}),
    replace(OURS, cluster={"absent": 0.3, "absence_seconds": 3}),
    replace(OURS, cluster={"chips": 2_400_000}),
], ids=lambda cell: f"{cell.method} {dict(cell.cluster)} {dict(cell.settings)} {cell.variant.merge}")  # fmt: skip
def test_every_method_trains_and_is_a_function_of_its_seed(cell: Cell) -> None:
    corpus = load_corpus(None, TASK.sequence_length)
    first, again = train(cell, 1, corpus), train(cell, 1, corpus)
    assert first == again
    assert first.val_b < 5.2, "better than what it began with, 5.55"
    assert first.tokens > 0


@pytest.mark.parametrize(
    "cluster", [{"absent": 0.5, "absence_seconds": 5.0}, {"slowest": 2.0, "stragglers": 1}, {"chips": 2_400_000}]
)
def test_equal_tokens_are_merged_whoever_is_away_or_slow(cluster: dict[str, Any]) -> None:
    corpus = load_corpus(None, TASK.sequence_length)
    there = replace(OURS, steps=96)
    away = replace(there, cluster=cluster)
    everything, less, equal = (train(c, 1, corpus) for c in (there, away, replace(away, equal_tokens=True)))
    assert less.tokens_merged < 0.97 * everything.tokens_merged
    assert math.isclose(equal.tokens_merged, everything.tokens_merged, rel_tol=0.02)


def test_a_virtual_run_trains_on_as_many_tokens_as_the_other_methods() -> None:
    corpus, cell = load_corpus(None, TASK.sequence_length), replace(OURS, steps=48, settings={"sync_every": H})
    counts = {method: train(replace(cell, method=method), 0, corpus).tokens for method in METHODS if method != "lone"}
    assert set(counts.values()) == {2 * 48 * TASK.tokens_per_step}, counts


def test_a_learner_that_lost_slices_works_on_its_share_on_average() -> None:
    worker = TrainedModel(OURS.run_settings(0), TASK, load_corpus(None, TASK.sequence_length)).new_learner("a", 1, None)
    worker.share = 0.9
    for _ in range(10):
        worker.step([])
    assert worker.done.tokens == 0.9 * 10 * TASK.tokens_per_step
    worker.close()


def test_learners_that_come_late_shorten_a_run_of_as_many_tokens_and_make_batches_larger() -> None:
    corpus = load_corpus(None, TASK.sequence_length)
    joined = replace(OURS, steps=18, cluster={"late": 2, "late_seconds": 12.0})
    ours, theirs, alone = (train(c, 0, corpus) for c in (joined, replace(joined, method="data-parallel"), OURS))
    assert theirs.tokens == (12 * 2 + 6 * 4) * TASK.tokens_per_step
    assert math.isclose(ours.tokens, alone.tokens, rel_tol=0.1)
    assert ours.figures["virtual_seconds"] < 0.85 * alone.figures["virtual_seconds"]


def test_a_warm_start_is_a_lone_learner_s_model_and_all_methods_have_the_same() -> None:
    corpus, warm = load_corpus(None, TASK.sequence_length), Ablation(warm_steps=5, warm_lr=1e-3)
    faster = replace(THEIRS, variant=warm, task=replace(TASK, inner_lr=0.1))
    cold, ours, theirs = (initial_model(c, 0, corpus).state_dict() for c in (OURS, replace(OURS, variant=warm), faster))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not all(torch.equal(ours[name], cold[name]) for name in ours)


def test_the_outer_step_changes_over_the_run_as_its_variant_says() -> None:
    settings = RunSettings(outer_lr=1.0, outer_momentum=0.8)
    assert Ablation().outer(settings, 0.3) is settings
    falls = Ablation(outer_lr_end=0.5, momentum_warmup=0.5)
    seen = [(s.outer_lr, s.outer_momentum) for s in (falls.outer(settings, f) for f in (0.0, 0.25, 0.5, 1.0))]
    assert seen == [(1.0, 0.0), (0.875, 0.4), (0.75, 0.8), (0.5, 0.8)]
    assert [Ablation(sync_every_end=48).sync_every(settings, f) for f in (0.0, 0.5, 1.0)] == [24, 36, 48]


def test_a_learner_that_had_no_part_in_a_merge_keeps_its_progress_where_that_is_tried() -> None:
    corpus = load_corpus(None, TASK.sequence_length)
    settings = replace(OURS, settings={**OURS.settings, "adopt": "rebase"}).run_settings(0)
    backend = TrainedModel(settings, TASK, corpus, variant=Ablation(keeps=True))
    keeps = backend.new_learner("a", 1, None)
    keeps.step([])
    before = keeps.session._exchange.replica.vector(keeps.plan.fragments[0]).clone()
    old = backend.public_model()[0].vector
    new = PublicFragment(1, old + 1.0, "")
    keeps.deliver(0, new)
    trained = keeps.session._exchange.counters.accounts[0].since
    keeps.session._exchange.adopt(keeps.mailbox.boundary().arrivals, reset=False)
    after = keeps.session._exchange.replica.vector(keeps.plan.fragments[0])
    inside = torch.cat([torch.arange(span.offset, span.stop) for span in keeps.plan.fragments[0].spans])
    assert torch.allclose(after[inside], (before + 1.0)[inside])
    assert keeps.session._exchange.counters.accounts[0].since == trained, "what it did counts for the next merge"
    keeps.close()


def test_one_synchronous_learner_is_a_lone_one() -> None:
    corpus = load_corpus(None, TASK.sequence_length)
    exact = {"codec_up": "f32", "codec_down": "f32", "sync_every": 6}
    synchronous = replace(OURS, method="synchronous", learners=1, settings=exact)
    lone = replace(OURS, method="lone")
    assert math.isclose(train(synchronous, 0, corpus).val_b, train(lone, 0, corpus).val_b, rel_tol=1e-4)


def test_all_methods_draw_the_same_data_for_a_seed() -> None:
    corpus, settings = load_corpus(None, TASK.sequence_length), OURS.run_settings(5)
    backend = TrainedModel(settings, TASK, corpus)
    outcome = VirtualCluster(settings, backend, members_of(ClusterPlan(), FailureModel(), 5, 1e4)).run()
    drawn = []
    for learner in outcome.learners:
        worker = backend.new_learner(learner["name"], learner["incarnation"], None)
        drawn.append(next(worker._batches)[0])
        worker.close()
    plain = [next(stream)[0] for stream in streams(OURS, 5, corpus, 2)]
    others = [next(stream)[0] for stream in streams(OURS, 6, corpus, 2)]
    assert all(torch.equal(one, other) for one, other in zip(drawn, plain, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(drawn, others, strict=True))


def test_a_text_that_is_too_small_to_hold_anything_out_judges_nobody(tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_text("all that there is, " * 9)
    with pytest.raises(SettingError, match="too small to hold anything out"):
        run(PAIR, tmp_path, data=tmp_path / "small.txt", seeds=1, jobs=1, minutes=math.inf, report=lambda _: None)


@pytest.mark.parametrize(
    ("changes", "idle"),
    [
        ({"method": "lone", "cluster": {"late": 1}}, "late has no effect on lone"),
        ({"method": "synchronous", "variant": Ablation(feedback=False)}, "feedback has no effect on synchronous"),
        ({"method": "data-parallel", "equal_tokens": True}, "equal_tokens has no effect on data-parallel"),
        ({"variant": Ablation(sync_every_end=48)}, "sync_every_end has no effect on decoupled"),
        ({"variant": Ablation(keeps=True)}, "keeps has no effect on decoupled"),
    ],
)
def test_what_would_be_ignored_in_a_cell_is_an_error(changes: dict[str, Any], idle: str) -> None:
    with pytest.raises(SettingError, match=idle):
        replace(OURS, **changes)


def test_another_setting_is_another_cell_and_a_default_that_is_spelled_out_is_not() -> None:
    others = [replace(OURS, settings={"sync_every": 7}), replace(OURS, cluster={"absent": 0.1}),
              replace(OURS, task=replace(TASK, inner_lr=1.0)), replace(OURS, name="another")]  # fmt: skip
    assert len({cell.identity for cell in [OURS, *others]}) == 5
    assert OURS.identity == replace(OURS, settings={**OURS.settings, "outer_lr": 1.0}, learners=2).identity
