"""Clusters whose chips fail, in virtual time."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from decoupled_diloco.cli.commands import run_command
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.simulator.failures import Absence, ChipGroup
from decoupled_diloco.simulator.goodput import (
    GoodputOutcome,
    System,
    compare_systems,
    largest_difference,
    outages,
    simulate,
    table_1,
)
from decoupled_diloco.simulator.settings import FailureModel, GoodputPlan

NEVER = 1e12
CALM = FailureModel(mtbi_years=NEVER)


def run(system: System, learners: int = 1, chips: int = 300_000, steps: int = 1000, **model: Any) -> GoodputOutcome:
    return simulate(system, learners, chips, replace(CALM, **model), steps=steps, seed=0)


@pytest.mark.parametrize("system", ["rigid", "elastic", "decoupled"])
def test_chips_that_never_fail_are_always_useful(system: System) -> None:
    assert run(system, 4 if system == "decoupled" else 1) == GoodputOutcome(pytest.approx(1.0), pytest.approx(1.0))  # type: ignore[arg-type]


def test_every_cell_of_the_published_table_is_met_within_four_points() -> None:
    cells = table_1(FailureModel(), steps=5000, seed=0)
    assert len(cells) == 30
    assert largest_difference(cells) <= 0.04, [c for c in cells if largest_difference([c]) > 0.04]


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_a_run_that_ends_within_a_pause_ends_there(steps: int) -> None:
    for system, learners in (("rigid", 1), ("elastic", 1), ("decoupled", 4)):
        for seed in range(12):
            found = simulate(system, learners, 2_400_000, FailureModel(), steps=steps, seed=seed)  # type: ignore[arg-type]
            assert 0 <= found.goodput <= found.uptime + 1e-9 <= 1 + 2e-9


def test_the_same_seed_gives_the_same_outcome_and_another_gives_another() -> None:
    plan, model = GoodputPlan(chips=600_000, simulated_steps=300), FailureModel()
    assert compare_systems(plan, model) == compare_systems(plan, model)
    assert compare_systems(plan, model) != compare_systems(replace(plan, seed=1), model)


def test_m_learners_are_like_one_learner_on_a_fraction_of_the_chips() -> None:
    model = FailureModel()
    many = simulate("decoupled", 8, 1_200_000, model, steps=2000, seed=0)
    one = simulate("elastic", 1, 150_000, model, steps=2000, seed=0)
    assert many.goodput == pytest.approx(one.goodput, abs=0.03)
    assert many.uptime > 0.99 > one.uptime


def test_without_elasticity_the_mean_time_of_a_restart_is_lost_at_each_failure() -> None:
    """The closed form s / (s + p R), p the probability of a failure in a step."""
    model = FailureModel()
    for chips in (150_000, 600_000, 2_400_000):
        found = simulate("rigid", 1, chips, model, steps=6000, seed=0).goodput
        slices = round(chips / model.slice_chips) * model.slice_chips
        p = -np.expm1(-slices * model.step_seconds / (model.mtbi_years * 365.25 * 86_400))
        assert found == pytest.approx(model.step_seconds / (model.step_seconds + p * model.restart_seconds), abs=0.03)


def test_memory_does_not_grow_with_the_number_of_chips() -> None:
    def kept(chips: int) -> int:
        group = ChipGroup(FailureModel(), chips, np.random.default_rng(0))
        return max(len(group._back) for _ in group.life(2000 * 5.5))

    assert kept(100_000_000) < 1500
    assert kept(100_000_000) < 20 * kept(100_000) + 1000


def test_a_group_steps_at_the_pace_of_its_slowest_chip_and_larger_groups_have_slower_ones() -> None:
    one, many = run("elastic", speed_spread=0.05), run("decoupled", 64, speed_spread=0.05)
    assert one.goodput < 0.85
    assert one.goodput < many.goodput < 1.0


def test_transient_slowdowns_hurt_one_group_more_than_many() -> None:
    slow: dict[str, Any] = {"slowdowns_a_chip_year": 2.0, "slowdown_seconds": 60.0, "slowdown_factor": 3.0}
    assert run("elastic", **slow).goodput < run("decoupled", 16, **slow).goodput < 1.0


def test_a_site_that_fails_takes_its_learners_and_the_others_continue() -> None:
    failing: dict[str, Any] = {"sites": 4, "site_failures_a_year": 20_000.0, "site_seconds": 300.0}
    assert run("decoupled", 4, **failing).uptime > 0.99
    assert run("decoupled", 4, **failing).goodput < 0.95
    assert run("rigid", **failing).uptime < run("decoupled", 4, **failing).uptime


@pytest.mark.parametrize("system", ["rigid", "elastic", "decoupled"])
def test_an_outage_shorter_than_the_pause_in_which_it_is_left_does_not_end_a_group(system: System) -> None:
    """One whole site, away for 10 s about each 30 000 s: what is lost are the pauses before and after."""
    short: dict[str, Any] = {"sites": 1, "site_failures_a_year": 1000.0, "site_seconds": 10.0}
    found = run(system, steps=100_000, **short)
    assert found.goodput > 0.98
    assert found.uptime > 0.98


def test_what_is_scavenged_works_at_night_only() -> None:
    days = round(2 * 86_400 / CALM.step_seconds)
    half = run("decoupled", 4, steps=days, scavenged_share=0.5, night_hours=12.0)
    assert half.goodput == pytest.approx(0.75, abs=0.02)
    assert half.uptime == pytest.approx(1.0)
    assert run("elastic", steps=days, scavenged_share=0.5, night_hours=12.0).goodput == pytest.approx(0.75, abs=0.02)


def test_an_absence_of_everybody_ends_when_it_ends() -> None:
    group = ChipGroup(CALM, 1000, np.random.default_rng(0), [Absence(90.0, 900.0, 1.0)])
    starts = [stretch.start for stretch in group.life(1800.0)]
    assert not [s for s in starts if 90.0 <= s < 900.0]
    assert [s for s in starts if s > 900.0]


@pytest.mark.parametrize(
    ("option", "value"),
    [("mtbi_years", 0.0), ("slice_chips", 0), ("step_seconds", -1.0), ("return_shape", 0.0), ("sites", 0),
     ("downscale_seconds", -1.0), ("speed_spread", float("nan")), ("scavenged_share", 1.5), ("night_hours", 25.0)],
)  # fmt: skip
def test_a_model_that_cannot_be_is_refused_by_the_name_of_its_option(option: str, value: float) -> None:
    with pytest.raises(SettingError, match=f"--{option.replace('_', '-')}"):
        FailureModel(**{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value"),
    [("chips", 0), ("learners", 0), ("simulated_steps", -1), ("chips", 10**12), ("learners", 10**9)],
)
def test_a_plan_that_cannot_be_is_refused(option: str, value: int) -> None:
    with pytest.raises(SettingError, match="learner" if option == "learners" else option.rsplit("_", maxsplit=1)[-1]):
        GoodputPlan(**{option: value})


def test_what_is_rare_or_daily_is_simulated_for_days() -> None:
    assert GoodputPlan().steps(FailureModel()) == 5000
    assert GoodputPlan().steps(FailureModel(scavenged_share=0.5)) * FailureModel().step_seconds >= 9 * 86_400
    assert GoodputPlan(simulated_steps=7).steps(FailureModel(scavenged_share=0.5)) == 7


def test_slices_larger_than_a_learner_are_refused() -> None:
    with pytest.raises(SettingError, match="--slice-chips 256 is more than each of 2 learners has of 300 chips; lower"):
        compare_systems(GoodputPlan(chips=300, learners=2), FailureModel())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["goodput", "--table", "--chips", "5"], "--chips is for one cluster"),
        (["goodput", "--table", "--sensitivity"], "exclude each other: give only one of them"),
        (["bandwidth", "--table", "--sites", "3"], "--sites is for one link"),
        (["run", "--cost-only", "--width", "64"], "--width has no effect with --cost-only"),
        (["run", "--cost-only", "--data", "nowhere"], "--data has no effect with --cost-only"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["simulate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_answer_says_how_many_outages_it_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    rare = ["simulate", "goodput", "--sites", "4", "--site-failures-a-year", "40", "--simulated-steps", "20000"]
    assert run_command([*rare, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["site_outages"] == outages(
        FailureModel(sites=4, site_failures_a_year=40.0), GoodputPlan(simulated_steps=20_000)
    )
    assert run_command(rare) == 0
    assert f", {told['site_outages']} outages of sites" in capsys.readouterr().out
