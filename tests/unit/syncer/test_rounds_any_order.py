"""Rounds under arbitrary interleavings."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from decoupled_diloco.common.config import RunSettings
from decoupled_diloco.syncer.ledger import Who
from decoupled_diloco.syncer.membership import SILENCE_SECONDS
from decoupled_diloco.syncer.round_events import Answer, Lost, Merge
from decoupled_diloco.syncer.rounds import Rounds
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rounds_driver import SIZES, TOKENS, P, RoundsDriver, Worker
from searching import examples


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
