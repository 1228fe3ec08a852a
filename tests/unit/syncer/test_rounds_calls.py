"""When rounds open and close: pace, quorum, grace window."""

from __future__ import annotations

from itertools import pairwise

import pytest
from decoupled_diloco.syncer.membership import SILENCE_SECONDS
from decoupled_diloco.syncer.round_events import Answer, Called, Merge
from rounds_driver import P, driven, of


def test_the_first_call_waits_until_every_welcomed_learner_has_done_one_timed_step() -> None:
    h = driven()
    late = h.join("late", 9, step_seconds=0.0)
    h.step(late)
    assert not of(h.tick(5.0), Called)
    late.step_seconds = 1.0
    for worker in h.workers.values():
        h.hear(worker)
    assert len(of(h.tick(), Called)) == 1


def test_slots_keep_the_pace_of_the_typical_learner_however_fast_answers_come() -> None:
    h = driven()
    opened = []
    for _ in range(200):
        opened += [h.now] * len(of(h.tick(0.1), Called))
        for worker in h.workers.values():
            h.step(worker)
            for p in list(h.rounds.calls):
                h.answer(worker, p)
        h.tick()
        h.adopt_all()
    gaps = [b - a for a, b in pairwise(opened)]
    assert len(opened) > 10
    assert min(gaps) >= 1.0 - 1e-9


def test_every_fragment_is_called_equally_often_and_in_rotation() -> None:
    schedule = driven().rounds.schedule
    for cycle in range(6):
        called = [schedule.fragment_of(cycle * P + s) for s in range(P)]
        assert sorted(called) == list(range(P))
        assert called[0] == cycle % P


def test_no_more_than_tau_calls_are_open_and_the_clock_does_not_move_meanwhile() -> None:
    h = driven(overlap=2)
    h.open_one()
    for _ in range(20):
        h.tick(1.0)
        for worker in h.workers.values():
            h.step(worker)
    assert len(h.rounds.calls) == 2
    assert h.rounds.step(h.now) <= 2


def test_a_round_closes_at_once_when_every_live_learner_has_answered() -> None:
    h = driven(grace_seconds=1000.0)
    p = h.open_one()
    assert h.answer(h.workers["w0"], p) == ""
    assert not of(h.tick(), Merge)
    assert h.answer(h.workers["w1"], p) == ""
    assert len(of(h.tick(), Merge)[0].answers) == 2


def test_a_slower_learner_is_waited_for_within_the_grace_window_but_the_window_does_not_grow_with_it() -> None:
    h = driven(3, quorum=2, grace_seconds=2.0)
    p = h.open_one()
    h.answer(h.workers["w0"], p)
    h.answer(h.workers["w1"], p)
    assert not of(h.tick(0.5), Merge)
    for worker in h.workers.values():
        h.hear(worker)
    h.answer(h.workers["w2"], p)
    assert len(of(h.tick(), Merge)[0].answers) == 3
    p = h.open_one()
    h.answer(h.workers["w0"], p)
    h.answer(h.workers["w1"], p)
    h.tick()
    waited = 0.0
    while not of(h.tick(0.1), Merge):
        waited += 0.1
        for worker in h.workers.values():
            h.hear(worker)
    assert waited <= 2.1


def test_below_the_quorum_nothing_is_merged_and_old_captures_are_dropped_at_each_attempt() -> None:
    h = driven(2, quorum=2)
    p = h.open_one()
    h.answer(h.workers["w0"], p)
    del h.workers["w1"]
    for _ in range(10):
        h.tick(1.0)
        h.step(h.workers["w0"])
    call = h.rounds.calls[p]
    assert not h.merges
    assert call.attempt > 1
    assert not call.answers
    old = h.workers["w0"].answer(call.slot, 1, p)
    assert h.rounds.answer(old) == "attempt"
    newcomer = h.join("w2", 77)
    h.step(newcomer, 2)
    assert h.answer(h.workers["w0"], p) == ""
    assert h.answer(newcomer, p) == ""
    assert [a.who[0] for a in of(h.tick(), Merge)[0].answers] == ["w0", "w2"]


@pytest.mark.parametrize("travel_seconds", [0.2, 3.0, 40.0, 400.0])
def test_answers_that_travel_for_longer_than_a_round_are_merged_all_the_same(travel_seconds: float) -> None:
    """Each is of an attempt that was open when it was captured; one that is called off too soon would never be met."""
    h = driven(2, quorum=2)
    under_way: list[tuple[float, Answer]] = []
    attempts: list[int] = []
    while len(h.merges) < 8:
        assert h.now < 100 + 60 * travel_seconds + 600, "nothing is ever merged"
        for called in of(h.tick(min(max(0.1, travel_seconds / 50), 2.0)), Called):
            call = called.call
            for worker in h.workers.values():
                answer = worker.answer(call.slot, call.attempt, call.fragment)
                under_way.append((h.now + travel_seconds, answer))
        for merge in of(h.actions[-20:], Merge):
            if len(attempts) < len(h.merges) and merge is h.merges[-1]:
                attempts.append(merge.call.attempt)
        h.adopt_all()
        for worker in h.workers.values():
            h.step(worker)
        for _, answer in [pair for pair in under_way if pair[0] <= h.now]:
            h.rounds.answer(answer)
        under_way = [pair for pair in under_way if pair[0] > h.now]
    assert attempts[-3:] == [1, 1, 1], "how long answers take is learned"


def test_while_too_few_are_here_captures_are_made_anew_at_the_usual_pace() -> None:
    h = driven(1, quorum=2)
    h.join("w1", 2)
    h.step(h.workers["w1"], 2)
    h.open_one()
    del h.workers["w1"]
    h.tick(SILENCE_SECONDS)
    seen = []
    for _ in range(30):
        h.step(h.workers["w0"])
        seen.append(len(of(h.tick(1.0), Called)))
    assert sum(seen[10:]) >= 9
