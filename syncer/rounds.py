"""The round machine: when a fragment is called, whose answers count, when a round closes. Pure: no socket, no clock.

Whoever drives it (the syncer's loop, a simulator, a test) passes the time and carries out the actions:

    join(...), heard(...), left(...), answer(...)   who comes, reports, goes, and what was trained
    tick(now)   -> [Called, Merge, Unmet, Lost, Drained]
    merged(...) / failed(...)   what became of a Merge

Its state is a function of these calls alone: a tape of them (recording) takes the same decisions again.

A call is open until it is merged. Per fragment there is one call at a time, at most tau at all, except at the end,
where every fragment is called once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..common.config import MAX_LAG, RunSettings
from ..common.errors import Diverged
from ..common.wire import Alive, Call, most_calls
from .ledger import Ledger, Who
from .membership import Member, Membership
from .schedule import Ema, Schedule, grace_seconds

FIRST_STEP_PATIENCE_SECONDS = 60.0
"""The first call waits for each newcomer's first timed step, but no longer than this after its join."""
FAILED_MERGES = 8
"""Merges of one call in a row that gave nothing usable, after which the run is given up."""
GRACE_SPREAD = 2.0
"""The grace window considers learners up to so many times slower than the typical one."""
DRAIN_SECONDS, DRAIN_ATTEMPTS = 30.0, 4
"""How long the last calls of a run may stay below the quorum before they are given up, and how many usual attempts at
least."""

RoundState = Literal["running", "draining", "drained"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One learner's complete answer to one call. `vector` is opaque here: the decoded delta."""

    who: Who
    fragment: int
    slot: int
    attempt: int
    base_version: int
    tokens_from: int
    tokens_to: int
    steps_from: int
    steps_to: int
    vector: Any = None

    @property
    def tokens(self) -> int:
        return self.tokens_to - self.tokens_from

    @property
    def steps(self) -> int:
        return self.steps_to - self.steps_from


@dataclass
class OpenCall:
    """A call and what it brought in so far."""

    slot: int
    t: int
    fragment: int
    version: int
    opened_at: float
    attempt: int = 1
    attempt_at: float = 0.0
    patience: float = 1.0
    """How many times as long as usual this attempt waits. Doubled each time: answers may only have been under way."""
    answers: dict[Who, Answer] = field(default_factory=dict)
    quorum_at: float | None = None
    closes_at: float | None = None
    drains: bool = False
    """One of the last calls of the run."""
    failures: int = 0
    """Merges of it that gave nothing usable."""


@dataclass(frozen=True)
class Called:
    """Publish this call (a new one, or a new attempt of it)."""

    call: OpenCall


@dataclass(frozen=True)
class Merge:
    """Merge these answers, sorted by (name, incarnation), then say merged() or failed(). `unreported` were left out:
    they cover more than their learners can have done by what they report.
    """

    call: OpenCall
    answers: tuple[Answer, ...]
    unreported: tuple[Answer, ...]

    @property
    def contributors(self) -> tuple[tuple[str, int, int, int], ...]:
        """(name, incarnation, steps_to, tokens_to) of each, as an Update tells them."""
        return tuple((*a.who, a.steps_to, a.tokens_to) for a in self.answers)


@dataclass(frozen=True)
class Unmet:
    """At the end a call was given up below the quorum: the fragment ends at the version it has."""

    call: OpenCall


@dataclass(frozen=True)
class Lost:
    """This member has been silent for 3 beats."""

    member: Member


@dataclass(frozen=True)
class Drained:
    """Every fragment has had its last round."""


Action = Called | Merge | Unmet | Lost | Drained


def about_to_begin(member: Member, now: float) -> bool:
    """Whether a learner has joined so recently that its first steps may still be under way."""
    return member.step_seconds == 0 and now - member.joined_at < FIRST_STEP_PATIENCE_SECONDS


class Rounds:
    """State of all rounds of a run. `parameters` are the fragments' sizes."""

    def __init__(self, settings: RunSettings, parameters: Sequence[int], epoch: int) -> None:
        P = len(parameters)
        self.settings = settings
        self.epoch = epoch
        self.schedule = Schedule(settings.sync_every, P, settings.steps)
        self.tau = settings.resolved_overlap(P)
        self.members = Membership()
        self.ledger = Ledger(parameters)
        self.versions = [0] * P
        self.contributors: list[tuple[Who, ...]] = [()] * P
        self.calls: dict[int, OpenCall] = {}
        self.state: RoundState = "running"
        self.slot = 0
        """The next slot to open."""
        self.t = 0
        self.xi_quorum, self.xi_sync, self.xi_answer = Ema(), Ema(), Ema()
        """Seconds from a call to its quorum, of a merge, and from an attempt to its quorum."""
        self._slot_at: float | None = None
        self._drain_at: float | None = None
        self._drained: set[int] = set()
        self._crowded = False
        """Some of the last calls wait for room in a beat."""
        self._retired: set[Who] = set()
        self._forgotten: set[str] = set()
        self.paused = False

    # --- who is here -------------------------------------------------------------------------------------------------
    def join(self, name: str, incarnation: int, now: float) -> Member:
        """Enter this learner, or find it again; every other incarnation of its name is gone for good."""
        member = self.members.join(name, incarnation, now)
        self._retired.discard(member.who)
        self._retired |= {other for other in self.ledger.open_incarnations(name) if other != member.who}
        return member

    def heard(self, alive: Alive, now: float) -> Member | None:
        """Take a report; None if the sender is no member."""
        member = self.members.heard(alive, now)
        if member is not None:
            self.ledger.report(member.who, alive.tokens)
        return member

    def left(self, who: Who, local_steps: int, tokens: int) -> None:
        """It said goodbye, with its last counters."""
        self.ledger.report(who, tokens)
        self.members.leave(who, local_steps, tokens)
        self._retired.add(who)

    def forget_oldest(self) -> list[Member]:
        """Members that ended and are too many to list: of a name nothing stays but what it added to the totals."""
        gone = self.members.forget_oldest()
        self._retired |= {member.who for member in gone}
        self._forgotten |= {member.name for member in gone}
        return gone

    # --- answers -----------------------------------------------------------------------------------------------------
    def refusal(self, answer: Answer) -> str:
        """'' if the answer would be taken now, else one word why not. Changes nothing."""
        call, member = self.calls.get(answer.fragment), self.members.get(answer.who)
        if member is None or member.state == "left":
            return "stranger"
        if call is None or call.slot != answer.slot:
            return "late"
        if answer.attempt != call.attempt:
            return "attempt"
        if answer.who in call.answers and not self._better(answer, call.answers[answer.who]):
            return "duplicate"
        if not call.version - MAX_LAG <= answer.base_version <= call.version:
            return "stale"
        if answer.tokens <= 0 or answer.steps <= 0:
            return "empty"
        if not self.ledger.accepts(answer.who, answer.fragment, answer.tokens_from):
            return "overlap"
        return ""

    def answer(self, answer: Answer) -> str:
        """Take a complete answer; '' or why not. It counts unless it covers more than its learner's reports allow; one
        that counts is itself a report of what was done.
        """
        reason = self.refusal(answer)
        if not reason:
            self.calls[answer.fragment].answers[answer.who] = answer
            if self.counts(answer):
                self.ledger.report(answer.who, answer.tokens_to)
                self.members.lives.reached(answer.who, answer.steps_to)
        return reason

    def counts(self, answer: Answer) -> bool:
        """By its learner's last report it can have done what the answer covers."""
        member = self.members.get(answer.who)
        credible = 0 if member is None else member.credible_tokens
        return answer.tokens_to <= max(credible, self.ledger.reported(answer.who))

    def _better(self, answer: Answer, known: Answer) -> bool:
        """One that counts takes the place of one that does not: nobody is shut out by what was sent in his name."""
        return self.counts(answer) and not self.counts(known)

    def ended(self, model_hash: str) -> None:
        """The final model has this hash; for a tape."""

    def close(self) -> None:
        """Nothing more will be asked; for a tape."""

    def pause(self) -> None:
        """Open no more slots: the syncer is about to stop."""
        self.paused = True

    # --- time --------------------------------------------------------------------------------------------------------
    def tick(self, now: float) -> list[Action]:
        """All that is due at `now`, in the order in which it must be carried out."""
        actions: list[Action] = [Lost(member) for member in self.members.silent(now)]
        for call in sorted(self.calls.values(), key=lambda c: c.slot):
            actions += self._settle(call, now)
        if self.state == "running":
            actions += self._open_due(now)
        if self.state == "draining" and not self.paused:
            actions += self._drain(now)
        self._close_books()
        return actions

    def next_deadline(self, now: float) -> float:
        """When tick() has something to do at the latest, if nothing arrives before; now + 1 s at most."""
        usual = self.attempt_seconds()
        times = [c.attempt_at + c.patience * usual if c.closes_at is None else c.closes_at for c in self.calls.values()]
        times.append(now + 1.0)
        opens_at = self._opens_at(now)
        if opens_at is not None:
            times.append(opens_at)
        return max(now, min(times))

    def step(self, now: float) -> int:
        """The global step t at `now`: between two slots it follows the typical learner; never back."""
        if self.state != "running":
            self.t = self.settings.steps
        elif self.slot and self._slot_at is not None:
            base, typical = self.schedule.step_of(self.slot - 1), self.members.typical_step_seconds()
            ahead = (now - self._slot_at) / typical if typical > 0 else 0.0
            limit = min(self.schedule.step_of(self.slot), self.settings.steps) - 1
            self.t = max(self.t, int(min(base + ahead, max(base, limit))))
        return self.t

    def may_answer(self) -> int:
        """How many learners a round can count on now; below the quorum nothing is merged."""
        return len(self.members.awaited())

    def hopeless(self) -> bool:
        """No open call can be merged by those who are here now: whoever stops need not wait for one."""
        return self.may_answer() < self.settings.quorum and all(call.quorum_at is None for call in self.calls.values())

    # --- what became of a Merge --------------------------------------------------------------------------------------
    def merged(self, merge: Merge, seconds: float, digest: str = "") -> None:
        """The merge made the next version, of this sha256 (for a tape): book its intervals and close the call."""
        del digest
        call = merge.call
        for a in merge.answers:
            self.ledger.merge(a.who, a.fragment, a.tokens_from, a.tokens_to)
        self.versions[call.fragment] = call.version + 1
        self.contributors[call.fragment] = tuple(a.who for a in merge.answers)
        self.xi_sync.take(seconds)
        self._close(call)
        if call.drains:
            self._drained.add(call.fragment)

    def failed(self, merge: Merge, now: float) -> Called:
        """The merge gave nothing usable: the same call once more, with new captures. Diverged if it never will."""
        merge.call.failures += 1
        if merge.call.failures >= FAILED_MERGES:
            raise Diverged(
                f"run {self.settings.run} has diverged: merging fragment {merge.call.fragment} gave values that are "
                f"not finite {FAILED_MERGES} times in a row; what was good is saved; begin a new run (--init takes its "
                "model along) with a lower --outer-lr or --outer-momentum"
            )
        return self._attempt_again(merge.call, now, merge.call.patience)

    def wire_calls(self) -> tuple[Call, ...]:
        """Every open call as it is published, by slot."""
        return tuple(self.wire_call(c) for c in sorted(self.calls.values(), key=lambda c: c.slot))

    def wire_call(self, call: OpenCall) -> Call:
        return Call(
            run=self.settings.run, epoch=self.epoch, slot=call.slot, t=call.t, fragment=call.fragment,
            version=call.version, attempt=call.attempt, contributors=self.contributors[call.fragment],
            received=tuple(sorted({name for name, _ in call.answers})),
        )  # fmt: skip

    # --- inside ------------------------------------------------------------------------------------------------------
    def _settle(self, call: OpenCall, now: float) -> Iterator[Action]:
        counted = [a for _, a in sorted(call.answers.items()) if self.counts(a)]
        if len({a.who[0] for a in counted}) >= self.settings.quorum:
            if call.quorum_at is None:
                self._quorum_met(call, now)
            everybody = {m.who for m in self.members.awaited()} <= {a.who for a in counted}
            if everybody or call.closes_at is None or now >= call.closes_at:
                unreported = tuple(a for w, a in sorted(call.answers.items()) if a not in counted)
                yield Merge(call, tuple(counted), unreported)
        elif self.state == "draining" and self._gives_up(now):
            self._close(call)
            self._drained.add(call.fragment)
            yield Unmet(call)
        elif now - call.attempt_at >= call.patience * self.attempt_seconds():
            enough = self.may_answer() >= self.settings.quorum
            yield self._attempt_again(call, now, 2 * call.patience if enough else 1.0)

    def _quorum_met(self, call: OpenCall, now: float) -> None:
        call.quorum_at = now
        self.xi_answer.take(now - call.attempt_at)
        limit = self.settings.grace_seconds
        if call.attempt == 1 and not call.drains:
            self.xi_quorum.take(now - call.opened_at)
        grace = limit if call.drains else grace_seconds(
            tau=self.tau, step=self.members.slowest_step_seconds(within=GRACE_SPREAD), quorum=self.xi_quorum.value,
            sync=self.xi_sync.value, gamma=self.settings.gamma, limit=limit,
        )  # fmt: skip
        call.closes_at = now + grace

    def _attempt_again(self, call: OpenCall, now: float, patience: float) -> Called:
        """Whatever was captured is too old by now: drop it and ask for new captures."""
        call.attempt += 1
        call.attempt_at, call.patience = now, patience
        call.answers = {}
        call.quorum_at = call.closes_at = None
        return Called(call)

    def attempt_seconds(self) -> float:
        """H / P typical steps, but time enough for each awaited learner to reach a step boundary, and twice as long as
        answers usually take. Otherwise each would find, where the way is long, that a newer attempt is asked for.
        """
        typical = self.members.typical_step_seconds()
        slowest = max((m.step_seconds for m in self.members.awaited()), default=0.0)
        usual = 2 * (self.xi_answer.value or 0.0)
        return max(self.schedule.steps_between * typical, 2 * slowest, usual, 0.05) if typical else 1.0

    def _opens_at(self, now: float) -> float | None:
        """When the next slot may open; None while something other than time stands in the way."""
        typical = self.members.typical_step_seconds()
        if self.state != "running" or self.paused or typical <= 0 or self.may_answer() < self.settings.quorum:
            return None
        if len(self.calls) >= self.tau or self._slot_fragment() in self.calls:
            return None
        if self._slot_at is None:
            return None if self._awaits_first_steps(now) else now
        return self._slot_at + self.schedule.steps_between * typical

    def _slot_fragment(self) -> int:
        return self.schedule.fragment_of(self.slot)

    def _awaits_first_steps(self, now: float) -> bool:
        return any(about_to_begin(member, now) for member in self.members.live())

    def _open_due(self, now: float) -> Iterator[Action]:
        opens_at = self._opens_at(now)
        if opens_at is None or now < opens_at:
            return
        if self.schedule.step_of(self.slot) >= self.settings.steps:
            self.state, self._drain_at = "draining", now
            return
        self._slot_at = now
        yield Called(self._open(self._slot_fragment(), self.schedule.step_of(self.slot), now))

    def _open(self, fragment: int, t: int, now: float, *, drains: bool = False) -> OpenCall:
        call = OpenCall(self.slot, t, fragment, self.versions[fragment], now, attempt_at=now, drains=drains)
        self.calls[fragment] = call
        self.slot += 1
        self.t = max(self.t, t)
        return call

    def _drain(self, now: float) -> Iterator[Action]:
        waiting = [p for p in range(self.schedule.P) if p not in self._drained and p not in self.calls]
        most = max(self.tau, most_calls(self.schedule.P, len(self.members.by_name)))  # what one beat can name
        room = max(0, most - len(self.calls))
        if waiting and room and self._crowded:
            self._drain_at = now  # these had to wait for room: they get as long as the first
        self._crowded = len(waiting) > room
        for p in waiting[:room]:
            yield Called(self._open(p, self.settings.steps, now, drains=True))
        if len(self._drained) == self.schedule.P:
            self.state = "drained"
            yield Drained()

    def _gives_up(self, now: float) -> bool:
        patience = max(DRAIN_SECONDS, DRAIN_ATTEMPTS * self.attempt_seconds())
        late = self._drain_at is not None and now - self._drain_at >= patience
        return late or not self.members.live()

    def _close_books(self) -> None:
        held = {who for call in self.calls.values() for who in call.answers}
        for who in sorted(self._retired - held):
            self.ledger.close(who)
            self._retired.discard(who)
        for name in sorted(self._forgotten):
            if name in self.members.by_name:
                self._forgotten.discard(name)
            elif not any(self.ledger.open_incarnations(name)):
                self._forgotten.discard(name)
                self.ledger.forget(name)
                self.members.lives.forget(name)

    def _close(self, call: OpenCall) -> None:
        if self.calls.get(call.fragment) is call:
            del self.calls[call.fragment]

    # --- checkpoints -------------------------------------------------------------------------------------------------
    def to_json(self) -> dict[str, Any]:
        """What a resumed run needs; open calls are not kept, they are called again."""
        return {
            "slot": min([self.slot, *(c.slot for c in self.calls.values())]),
            "t": self.t,
            "versions": list(self.versions),
            "ledger": self.ledger.to_json(),
            "lives": self.members.lives.to_json(),
        }

    def load_json(self, rows: dict[str, Any]) -> None:
        self.slot, self.t = rows["slot"], min(rows["t"], self.settings.steps)
        self.versions = list(rows["versions"])
        self.ledger.load_json(rows["ledger"])
        self.members.lives.load_json(rows["lives"])
