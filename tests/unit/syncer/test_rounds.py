"""The round machine under arbitrary interleavings, and each of its rules by name."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from decoupled_diloco.common.config import MAX_LAG, RunSettings
from decoupled_diloco.common.wire import Alive
from decoupled_diloco.syncer import rounds
from decoupled_diloco.syncer.ledger import FORGOTTEN, Who
from decoupled_diloco.syncer.membership import REMEMBERED, SILENCE_SECONDS
from decoupled_diloco.syncer.round_events import Action, Answer, Called, Drained, Lost, Merge, Unmet
from decoupled_diloco.syncer.rounds import Rounds
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from searching import examples

P = 4
SIZES = [100, 10, 33, 7]
TOKENS = 10
"""Of one inner step."""


@dataclass
class Worker:
    """What a learner knows of itself: counters; per fragment, its anchor's version and where its interval begins."""

    name: str
    incarnation: int
    steps: int = 0
    step_seconds: float = 0.0
    versions: list[int] = field(default_factory=lambda: [0] * P)
    since: list[int] = field(default_factory=lambda: [0] * P)

    @property
    def who(self) -> Who:
        return self.name, self.incarnation

    def alive(self, age: float = 0.0) -> Alive:
        return Alive(
            run="run", name=self.name, incarnation=self.incarnation, epoch=1, local_steps=self.steps,
            tokens=self.steps * TOKENS, step_seconds=self.step_seconds, last_step_age_seconds=age, inner_seconds=0.0,
            session_seconds=0.0, since_first_step_seconds=0.0,
        )  # fmt: skip

    def answer(self, slot: int, attempt: int, fragment: int) -> Answer:
        begin = self.since[fragment]
        return Answer(
            who=self.who, fragment=fragment, slot=slot, attempt=attempt, base_version=self.versions[fragment],
            tokens_from=begin * TOKENS, tokens_to=self.steps * TOKENS, steps_from=begin, steps_to=self.steps,
        )  # fmt: skip

    def adopt(self, fragment: int, version: int) -> None:
        self.versions[fragment], self.since[fragment] = version, self.steps


@dataclass
class RoundsDriver:
    """A machine with workers round it, driven by hand: time moves only when a test says so."""

    rounds: Rounds
    now: float = 100.0
    workers: dict[str, Worker] = field(default_factory=dict)
    merges: list[Merge] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)

    def join(self, name: str, incarnation: int, step_seconds: float = 1.0) -> Worker:
        worker = Worker(name, incarnation, versions=list(self.rounds.versions))
        self.rounds.join(name, incarnation, self.now)
        self.workers[name] = worker
        worker.step_seconds = step_seconds
        return worker

    def step(self, worker: Worker, steps: int = 1) -> None:
        worker.steps += steps
        self.hear(worker)

    def hear(self, worker: Worker, age: float = 0.0) -> None:
        self.rounds.alive(worker.alive(age), self.now)

    def tick(self, seconds: float = 0.0) -> list[Action]:
        """Let `seconds` pass, carry out what the machine wants, and give it back."""
        self.now += seconds
        done: list[Action] = []
        while actions := self.rounds.tick(self.now):
            for action in actions:
                if isinstance(action, Merge):
                    self.merges.append(action)
                    self.rounds.merged(action, 0.01)
            done += actions
        self.actions += done
        return done

    def answer(self, worker: Worker, fragment: int) -> str:
        call = self.rounds.calls[fragment]
        return self.rounds.answer(worker.answer(call.slot, call.attempt, fragment))

    def adopt_all(self) -> None:
        for worker in self.workers.values():
            for p, version in enumerate(self.rounds.versions):
                if worker.versions[p] != version:
                    worker.adopt(p, version)

    def open_one(self) -> int:
        """Tick until a call is open; its fragment."""
        for _ in range(100):
            if self.rounds.calls:
                return next(iter(self.rounds.calls))
            self.tick(1.0)
            for worker in self.workers.values():
                self.step(worker)
        raise AssertionError("no call was opened")


def driven(workers: int = 2, **changes: Any) -> RoundsDriver:
    defaults: dict[str, Any] = {"steps": 50, "sync_every": P, "fragments": P, "overlap": 2, "quorum": 1}
    made = RoundsDriver(Rounds(RunSettings(**(defaults | changes)), SIZES, epoch=1))
    for i in range(workers):
        made.step(made.join(f"w{i}", 1 + i), 2)
    return made


def of(actions: list[Action], kind: type[Any]) -> list[Any]:
    return [a for a in actions if isinstance(a, kind)]


# --- rules by name ---------------------------------------------------------------------------------------------------
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


def test_no_more_than_tau_calls_are_open_and_the_clock_stands_still_meanwhile() -> None:
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


def test_a_resumed_machine_goes_on_with_books_and_versions_and_counts_what_was_undone_as_lost() -> None:
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


# --- arbitrary interleavings -----------------------------------------------------------------------------------------
class AnyOrder(RuleBasedStateMachine):
    """Answers, losses, repeats, joins, deaths, restarts of the syncer and time, in any order."""

    @initialize(
        quorum=st.integers(1, 3), tau=st.integers(1, 3), grace=st.sampled_from([0.0, 1.0, 50.0]),
        steps=st.integers(1, 40),
    )  # fmt: skip
    def begin(self, quorum: int, tau: int, grace: float, steps: int) -> None:
        made = RunSettings(steps=steps, sync_every=P, fragments=P, overlap=tau, quorum=quorum, grace_seconds=grace)
        self.h = RoundsDriver(Rounds(made, SIZES, epoch=1))
        self.incarnations = 0
        self.recorded: list[Answer] = []
        self.merged: dict[tuple[Who, int], list[tuple[int, int]]] = {}
        self.highest = [0] * P
        self.seen_merges = 0
        for name in "abc":
            self.join(name, 0.5)
            self.h.step(self.h.workers[name], 2)

    @rule(turns=st.integers(1, 6), adopts=st.booleans())
    def life_goes_on(self, turns: int, adopts: bool) -> None:
        """Everybody steps, answers and (mostly) adopts, as on an ordinary day."""
        for _ in range(turns):
            for worker in list(self.h.workers.values()):
                self.h.step(worker)
                for p in list(self.h.rounds.calls):
                    self.h.answer(worker, p)
            self._carry_out(0.5)
            if adopts:
                self.h.adopt_all()

    def _carry_out(self, seconds: float) -> None:
        was_drained = self.h.rounds.state == "drained"
        actions = self.h.tick(seconds)
        assert not (was_drained and [a for a in actions if not isinstance(a, Lost)])
        for merge in self.h.merges[self.seen_merges :]:
            self._check(merge)
        self.seen_merges = len(self.h.merges)

    def _check(self, merge: Merge) -> None:
        whos = [a.who for a in merge.answers]
        assert whos == sorted(whos)
        assert len({w[0] for w in whos}) >= self.h.rounds.settings.quorum
        for a in merge.answers:
            assert a.slot == merge.call.slot
            assert a.attempt == merge.call.attempt
            spans = self.merged.setdefault((a.who, a.fragment), [])
            assert all(a.tokens_from >= end or a.tokens_to <= begin for begin, end in spans), "merged twice"
            spans.append((a.tokens_from, a.tokens_to))
            worker = self.h.workers.get(a.who[0])
            if worker is not None and worker.who == a.who:
                member = self.h.rounds.members.get(a.who)
                allowed = 0 if member is None else member.credible_tokens
                assert a.tokens_to <= max(worker.steps * TOKENS, allowed)

    @rule(name=st.sampled_from("abcd"), seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def join(self, name: str, seconds: float) -> None:
        self.incarnations += 1
        if self.h.rounds.members.admit(name, self.incarnations, self.h.now) == "welcome":
            self.h.join(name, self.incarnations, seconds)

    @rule(pick=st.integers(0, 3), steps=st.integers(1, 3))
    def step(self, pick: int, steps: int) -> None:
        if worker := self._worker(pick):
            self.h.step(worker, steps)

    @rule(pick=st.integers(0, 3))
    def step_unreported(self, pick: int) -> None:
        if worker := self._worker(pick):
            worker.steps += 1

    @rule(pick=st.integers(0, 3))
    def everybody_answers_and_one_is_recorded(self, pick: int) -> None:
        for worker in self.h.workers.values():
            for p in list(self.h.rounds.calls):
                call = self.h.rounds.calls[p]
                answer = worker.answer(call.slot, call.attempt, p)
                self.h.rounds.answer(answer)
                if len(self.recorded) < 50 and worker is self._worker(pick):
                    self.recorded.append(answer)

    @precondition(lambda self: self.recorded)
    @rule(pick=st.integers(0, 49))
    def repeat_an_old_answer(self, pick: int) -> None:
        self.h.rounds.answer(self.recorded[pick % len(self.recorded)])

    @precondition(lambda self: self.recorded)
    @rule(pick=st.integers(0, 49), shift=st.integers(-20, 20))
    def forge_the_newest_slot_with_an_old_interval(self, pick: int, shift: int) -> None:
        old = self.recorded[pick % len(self.recorded)]
        call = self.h.rounds.calls.get(old.fragment)
        if call is not None:
            begin = max(0, old.tokens_from + shift)
            forged = replace(old, slot=call.slot, attempt=call.attempt, base_version=call.version,
                             tokens_from=begin, tokens_to=max(begin, old.tokens_to + shift))  # fmt: skip
            self.h.rounds.answer(forged)

    @rule(pick=st.integers(0, 3))
    def adopt(self, pick: int) -> None:
        if worker := self._worker(pick):
            for p in range(P):
                if worker.versions[p] != self.h.rounds.versions[p]:
                    worker.adopt(p, self.h.rounds.versions[p])

    @rule(pick=st.integers(0, 3))
    def die(self, pick: int) -> None:
        if worker := self._worker(pick):
            del self.h.workers[worker.name]

    @rule(pick=st.integers(0, 3))
    def say_goodbye(self, pick: int) -> None:
        if worker := self._worker(pick):
            self.h.hear(worker)
            self.h.rounds.left(worker.who, worker.steps, worker.steps * TOKENS)
            del self.h.workers[worker.name]

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.5, 1.0, SILENCE_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self._carry_out(seconds)

    @rule(lost=st.integers(0, 3))
    def the_syncer_is_killed_and_resumed(self, lost: int) -> None:
        saved = json.loads(json.dumps(self.h.rounds.to_json()))
        made = Rounds(self.h.rounds.settings, SIZES, self.h.rounds.epoch + 1)
        made.load_json(saved)
        made.versions = [v + 1 + lost for v in made.versions]
        self.h.rounds = made
        for worker in self.h.workers.values():  # all fetch keyframes under the new epoch
            made.members.join(*worker.who, self.h.now)
            self.h.hear(worker)
            for p in range(P):
                worker.adopt(p, made.versions[p])

    def _worker(self, pick: int) -> Worker | None:
        names = sorted(self.h.workers)
        return self.h.workers[names[pick % len(names)]] if names else None

    @invariant()
    def calls_are_few_and_versions_never_go_back(self) -> None:
        if not hasattr(self, "h"):
            return
        rounds = self.h.rounds
        assert all(call.fragment == p for p, call in rounds.calls.items())
        regular = [c for c in rounds.calls.values() if not c.drains]
        assert len(regular) <= rounds.tau
        assert all(new >= old for new, old in zip(rounds.versions, self.highest, strict=True))
        self.highest = list(rounds.versions)
        assert rounds.step(self.h.now) <= rounds.settings.steps
        assert rounds.next_deadline(self.h.now) >= self.h.now

    @invariant()
    def the_ledger_agrees_to_the_token(self) -> None:
        if not hasattr(self, "h"):
            return
        ledger = self.h.rounds.ledger
        for name in ledger.names():
            account = ledger.account(name)
            assert account.reported == account.merged + account.pending + account.lost
            assert min(account.reported, account.merged, account.pending, account.lost) >= 0
        for (who, p), spans in self.merged.items():
            book = ledger._open.get(who)
            if book is not None:
                assert book.merged[p] == sum(end - begin for begin, end in spans)


AnyOrder.TestCase.settings = settings(
    max_examples=examples(100), stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
TestAnyOrder = pytest.mark.timeout(120)(AnyOrder.TestCase)
