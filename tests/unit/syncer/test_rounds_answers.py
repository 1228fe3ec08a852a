"""Which answers count."""

from __future__ import annotations

import json
from dataclasses import replace

from decoupled_diloco.common.config import MAX_LAG
from decoupled_diloco.syncer.round_events import Lost, Merge
from rounds_driver import driven, of


def test_each_reason_of_refusal_is_given_and_changes_nothing() -> None:
    h = driven(2)
    w0 = h.workers["w0"]
    p = h.open_one()
    call = h.rounds.calls[p]
    good = w0.answer(call.slot, call.attempt, p)
    before = json.dumps(h.rounds.to_json())
    assert h.rounds.refusal(replace(good, who=("w0", 999))) == "stranger"
    assert h.rounds.refusal(replace(good, slot=call.slot + 1)) == "late"
    assert h.rounds.refusal(replace(good, attempt=2)) == "attempt"
    assert h.rounds.refusal(replace(good, base_version=call.version + 1)) == "stale"
    assert h.rounds.refusal(replace(good, tokens_to=good.tokens_from)) == "empty"
    assert h.rounds.refusal(replace(good, steps_to=good.steps_from)) == "empty"
    assert json.dumps(h.rounds.to_json()) == before
    assert h.rounds.answer(good) == ""
    assert h.rounds.answer(good) == "duplicate"
    h.answer(h.workers["w1"], p)
    h.tick()
    assert h.rounds.answer(good) == "late"
    h.rounds.slot = call.slot
    h.rounds.state = "running"
    again = h.rounds._open(p, 0, h.now)
    assert h.rounds.refusal(replace(good, slot=again.slot, base_version=again.version)) == "overlap"
    far = replace(good, slot=again.slot, base_version=again.version - MAX_LAG - 1, tokens_from=good.tokens_to,
                  tokens_to=good.tokens_to + 1)  # fmt: skip
    assert h.rounds.refusal(replace(far, base_version=max(0, again.version - MAX_LAG))) in ("", "stale")


def test_an_answer_beyond_what_its_learner_can_have_done_counts_once_it_has_been_reported() -> None:
    h = driven(1)
    p = h.open_one()
    worker = h.workers["w0"]
    worker.steps += 30  # in less than the 3 s after which a silent learner, of one step a second, is lost
    assert h.answer(worker, p) == ""
    assert not of(h.tick(), Merge)
    h.hear(worker)
    assert len(of(h.tick(), Merge)) == 1


def test_what_a_learner_did_since_its_last_report_counts() -> None:
    h = driven(1)
    p = h.open_one()
    h.workers["w0"].steps += 2
    assert h.answer(h.workers["w0"], p) == ""
    assert len(of(h.tick(), Merge)) == 1


def test_a_learner_that_lies_about_its_tokens_is_left_out_and_named() -> None:
    h = driven(2, grace_seconds=0.5)
    p = h.open_one()
    call = h.rounds.calls[p]
    liar = replace(h.workers["w0"].answer(call.slot, call.attempt, p), tokens_to=10**12)
    assert h.rounds.answer(liar) == ""
    h.answer(h.workers["w1"], p)
    h.tick()
    merge = of(h.tick(1.0), Merge)[0]
    assert [a.who[0] for a in merge.answers] == ["w1"]
    assert [a.who[0] for a in merge.unreported] == ["w0"]


def test_an_answer_in_somebodys_name_that_cannot_count_gives_way_to_the_genuine_one() -> None:
    h = driven(1)
    p = h.open_one()
    call, worker = h.rounds.calls[p], h.workers["w0"]
    genuine = worker.answer(call.slot, call.attempt, p)
    assert h.rounds.answer(replace(genuine, tokens_to=10**12, vector="forged")) == ""
    assert not of(h.tick(), Merge)
    assert h.rounds.answer(genuine) == ""
    assert h.rounds.answer(replace(genuine, tokens_to=10**12)) == "duplicate"
    assert h.rounds.answer(genuine) == "duplicate"
    assert of(h.tick(), Merge)[0].answers == (genuine,)


def test_a_dead_learner_s_complete_answer_is_used_once_and_the_others_are_still_waited_for() -> None:
    h = driven(3, quorum=2, grace_seconds=2.0)
    p = h.open_one()
    h.answer(h.workers["w0"], p)
    dead = h.workers.pop("w0")
    h.answer(h.workers["w1"], p)
    assert not of(h.tick(), Merge)
    for worker in h.workers.values():
        h.hear(worker)
    h.answer(h.workers["w2"], p)
    assert [a.who[0] for a in of(h.tick(), Merge)[0].answers] == ["w0", "w1", "w2"]
    for _ in range(4):
        h.tick(1.0)
        for worker in h.workers.values():
            h.step(worker)
    assert of(h.actions, Lost)[0].member.name == dead.name
    assert all("w0" not in {a.who[0] for a in m.answers} for m in h.merges[1:])


def test_a_learner_at_a_stand_is_not_waited_for() -> None:
    h = driven(2, grace_seconds=1000.0)
    h.hear(h.workers["w1"], age=100.0)
    p = h.open_one() if h.rounds.calls else None
    while p is None:
        h.tick(0.5)
        h.step(h.workers["w0"])
        h.hear(h.workers["w1"], age=100.0)
        p = next(iter(h.rounds.calls), None)
    h.hear(h.workers["w1"], age=100.0)
    h.answer(h.workers["w0"], p)
    assert len(of(h.tick(), Merge)) == 1
