"""The virtual cluster: the same seed gives the same run; what is far, slow, absent or too few is as in a real one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from decoupled_diloco.common.codec import encoded_bytes
from decoupled_diloco.common.config import RunSettings, TaskSettings
from decoupled_diloco.common.errors import Diverged, SettingError
from decoupled_diloco.common.journal import read_journal
from decoupled_diloco.learner.public_model import PublicFragment
from decoupled_diloco.learner.task.text import load_corpus
from decoupled_diloco.simulator.availability import VirtualMember, members_of, steady, step_seconds_of
from decoupled_diloco.simulator.backend import SentAnswer
from decoupled_diloco.simulator.cost_only import CostOnlyLearner, CostOnlyModel
from decoupled_diloco.simulator.failures import Stretch
from decoupled_diloco.simulator.network_path import NetworkPath
from decoupled_diloco.simulator.real_training import TrainedModel
from decoupled_diloco.simulator.replay import replay_decisions
from decoupled_diloco.simulator.settings import ClusterPlan, FailureModel
from decoupled_diloco.simulator.virtual_cluster import RunOutcome, VirtualCluster
from decoupled_diloco.simulator.virtual_run import cluster_of, run
from decoupled_diloco.syncer.round_events import Merge
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import examples

TASK = TaskSettings(layers=1, width=32, sequence_length=32, batch_sequences=2)


def counted(
    members: list[VirtualMember], tape: Path | None = None, network: NetworkPath | None = None, **changes: Any
) -> RunOutcome:
    chosen = RunSettings(**({"steps": 60, "sync_every": 6, "fragments": 3} | changes))
    backend = CostOnlyModel(chosen, parameters=10_000, tokens_a_step=10, tape=tape)
    return VirtualCluster(chosen, backend, members, network or NetworkPath(), tape).run()


def alone(*step_seconds: float) -> list[VirtualMember]:
    return [VirtualMember(f"l{i}", [(steady(seconds), math.inf)]) for i, seconds in enumerate(step_seconds)]


def trained(plan: ClusterPlan, seed: int = 0, tape: Path | None = None, **changes: Any) -> dict[str, Any]:
    chosen = RunSettings(**({"steps": 16, "sync_every": 4, "fragments": 4, "seed": seed} | changes))
    return run(plan, chosen, TASK, FailureModel(), tape=tape)


def lines(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


# --- a function of its seed ------------------------------------------------------------------------------------------
@settings(max_examples=examples(25))
@given(
    st.integers(0, 1000),
    st.builds(
        lambda absent, **more: ClusterPlan(absent=absent, absence_seconds=9.0 if absent else 60.0, **more),
        learners=st.integers(1, 5),
        slowest=st.sampled_from([1.0, 1.7, 10.0]),
        absent=st.sampled_from([0.0, 0.3, 0.6]),
        latency_seconds=st.sampled_from([0.0, 0.3, 2.0]),
    ),
)
def test_the_same_seed_gives_the_same_tape_and_the_tape_the_same_decisions(
    tmp_path_factory: pytest.TempPathFactory, seed: int, plan: ClusterPlan
) -> None:
    tapes = []
    for _ in range(2):
        tape = tmp_path_factory.mktemp("tape")
        members = members_of(plan, FailureModel(), seed, 50_000)
        counted(members, tape, NetworkPath(latency_seconds=plan.latency_seconds), seed=seed)
        tapes.append(tape)
    assert lines(tapes[0]) == lines(tapes[1])
    assert replay_decisions(read_journal(tapes[0])).merges >= 20


def test_a_trained_run_has_the_bits_of_its_seed_and_another_seed_others(tmp_path: Path) -> None:
    plan = ClusterPlan(learners=2, slowest=1.5)
    told = [trained(plan, seed, tmp_path / str(n)) for n, seed in enumerate((3, 3, 4))]
    assert told[0]["model_hash"] == told[1]["model_hash"] != told[2]["model_hash"]
    assert lines(tmp_path / "0") == lines(tmp_path / "1") != lines(tmp_path / "2")
    assert told[0]["val_loss_last"] < told[0]["val_loss_first"]


# --- what happens in it ----------------------------------------------------------------------------------------------
def test_equal_learners_are_in_every_round_and_the_run_lasts_as_long_as_its_steps() -> None:
    outcome = counted(alone(1.0, 1.0, 1.0))
    assert outcome.figures["merge_participation"] == 1.0
    assert outcome.figures["uptime"] == 1.0
    assert 60 <= outcome.virtual_seconds < 66
    total = outcome.figures
    assert total["tokens_reported"] == total["tokens_merged"] + total["tokens_lost"]


def test_equal_learners_that_answer_at_one_moment_are_all_merged_without_any_grace() -> None:
    outcome = counted(alone(1.0, 1.0, 1.0, 1.0), grace_seconds=0.0)
    assert outcome.figures["merge_participation"] == 1.0
    assert len({row["tokens_merged"] for row in outcome.learners}) == 1


def test_a_learner_that_joins_late_knows_at_once_how_far_the_run_is(tmp_path: Path) -> None:
    chosen = RunSettings(steps=30, sync_every=4, fragments=4)
    members = [*alone(1.0), VirtualMember("late", [(steady(1.0, begins=20.0), math.inf)])]
    backend = TrainedModel(chosen, TASK, load_corpus(None, TASK.sequence_length), tape=tmp_path)
    VirtualCluster(chosen, backend, members, NetworkPath(latency_seconds=3.0), tmp_path).run()
    (life,) = [f for (name, _), f in read_journal(tmp_path).learners.items() if name == "late"]
    told = [row["progress"] for row in life.rows if "progress" in row]
    assert told[0] > 1, "with a network of 3 s the run itself is slow"


def test_deltas_of_many_steps_are_plausible_beside_those_of_the_first() -> None:
    """Eight learners fill what is usual with their first step or two, at the lowest learning rate."""
    chosen = RunSettings(steps=90, sync_every=72, fragments=12)
    tiny = replace(TASK, sequence_length=8, batch_sequences=1)
    assert run(ClusterPlan(learners=8), chosen, tiny, FailureModel())["uptime"] == 1.0


def test_a_model_that_is_not_finite_is_reset_and_then_given_up() -> None:
    task = replace(TASK, inner_lr=1e30)
    with pytest.raises(Diverged):
        run(ClusterPlan(), RunSettings(steps=16, sync_every=4, fragments=4), task, FailureModel())


def test_a_learner_at_half_speed_takes_part_and_delays_no_other() -> None:
    outcome = counted(alone(1.0, 1.0, 2.0))
    assert outcome.virtual_seconds < 70
    slow = next(row for row in outcome.learners if row["name"] == "l2")
    assert slow["tokens_merged"] > 0.3 * max(row["tokens_merged"] for row in outcome.learners)


def test_answers_that_are_long_under_way_are_merged() -> None:
    outcome = counted(alone(1.0, 1.0), network=NetworkPath(latency_seconds=10.0), quorum=2)
    assert outcome.figures["merges"] >= 30


class Watched(CostOnlyModel):
    """What is sent, taken, merged and delivered, with its time and payload_bytes."""

    cluster: VirtualCluster
    payload_bytes = 0

    def __init__(self, chosen: RunSettings) -> None:
        super().__init__(chosen, parameters=10_000, tokens_a_step=10)
        self.log: dict[str, list[float]] = {"sent": [], "taken": [], "merged": [], "delivered": [], "reset": []}

    def new_learner(self, name: str, incarnation: int, tape: Path | None) -> CostOnlyLearner:
        worker = super().new_learner(name, incarnation, tape)
        sent, deliver = worker.answers, worker.deliver

        def sent_too() -> list[SentAnswer]:
            found = sent()
            self.log["sent"] += [self.cluster.now] * len(found)
            self.payload_bytes = max([self.payload_bytes, *(each.payload_bytes for each in found)])
            return found

        def deliver_too(fragment: int, public: PublicFragment, *, reset: bool = False) -> None:
            self.log["reset" if reset else "delivered"].append(self.cluster.now)
            deliver(fragment, public, reset=reset)

        worker.answers, worker.deliver = sent_too, deliver_too  # type: ignore[method-assign]
        return worker

    def take(self, sent: SentAnswer) -> str:
        self.log["taken"].append(self.cluster.now)
        return super().take(sent)

    def merge(self, merge: Merge, now: float) -> tuple[PublicFragment, int]:
        self.log["merged"].append(now)
        return super().merge(merge, now)


@pytest.mark.parametrize("transfer_seconds", [0.4, 2.5])
def test_messages_take_their_length_on_the_link_one_after_the_other_and_then_the_latency(
    transfer_seconds: float,
) -> None:
    chosen = RunSettings(steps=40, sync_every=6, fragments=3)
    payload_bytes = encoded_bytes("int4", Watched(chosen).size)
    world, network = (
        Watched(chosen),
        NetworkPath(latency_seconds=0.3, megabit=payload_bytes * 8 / 1e6 / transfer_seconds),
    )
    world.cluster = VirtualCluster(chosen, world, alone(1.0), network)
    world.cluster.run()
    assert world.payload_bytes == payload_bytes
    for leaves, arrives in (("sent", "taken"), ("merged", "delivered")):
        free, expected = 0.0, []
        for at in world.log[leaves]:
            free = max(free, at) + transfer_seconds
            expected.append(free + 0.3)
        found = world.log[arrives]
        assert len(found) >= 12
        assert found == pytest.approx(expected[: len(found)])


def test_an_answer_that_has_left_outlives_its_sender_and_one_that_has_not_does_not() -> None:
    chosen, payload_bytes = RunSettings(steps=40, sync_every=6, fragments=3), 0

    def taken(dies_at: float, transfer_seconds: float) -> Watched:
        world = Watched(chosen)
        lives = [
            VirtualMember("l0", [(steady(1.0), dies_at)]),
            VirtualMember("l1", [(steady(1.0, begins=0.5), math.inf)]),
        ]
        network = NetworkPath(
            latency_seconds=0.6, megabit=payload_bytes * 8 / 1e6 / transfer_seconds if transfer_seconds else 0.0
        )
        world.cluster = VirtualCluster(chosen, world, lives, network)
        world.cluster.run()
        return world

    whole = taken(math.inf, 0.0)
    payload_bytes = whole.payload_bytes
    sent_at = next(at for at in whole.log["sent"] if at > 15 and at == int(at))  # the other's lie at the half seconds
    died_at = sent_at + 0.1
    assert sent_at + 0.6 in taken(died_at, 0.0).log["taken"]
    assert not [at for at in taken(died_at, 0.2).log["taken"] if at == pytest.approx(sent_at + 0.8)]
    assert [at for at in taken(sent_at + 0.3, 0.2).log["taken"] if at == pytest.approx(sent_at + 0.8)]


def test_a_pause_between_two_steps_passes_for_a_long_step_as_in_a_real_loop(tmp_path: Path) -> None:
    def with_a_pause() -> Iterator[Stretch]:
        for number in count():
            start = number * 1.0 + (3.0 if number >= 20 else 0.0)
            yield Stretch(start, start + 1.0, 1.0, 1.0)

    outcome = counted([VirtualMember("l0", [(with_a_pause(), math.inf)])], tmp_path)
    assert outcome.goodput == pytest.approx(1 - 3.0 / outcome.virtual_seconds, abs=0.02)
    reports = [row for row in read_journal(tmp_path).syncer.rows if row["what"] == "alive"]
    assert {row["session_seconds"] for row in reports} == {0.0}
    assert max(row["step_seconds"] for row in reports) == pytest.approx(1.0 + 0.2 * 3.0)


def test_a_learner_that_comes_late_is_allocated_from_then_on() -> None:
    late = ClusterPlan(learners=2, late=2, late_seconds=30.0)
    assert counted(members_of(late, FailureModel(), 0, 5000)).goodput == pytest.approx(1.0, abs=0.02)


def test_a_learner_that_is_refused_three_times_for_what_it_sends_starts_over() -> None:
    class Refusing(Watched):
        def take(self, sent: SentAnswer) -> str:
            return "norm" if sent.content.who[0] == "l1" and self.cluster.now < 20 else super().take(sent)

    chosen = RunSettings(steps=60, sync_every=6, fragments=3)
    world = Refusing(chosen)
    world.cluster = VirtualCluster(chosen, world, alone(1.0, 1.0))
    outcome = world.cluster.run()
    wrong, right = outcome.learners[1], outcome.learners[0]
    assert world.log["reset"]
    assert len(world.log["reset"]) % 3 == 0, "all fragments"
    assert 0 < wrong["tokens_merged"] < right["tokens_merged"]


@pytest.mark.parametrize("adopt", ["overwrite", "rebase"])
@pytest.mark.parametrize("apart", [{"slowest": 2.0}, {"absent": 0.3, "absence_seconds": 10.0}], ids=str)
def test_a_run_that_only_counts_merges_what_a_trained_one_does(adopt: str, apart: dict[str, Any]) -> None:
    """What comparisons at equal merged tokens rest on."""
    chosen, plan = RunSettings(steps=72, sync_every=6, fragments=3, adopt=adopt), ClusterPlan(learners=3, **apart)  # type: ignore[arg-type]
    real = TrainedModel(chosen, TASK, load_corpus(None, TASK.sequence_length))
    books = CostOnlyModel(chosen, parameters=30_000, tokens_a_step=TASK.tokens_per_step)
    outcomes = [cluster_of(plan, FailureModel(), chosen, backend).run() for backend in (real, books)]
    names = ("merges", "tokens_reported", "tokens_merged", "merge_participation", "useful_share")
    first, second = ({name: outcome.figures[name] for name in names} for outcome in outcomes)
    # fragments of unequal size weigh unequally in what is merged
    assert {**first, "tokens_merged": 0, "useful_share": 0} == {**second, "tokens_merged": 0, "useful_share": 0}
    assert first["useful_share"] == pytest.approx(second["useful_share"], abs=0.01)


def test_a_tape_of_a_run_that_only_counts_has_its_end(tmp_path: Path) -> None:
    counted(alone(1.0), tmp_path)
    assert replay_decisions(read_journal(tmp_path)).complete


def test_below_the_quorum_the_run_waits_for_who_comes_back() -> None:
    members = [*alone(1.0), VirtualMember("l9", [(steady(1.0), 10.0), (steady(1.0, begins=40.0), math.inf)])]
    outcome = counted(members, quorum=2)
    assert outcome.virtual_seconds > 80
    assert outcome.figures["merge_participation"] == 1.0


def test_a_learner_that_is_absent_comes_back_as_another_and_less_is_merged() -> None:
    whole, holed = ClusterPlan(learners=3), ClusterPlan(learners=3, absent=0.4, absence_seconds=7)
    everything, rest = (counted(members_of(p, FailureModel(), 1, 5000)).figures for p in (whole, holed))
    assert rest["tokens_merged"] < 0.9 * everything["tokens_merged"]


def test_chips_fail_and_their_learners_work_with_what_is_left() -> None:
    plan = ClusterPlan(learners=4, chips=2_400_000, cost_only=True)
    told = run(plan, RunSettings(steps=200), TASK, FailureModel())
    steady_tokens = 200 * TASK.tokens_per_step * 4
    assert 0.5 * steady_tokens < told["tokens_reported"] < 0.97 * steady_tokens


# --- what cannot be --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cost_only", [True, False])
def test_what_cannot_be_leaves_no_tape_behind(tmp_path: Path, *, cost_only: bool) -> None:
    with pytest.raises(SettingError, match="--quorum 5 is more"):
        run(ClusterPlan(cost_only=cost_only), RunSettings(quorum=5), TASK, FailureModel(), tape=tmp_path / "tape")
    assert not (tmp_path / "tape").exists()


def test_a_quorum_above_the_learners_is_an_error_before_anything_runs() -> None:
    with pytest.raises(SettingError, match="--quorum 3 is more than the 2 learners"):
        counted(alone(1.0, 1.0), quorum=3)


def test_a_cluster_whose_learners_are_all_gone_ends_with_a_sentence() -> None:
    with pytest.raises(SettingError, match=r"all learners have left at step \d+ of 60, and none returns$"):
        counted([VirtualMember("l0", [(steady(1.0), 10.0)])])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"learners": 0}, "--learners"),
        ({"absent": 1.0}, "--absent"),
        ({"slowest": 0.5}, "--slowest"),
        ({"learners": 4, "chips": 3}, "cannot share 3 chips"),
        ({"step_seconds": -1.0}, "--step-seconds"),
        ({"learners": 10**9}, "--learners must be at most"),
        ({"params": math.inf}, "--params"),
    ],
)
def test_an_impossible_plan_is_one_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        ClusterPlan(**changes)


@pytest.mark.parametrize(
    ("plan", "failures", "said"),
    [
        (ClusterPlan(chips=600, absent=0.5), FailureModel(), "--absent is for learners without chips"),
        (ClusterPlan(chips=600, slowest=4.0), FailureModel(), "--slowest is for learners without chips"),
        (ClusterPlan(chips=300), FailureModel(), "--slice-chips 256 is more than each of 2 learners has of 300 chips"),
        (ClusterPlan(), FailureModel(sites=4), "--sites says how chips fail: give --chips, too"),
    ],
)
def test_what_would_be_ignored_is_an_error(plan: ClusterPlan, failures: FailureModel, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        members_of(plan, failures, 0, 10.0)


def test_chips_whose_sites_fail_do_less() -> None:
    plan, settings_ = ClusterPlan(chips=1100, learners=4, cost_only=True), RunSettings(steps=100)
    told = [
        run(plan, settings_, TASK, FailureModel(sites=4, site_seconds=100, site_failures_a_year=n))
        for n in (0, 300_000)
    ]
    assert told[1]["goodput"] < 0.9 * told[0]["goodput"]


def test_paces_lie_evenly_between_the_fastest_and_the_slowest() -> None:
    plan = ClusterPlan(learners=3, slowest=2.0, step_seconds=0.5)
    assert [step_seconds_of(plan, n) for n in (1, 2, 3)] == [0.5, 0.75, 1.0]
