"""The end of a run, resumes and stops."""

from __future__ import annotations

import json

import pytest
from decoupled_diloco.syncer import rounds
from decoupled_diloco.syncer.ledger import FORGOTTEN
from decoupled_diloco.syncer.membership import REMEMBERED
from decoupled_diloco.syncer.round_events import Drained, Merge, Unmet
from decoupled_diloco.syncer.rounds import Rounds
from rounds_driver import SIZES, TOKENS, P, RoundsDriver, driven, of


def test_the_end_calls_every_fragment_once_more_and_gives_up_what_nobody_answers() -> None:
    h = driven(1, steps=1)
    worker = h.workers["w0"]
    for _ in range(60):
        h.tick(1.0)
        h.step(worker)
        for p in list(h.rounds.calls):
            if p != 2:
                h.answer(worker, p)
        h.tick()
        h.adopt_all()
        if h.rounds.state == "drained":
            break
    assert h.rounds.state == "drained"
    assert [u.call.fragment for u in of(h.actions, Unmet)] == [2]
    assert len(of(h.actions, Drained)) == 1
    assert all(v >= 1 for p, v in enumerate(h.rounds.versions) if p != 2)
    assert h.rounds.step(h.now) == 1


def draining_with_one_call_left_open() -> RoundsDriver:
    """Two learners and a quorum of two; global step T is reached while the second call still waits for answers."""
    h = driven(2, quorum=2, steps=2)
    for worker in h.workers.values():
        assert h.answer(worker, h.open_one()) == ""
    h.tick()
    left = h.open_one()
    while h.rounds.state == "running":
        h.tick(0.5)
        for worker in h.workers.values():
            h.step(worker)
    assert not h.rounds.calls[left].drains
    return h


@pytest.mark.parametrize("dead", [["w1"], ["w0", "w1"]], ids=["one of two dies", "both die"])
def test_the_end_also_gives_up_a_call_that_was_open_before_it_and_finds_no_quorum_any_more(dead: list[str]) -> None:
    h = draining_with_one_call_left_open()
    for name in dead:
        del h.workers[name]
    for _ in range(60):
        h.tick(1.0)
        for worker in h.workers.values():
            h.step(worker)
            for p in list(h.rounds.calls):
                h.answer(worker, p)
    assert h.rounds.state == "drained"
    assert sorted(u.call.fragment for u in of(h.actions, Unmet)) == list(range(P))
    assert not h.rounds.calls


@pytest.mark.parametrize("answering", [True, False])
def test_the_end_asks_for_no_more_fragments_at_once_than_a_beat_can_name(
    answering: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "most_calls", lambda _fragments, _learners: 1)
    monkeypatch.setattr(rounds, "DRAIN_SECONDS", 2.5)
    monkeypatch.setattr(rounds, "DRAIN_ATTEMPTS", 0)
    h = driven(1, steps=1, overlap=1)
    for _ in range(40):
        h.tick(1.0)
        h.step(h.workers["w0"])
        for p in list(h.rounds.calls) if answering or h.rounds.state == "running" else []:
            h.answer(h.workers["w0"], p)
        assert len(h.rounds.calls) <= 1
        h.tick()
        h.adopt_all()
    assert h.rounds.state == "drained"
    assert sorted(u.call.fragment for u in of(h.actions, Unmet)) == ([] if answering else list(range(P)))


def test_memory_does_not_grow_with_the_names_that_come_and_go_and_no_total_changes() -> None:
    h = driven(1)
    sizes = []
    for i in range(1, 3 * REMEMBERED):
        passer = h.join(f"passer-{i}", 100 + i)
        h.step(passer, 2)
        h.rounds.left(passer.who, passer.steps, passer.steps * TOKENS)
        del h.workers[passer.name]
        h.rounds.forget_oldest()
        h.tick()
        sizes.append(len(json.dumps(h.rounds.to_json())))
    assert max(sizes) <= 1.2 * sizes[REMEMBERED]
    steps = 2 * 3 * REMEMBERED
    assert h.rounds.ledger.total().reported == steps * TOKENS
    assert h.rounds.members.counters.total()["local_steps"] == steps
    assert h.rounds.ledger.account("passer-1").reported == 0
    assert (
        h.rounds.ledger.account(FORGOTTEN).reported == h.rounds.members.counters.of(FORGOTTEN)["local_steps"] * TOKENS
    )


def test_a_resumed_machine_continues_with_books_and_versions_and_counts_what_was_undone_as_lost() -> None:
    h = driven(1)
    worker = h.workers["w0"]
    p = h.open_one()
    h.answer(worker, p)
    h.tick()
    saved = json.loads(json.dumps(h.rounds.to_json()))
    resumed = Rounds(h.rounds.settings, SIZES, epoch=2)
    resumed.load_json(saved)
    assert resumed.versions == h.rounds.versions
    assert resumed.ledger.account("w0") == h.rounds.ledger.account("w0")
    assert resumed.slot <= h.rounds.slot


def test_a_learner_that_comes_back_under_its_name_after_a_resume_leaves_nothing_pending_of_its_former_life() -> None:
    h = driven(2)
    h.step(h.workers["w0"], 3)
    resumed = RoundsDriver(Rounds(h.rounds.settings, SIZES, epoch=2), now=h.now)
    resumed.rounds.load_json(json.loads(json.dumps(h.rounds.to_json())))
    before = resumed.rounds.ledger.account("w0")
    assert before.pending > 0
    resumed.join("w0", 77)
    resumed.tick()
    after = resumed.rounds.ledger.account("w0")
    assert (after.pending, after.lost) == (0, before.lost + before.pending)
    assert resumed.rounds.ledger.account("w1") == h.rounds.ledger.account("w1"), "nobody else is touched"


def test_a_syncer_that_stops_opens_no_new_slot() -> None:
    h = driven(2)
    p = h.open_one()
    h.rounds.pause()
    for worker in h.workers.values():
        h.step(worker)
        h.answer(worker, p)
    assert of(h.tick(), Merge)
    for _ in range(10):
        h.tick(1.0)
        for worker in h.workers.values():
            h.step(worker)
    assert not h.rounds.calls


def test_a_syncer_that_stops_sleeps_until_something_is_due() -> None:
    h = driven(2, quorum=2)
    h.open_one()
    h.rounds.pause()
    for _ in range(30):
        h.tick(0.1)
        for worker in h.workers.values():
            h.hear(worker)
        assert h.rounds.next_deadline(h.now) > h.now


def test_a_step_that_is_said_to_take_no_time_at_all_moves_the_clock_to_the_next_slot_at_most() -> None:
    h = driven(1)
    h.open_one()
    h.workers["w0"].step_seconds = 5e-324
    h.hear(h.workers["w0"])
    slot = h.rounds.slot
    assert h.rounds.step(h.now + 1.0) < h.rounds.schedule.step_of(slot) + 1
