"""Global steps between beats, and where the training thread's seconds go."""

from __future__ import annotations

from typing import Any

import pytest
from decoupled_diloco.common.wire import Beat
from decoupled_diloco.learner.timing import Progress, RunClock, StepTimer


def beat(**more: Any) -> Beat:
    rows: dict[str, Any] = {
        "run": "r", "epoch": 1, "state": "running", "t": 10, "steps": 100, "step_seconds": 0.5, "syncer": 1,
    }  # fmt: skip
    return Beat(**(rows | more))


def test_progress_moves_between_beats_by_the_typical_step_time() -> None:
    clock = RunClock()
    clock.receive(beat(), 50.0)
    assert clock.progress(50.0) == Progress(10.0, 100)
    assert clock.progress(51.0).exact == 12.0
    assert clock.progress(51.0).step == 12
    assert clock.progress(51.0).fraction == 0.12


def test_progress_waits_when_no_beat_comes_and_never_goes_back() -> None:
    clock = RunClock()
    clock.receive(beat(), 50.0)
    assert clock.progress(1000.0).exact == 14.0
    clock.receive(beat(t=11), 1000.0)
    assert clock.progress(1000.0).exact == 14.0


def test_progress_goes_back_with_a_run_that_was_resumed() -> None:
    clock = RunClock()
    clock.receive(beat(t=50), 0.0)
    assert clock.progress(0.0).step == 50
    clock.receive(beat(t=30, epoch=2), 1.0)
    assert clock.progress(1.0).step == 30


def test_progress_never_passes_the_end_and_does_not_move_while_the_run_drains() -> None:
    clock = RunClock()
    clock.receive(beat(t=99), 0.0)
    assert clock.progress(2.0).exact == 100.0
    clock = RunClock()
    clock.receive(beat(t=90, state="draining"), 0.0)
    assert clock.progress(2.0).exact == 90.0
    clock.receive(beat(t=90, state="finished"), 3.0)
    assert clock.progress(3.0).fraction == 1.0


def test_progress_is_zero_before_the_first_beat() -> None:
    assert RunClock().progress(5.0).fraction == 0.0


def test_the_first_step_is_left_out_of_the_step_time() -> None:
    pace = StepTimer(0.0)
    pace.enter(30.0)  # it compiled
    pace.leave(30.5)
    assert pace.step_seconds == 0.0
    pace.enter(31.5)
    pace.leave(31.5)
    assert pace.step_seconds == 1.0
    pace.enter(33.5)
    assert pace.step_seconds == pytest.approx(1.2)
    assert pace.inner_seconds == pytest.approx(33.0)
    assert pace.session_seconds == pytest.approx(0.5)


def test_one_long_pause_does_not_make_a_learner_slow() -> None:
    pace = StepTimer(0.0)
    for second in (1.0, 2.0, 3.0, 603.0):
        pace.enter(second)
        pace.leave(second)
    assert pace.step_seconds == pytest.approx(1.8)
    assert pace.inner_seconds == pytest.approx(603.0)


def test_an_evaluation_is_neither_a_step_nor_ours_but_for_the_swap() -> None:
    pace = StepTimer(0.0)
    pace.enter(1.0)
    pace.leave(1.0)
    pace.leave_out(10.0, ours=0.25)
    pace.enter(12.0)
    assert pace.step_seconds == pytest.approx(1.0)
    assert pace.session_seconds == pytest.approx(0.25)


def test_calls_without_an_optimizer_step_are_part_of_the_next_step() -> None:
    pace = StepTimer(0.0)
    pace.enter(1.0)
    pace.leave(1.0)
    for now in (2.0, 3.0):
        pace.enter(now, stepped=False)
        pace.leave(now)
    assert (pace.step_seconds, pace.last_step_at) == (0.0, 1.0)
    pace.enter(5.0)
    assert (pace.step_seconds, pace.last_step_at, pace.inner_seconds) == (4.0, 5.0, 5.0)
