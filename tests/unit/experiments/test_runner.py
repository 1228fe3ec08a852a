"""Comparisons: what the numbers are said to show, what is trained only once, and that each method trains."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import pytest
import torch
from decoupled_diloco.cli.commands import run_command
from decoupled_diloco.common.config import RunSettings, TaskSettings
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.experiments.analysis import differences, interval, markdown
from decoupled_diloco.experiments.catalogue import SUITES, suite
from decoupled_diloco.experiments.methods import METHODS, Cell, initial_model, streams, train
from decoupled_diloco.experiments.runner import Results, run, write
from decoupled_diloco.experiments.suites import Contrast, Equal, H, Suite
from decoupled_diloco.learner.public_model import PublicFragment
from decoupled_diloco.learner.task.text import load_corpus
from decoupled_diloco.simulator.ablation import Ablation
from decoupled_diloco.simulator.availability import members_of
from decoupled_diloco.simulator.cost_only import CostOnlyModel
from decoupled_diloco.simulator.real_training import TrainedModel, version_zero
from decoupled_diloco.simulator.settings import ClusterPlan, FailureModel
from decoupled_diloco.simulator.virtual_cluster import VirtualCluster
from decoupled_diloco.simulator.virtual_run import cluster_of
from decoupled_diloco.syncer.round_events import Merge

TASK = TaskSettings(layers=1, width=32, sequence_length=32, batch_sequences=4)
OURS = Cell(name="ours", method="decoupled", steps=24, task=TASK, settings={"sync_every": 6, "fragments": 3})
THEIRS = replace(OURS, name="theirs", method="data-parallel")
PAIR = Suite(
    name="pair", asks="?", cells=(OURS, THEIRS), contrasts=(Contrast(cell="ours", against="theirs", within=0.01),)
)


def row(cell: Cell, seed: int, loss: float) -> dict[str, Any]:
    return {"cell": cell.identity, "name": cell.name, "seed": seed, "val_a": loss, "val_b": loss, "tokens": 1,
            "tokens_merged": 1, "text": "text", "seconds": 1.0, "core_seconds": 1.0}  # fmt: skip


# --- what numbers show -----------------------------------------------------------------------------------------------
def test_the_interval_is_student_s() -> None:
    low, high = interval([1.0, 2.0, 3.0, 4.0])
    assert math.isclose((low + high) / 2, 2.5)
    assert math.isclose(high - 2.5, 3.182 * math.sqrt(5 / 3) / 2, rel_tol=1e-3)
    assert interval([1.0]) == (-math.inf, math.inf)
    low, high = interval([float(n % 2) for n in range(26)])
    assert math.isclose(high - low, 2 * 2.086 * math.sqrt(0.26 / 26)), "beyond 20 degrees of freedom a little too wide"


@pytest.mark.parametrize(
    ("losses", "within", "verdict"),
    [
        ([2.0, 2.0, 2.0], 0.01, "within +1.0%: shown"),
        ([2.01, 2.0, 2.05], 0.01, "within +1.0%: not shown"),
        ([2.20, 2.21, 2.22], 0.01, "more than +1.0%"),
        ([2.20, 2.21, 2.22], None, "worse"),
        ([1.90, 1.91, 1.92], None, "better"),
        ([1.90, 2.01, 2.12], None, "no difference shown"),
        ([2.0], 0.01, "nothing: one seed"),
        ([9.0], None, "nothing: one seed"),
    ],
)
def test_an_equality_is_claimed_only_where_the_interval_s_end_is_within_the_bound(
    losses: list[float], within: float | None, verdict: str
) -> None:
    judged = replace(PAIR, contrasts=(Contrast(cell="ours", against="theirs", within=within),))
    rows = [row(OURS, seed, loss) for seed, loss in enumerate(losses)]
    rows += [row(THEIRS, seed, 2.0) for seed in range(5)]
    (found,) = differences(judged, rows)
    assert found.verdict == verdict
    assert found.seeds == len(losses)
    assert math.isclose(found.mean, mean(losses) / 2 - 1, abs_tol=1e-12)


def test_seeds_are_paired() -> None:
    rows = [row(OURS, 1, 2.0), row(OURS, 2, 3.0), row(THEIRS, 2, 3.0), row(THEIRS, 3, 9.0)]
    (found,) = differences(PAIR, rows)
    assert (found.mean, found.seeds) == (0.0, 1)


# --- what is kept ----------------------------------------------------------------------------------------------------
def test_cells_that_were_trained_on_unequal_tokens_are_not_held_against_each_other() -> None:
    rows = [row(OURS, seed, 1.0) | {"tokens": more, "tokens_merged": 101} for seed, more in ((0, 110), (1, 90))]
    rows += [row(THEIRS, seed, 2.0) | {"tokens": 100, "tokens_merged": 100} for seed in (0, 1)]
    (contrast,) = PAIR.contrasts
    verdicts = {
        equal: differences(replace(PAIR, contrasts=(replace(contrast, equal=equal),)), rows)[0]
        for equal in get_args(Equal)
    }
    assert verdicts["trained"].verdict == "nothing: +10.0% tokens", "too many here and too few there are not equal"
    assert verdicts["merged"].verdict == verdicts["neither"].verdict == "within +1.0%: shown"
    assert math.isclose(verdicts["neither"].tokens, 0.1), "how much they differ is told all the same"


def test_what_is_kept_of_a_gain_is_a_share_of_the_way_from_a_lone_learner_to_the_reference() -> None:
    alone = replace(THEIRS, name="alone", method="lone")
    judged = replace(PAIR, cells=(OURS, THEIRS, alone), contrasts=(replace(PAIR.contrasts[0], alone="alone"),))
    rows = [row(cell, seed, loss) for cell, loss in ((OURS, 2.2), (THEIRS, 2.0)) for seed in range(3)]
    assert differences(judged, rows) == [], "nothing is said without the lone learner"
    rows += [row(alone, seed, 3.0) for seed in range(3)]
    (found,) = differences(judged, rows)
    assert found.kept is not None
    assert math.isclose(found.kept, 0.8)
    rows[0]["val_b"], rows[-1]["val_b"] = 2.4, 2.8
    (found,) = differences(judged, rows)
    assert [round(share, 3) for share in (found.kept or 0, found.kept_least or 0, found.kept_most or 0)] == [
        0.714, 0.6, 0.8
    ]  # fmt: skip


def test_of_a_gain_that_is_not_shown_no_share_is_told() -> None:
    alone = replace(THEIRS, name="alone", method="lone")
    judged = replace(PAIR, cells=(OURS, THEIRS, alone), contrasts=(replace(PAIR.contrasts[0], alone="alone"),))
    rows = [row(cell, seed, loss) for cell, losses in ((OURS, (2.2, 2.2)), (THEIRS, (2.0, 2.0)), (alone, (1.9, 3.0)))
            for seed, loss in enumerate(losses)]  # fmt: skip
    (found,) = differences(judged, rows)
    assert (found.kept, found.kept_least, found.kept_most) == (None, None, None)


def test_the_best_of_a_search_is_named_and_whether_the_grid_ends_there(tmp_path: Path) -> None:
    rates = [replace(OURS, name=f"lr {n}") for n in range(3)]
    results = Results(tmp_path, replace(PAIR, cells=tuple(rates), contrasts=(), groups=[("lr 0", "lr 1", "lr 2")]), "")
    for cell, loss in zip(rates, (2.0, 1.5, 1.7), strict=True):
        results.rows.append(row(cell, 0, loss))
    assert "| lr 1 | 1.5000 | inside the grid | 1 |" in markdown(results.suite, results.rows)
    results.rows.append(row(rates[2], 1, 0.1))
    assert "| lr 1 | 1.5000 | inside the grid | 1 |" in markdown(results.suite, results.rows), (
        "the others have no second seed yet"
    )
    results.rows += [row(rates[0], 1, 2.0), row(rates[1], 1, 2.0)]
    assert "| lr 2 | 0.9000 | at the grid's edge | 2 |" in markdown(results.suite, results.rows)


def test_a_suite_that_chooses_settings_is_judged_on_part_a() -> None:
    rows = [row(OURS, 0, 1.0) | {"val_b": 9.0}, row(THEIRS, 0, 2.0) | {"val_b": 1.0}]
    (found,) = differences(replace(PAIR, part="A"), rows)
    assert found.mean == -0.5
    chooses = {name for name in SUITES if suite(name).groups} | {
        "gap",
        "outer",
        "outer-elsewhere",
        "momentum",
        "cadence",
        "adoption",
    }
    assert {name for name in SUITES if suite(name).part == "A"} == chooses


def test_what_is_trained_already_is_not_trained_again_and_other_settings_are_other_cells(tmp_path: Path) -> None:
    results = Results(tmp_path, PAIR, "text")
    results.add(row(OURS, 0, 2.0))
    again = Results(tmp_path, PAIR, "text")
    assert [(cell.name, seed) for cell, seed in again.missing(2)] == [("theirs", 0), ("ours", 1), ("theirs", 1)]
    assert len(list(Results(tmp_path, PAIR, "another text").missing(2))) == 4
    changed = replace(PAIR, cells=(replace(OURS, steps=25), THEIRS))
    assert len(list(Results(tmp_path, changed, "text").missing(1))) == 2


def test_half_a_line_that_a_killed_run_left_is_taken_away_and_the_file_goes_on_behind_it(tmp_path: Path) -> None:
    Results(tmp_path, PAIR, "text").add(row(OURS, 0, 2.0))
    path = tmp_path / "pair.jsonl"
    path.write_bytes(path.read_bytes() + b'{"cell": "x')
    again = Results(tmp_path, PAIR, "text")
    with again.exclusive():
        again.add(row(THEIRS, 0, 2.0))
    assert [r["name"] for r in Results(tmp_path, PAIR, "text").rows] == ["ours", "theirs"]


def test_a_suite_that_asks_again_takes_seeds_of_its_own(tmp_path: Path) -> None:
    results = Results(tmp_path, PAIR, "text")
    for seed in range(4):
        results.add(row(OURS, seed, 2.0))
    again = Results(tmp_path, replace(PAIR, first_seed=3), "text")
    assert [r["seed"] for r in again.rows] == [3]
    assert [(cell.name, seed) for cell, seed in again.missing(2)] == [("theirs", 3), ("ours", 4), ("theirs", 4)]


def test_two_comparisons_do_not_write_to_one_file(tmp_path: Path) -> None:
    with Results(tmp_path, PAIR, "text").exclusive(), pytest.raises(SettingError, match="by another comparison; wait"):
        run(PAIR, tmp_path, data=None, seeds=1, jobs=1, minutes=math.inf, report=lambda _: None)
    assert (tmp_path / "pair.jsonl").read_bytes() == b""


def test_on_a_full_disk_a_comparison_stops_and_loses_what_it_cannot_keep_and_no_more(tmp_path: Path) -> None:
    Results(tmp_path, PAIR, "text").add(row(OURS, 0, 2.0))
    size = (tmp_path / "pair.jsonl").stat().st_size
    code = f"""
import resource, signal, math, sys
from pathlib import Path
from dataclasses import replace
from decoupled_diloco.common.config import TaskSettings
from decoupled_diloco.common.errors import DilocoError
from decoupled_diloco.experiments import methods, runner, suites
task = TaskSettings(layers=1, width=32, sequence_length=32, batch_sequences=4)
cells = tuple(methods.Cell(name=str(n), method="lone", learners=1, steps=2, task=task) for n in range(4))
suite = suites.Suite(name="pair", asks="?", cells=cells)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({size} + 40, {size} + 40))
said = []
try:
    runner.run(suite, Path({str(tmp_path)!r}), data=None, seeds=1, jobs=1, minutes=math.inf, report=said.append)
except DilocoError as wrong:
    print(wrong, said)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert "pair.jsonl cannot be written: " in done.stdout, done.stderr
    assert done.stdout.endswith("[]\n"), "nothing is said to be kept"
    assert [r["seed"] for r in Results(tmp_path, PAIR, "text").rows] == [0]


def test_a_foreign_file_is_not_touched(tmp_path: Path) -> None:
    for content in (b"a note without an end", b"{}\nanother", b'{"whose": 1}\n{"cut'):
        (tmp_path / "pair.jsonl").write_bytes(content)
        with pytest.raises(SettingError, match="no result of a comparison; name another --out"):
            run(PAIR, tmp_path, data=None, seeds=1, jobs=1, minutes=math.inf, report=lambda _: None)
        assert (tmp_path / "pair.jsonl").read_bytes() == content


def test_a_file_that_is_no_text_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "pair.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(SettingError, match=r"pair\.jsonl cannot be used: it is no text; name another --out"):
        Results(tmp_path, PAIR, "text")


@pytest.mark.parametrize(
    ("column", "value"),
    [("cell", []), ("name", 5), ("seed", "0"), ("seed", 0.5), ("seed", True), ("val_b", None), ("val_a", math.nan),
     ("val_b", 0.0), ("tokens", 0), ("core_seconds", "1")],
)  # fmt: skip
def test_a_row_that_no_comparison_wrote_is_named(tmp_path: Path, column: str, value: object) -> None:
    (tmp_path / "pair.jsonl").write_text(json.dumps(row(OURS, 0, 2.0) | {column: value}) + "\n")
    with pytest.raises(SettingError, match=r"line 1: no result of a comparison"):
        Results(tmp_path, PAIR, "text")


def test_a_result_that_stands_there_twice_counts_once(tmp_path: Path) -> None:
    lines = [row(OURS, 0, 2.0), row(OURS, 1, 2.1), row(OURS, 0, 3.0)]
    (tmp_path / "pair.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(r["seed"], r["val_b"]) for r in Results(tmp_path, PAIR, "text").rows] == [(0, 2.0), (1, 2.1)]


def test_what_is_no_file_is_one_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pair.jsonl")
    with pytest.raises(SettingError, match=r"pair\.jsonl is no file; name another --out"):
        Results(tmp_path, PAIR, "text")


@pytest.mark.parametrize("line", ["nothing", "[]", '{"cell": "x"}', "[" * 100_000])
def test_a_file_that_holds_something_else_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "pair.jsonl").write_text(f"{line}\n")
    with pytest.raises(SettingError, match=r"pair\.jsonl, line 1: no result of a comparison"):
        Results(tmp_path, PAIR, "text")


def test_tables_and_pictures_are_made_from_the_results_alone(tmp_path: Path) -> None:
    results = Results(tmp_path, PAIR, "text")
    for seed in range(3):
        results.add(row(OURS, seed, 2.0 + seed / 1000))
        results.add(row(THEIRS, seed, 2.0))
    paths = write(results, tmp_path)
    assert [path.suffix for path in paths] == [".csv", ".md", ".png"]
    assert all(path.stat().st_size for path in paths)
    assert "| ours | theirs | +0.05% |" in markdown(results.suite, results.rows)
    assert paths[0].read_text().count("\n") == 7
    assert paths[0].read_text().startswith("name,method,M,T,H,inner_lr,outer_lr,outer_momentum,cell,seed,")
    results.rows.clear()
    assert write(results, tmp_path) == paths[:2]
    assert not paths[2].exists(), "of other results"


def test_how_much_of_a_suite_is_missing_stands_above_its_table() -> None:
    some = [row(OURS, seed, 2.0) for seed in range(3)]
    assert "; 3 seeds (3 of 16 trainings); " in markdown(PAIR, some)
    assert "; 3 seeds; " in markdown(replace(PAIR, cells=(OURS,), contrasts=(), seeds=3), some)


def test_a_trend_is_drawn_as_lines(tmp_path: Path) -> None:
    trend = replace(PAIR, along="steps", contrasts=(replace(PAIR.contrasts[0], line="M = 2", at=24),))
    results = Results(tmp_path, trend, "text")
    results.rows += [row(OURS, 0, 2.1), row(THEIRS, 0, 2.0)]
    assert write(results, tmp_path)[2].stat().st_size > 1000


# --- what is trained -------------------------------------------------------------------------------------------------
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


def test_who_had_no_part_in_a_merge_keeps_its_progress_where_that_is_tried() -> None:
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
    inside = torch.cat([torch.arange(slot.offset, slot.stop) for slot in keeps.plan.fragments[0].slots])
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


def test_a_cell_that_cannot_be_trained_does_not_keep_the_others_from_it(tmp_path: Path) -> None:
    impossible = replace(OURS, name="impossible", settings={"quorum": 9})
    diverges = replace(THEIRS, name="diverges", task=replace(TASK, inner_lr=1e30))
    all_three = replace(PAIR, cells=(impossible, diverges, THEIRS), contrasts=())
    said: list[str] = []
    results, failed = run(all_three, tmp_path, data=None, seeds=1, jobs=2, minutes=math.inf, report=said.append)
    assert failed == ["impossible, seed 0", "diverges, seed 0"]
    assert [r["name"] for r in results.rows] == ["theirs"]
    assert len(said) == 3
    assert any("not finite" in sentence for sentence in said)


def test_a_text_that_is_too_small_to_hold_anything_out_judges_nobody(tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_text("all that there is, " * 9)
    with pytest.raises(SettingError, match="too small to hold anything out"):
        run(PAIR, tmp_path, data=tmp_path / "small.txt", seeds=1, jobs=1, minutes=math.inf, report=lambda _: None)


def test_ctrl_c_keeps_what_is_being_trained(tmp_path: Path) -> None:
    # two jobs: when one has just ended, another one is under way
    command = [sys.executable, "-P", "-m", "decoupled_diloco.cli", "compare", "--jobs", "2", "--out", str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    assert "(23 of 24 left)" in child.stderr.readline()
    child.send_signal(signal.SIGINT)
    rest = child.communicate()[1]
    assert child.returncode == 130, rest
    assert "what is being trained is finished and kept" in rest
    assert (tmp_path / "quick.jsonl").read_text().count("\n") == 1 + rest.count(" left)") >= 2


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


def test_nobody_is_left_of_a_comparison_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "decoupled_diloco.cli", "compare", "--jobs", "2", "--out", str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    assert child.stderr.readline()
    child.kill()
    rest = child.communicate()[1]  # ends when everybody has gone who held the pipe
    assert "Traceback" not in rest


# --- suites ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SUITES)
def test_every_cell_of_a_suite_can_be_planned(name: str) -> None:
    made = suite(name)
    assert made.asks.endswith("?")
    for cell in made.cells:
        version_zero(cell.run_settings(seed=0), cell.task)
        plan, failures = cell.cluster_plan(), FailureModel(**cell.failures)
        assert len(members_of(plan, failures, 0, 10.0)) == plan.learners + plan.late


def test_cells_of_the_suite_about_pace_differ_in_what_is_merged() -> None:
    made = suite("pace")
    merged: dict[str, list[Any]] = {}
    for cell in (each for each in made.cells if not each.name.endswith("same T")):
        settings = replace(cell.run_settings(0), steps=96)
        cut = version_zero(settings, cell.task)[1]
        counted = CostOnlyModel(settings, parameters=cut.parameters, tokens_a_step=512, fragments=cut.P)
        rounds, seen = counted.rounds, merged.setdefault(cell.name, [])
        inner = rounds.merged

        def merged_too(merge: Merge, *given: Any, seen: list[Any] = seen, inner: Any = inner) -> None:
            seen.append((merge.call.slot, [(answer.who, answer.steps) for answer in merge.answers]))
            inner(merge, *given)

        rounds.merged = merged_too  # type: ignore[method-assign,assignment]
        cluster_of(cell.cluster_plan(), FailureModel(), settings, counted).run()
    assert merged["one at half speed, K=1, grace"] == merged.pop("one at half speed, K=M, no grace"), "as it should be"
    assert len({repr(log) for log in merged.values()}) == len(merged)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--suite", "nonsense"], "no suite is named 'nonsense'; there are quick, "),
        (["--seeds", "-1"], "--seeds must lie between 0 and 1000"),
        (["--data", "nowhere.txt"], "cannot read nowhere.txt"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_command(["compare", "--out", str(tmp_path / "out"), *arguments]) == 2
    sentence = capsys.readouterr().err
    assert said in sentence
    assert sentence.count("\n") == 1
