"""Run metrics: run time and uptime, also after the syncer was down."""

from __future__ import annotations

import json
from typing import Any

import pytest
from decoupled_diloco.syncer.run_metrics import RunMetrics

TYPICAL = 0.5


def merged(figures: RunMetrics, now: float, contributors: int = 1, live: int = 1) -> None:
    figures.record_merge(now, contributors=contributors, live=live, typical_seconds=TYPICAL, seconds=0.01)


def summary(figures: RunMetrics) -> dict[str, Any]:
    return figures.to_summary()


def test_the_runs_clock_starts_with_the_earliest_first_step() -> None:
    figures = RunMetrics(10, steps_between=1.0)
    figures.record_first_step(100.0, 0.0)  # it joined and has not stepped yet
    assert summary(figures)["seconds"] == 0
    figures.record_first_step(100.0, 2.0)
    figures.record_first_step(101.0, 5.0)
    figures.record_first_step(102.0, 1.0)
    assert summary(figures)["seconds"] == 6


def test_only_what_a_gap_has_beyond_two_slots_counts_against_the_uptime() -> None:
    figures = RunMetrics(10, steps_between=1.0)
    figures.record_first_step(0.5, 0.5)
    for now in (1.0, 2.0, 2.5, 7.5, 10.0):
        merged(figures, now)
    figures.record_first_step(10.0, 10.0)
    told = summary(figures)
    assert told["longest_merge_gap_seconds"] == 5
    assert told["seconds_to_first_merge"] == 1
    assert told["uptime"] == pytest.approx(1 - (4.0 + 1.5) / 10)


def test_participation_is_a_share_and_bytes_of_an_all_reduce_follow_the_global_step() -> None:
    figures = RunMetrics(10, steps_between=1.0)
    figures.record_step(3, live=2)
    figures.record_step(3, live=9)
    figures.record_step(5, live=1)
    for contributors, live in ((1, 2), (2, 2), (3, 2), (1, 0)):
        merged(figures, 1.0, contributors, live)
    assert summary(figures)["merge_participation"] == pytest.approx(3.5 / 4)
    assert summary(figures)["bytes_f32_allreduce"] == 3 * 2 * 1 * 4 * 10


def resumed(figures: RunMetrics, now: float) -> RunMetrics:
    again = RunMetrics(10, steps_between=1.0)
    again.load_json(json.loads(json.dumps(figures.to_json())), now)
    return again


def test_time_in_which_a_learner_trained_while_the_syncer_was_away_counts_and_so_does_the_gap() -> None:
    figures = RunMetrics(10, steps_between=1.0)
    figures.record_first_step(10.0, 10.0)
    for second in range(1, 11):
        merged(figures, float(second))
    again = resumed(figures, now=1000.0)  # another process, another clock
    again.record_first_step(1000.0, 30.0)  # 20 s later: this learner has been at work all the time
    merged(again, 1000.0)
    told = summary(again)
    assert told["seconds"] == 30
    assert told["longest_merge_gap_seconds"] == 20
    assert told["uptime"] == pytest.approx(1 - 19 / 30, abs=1e-3)
    assert told["seconds_to_first_merge"] == 1
    assert told["merges"] == 11


def test_a_night_in_which_nobody_trained_does_not_count() -> None:
    figures = RunMetrics(10, steps_between=1.0)
    figures.record_first_step(10.0, 10.0)
    merged(figures, 10.0)
    again = resumed(figures, now=5.0)
    again.record_first_step(8.0, 1.0)  # a fresh learner, 2 s after the start
    merged(again, 8.0)
    told = summary(again)
    assert told["seconds"] == 13
    assert told["longest_merge_gap_seconds"] == 3
