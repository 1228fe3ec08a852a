"""Rounds: when a fragment is called, which answers count, when a round closes (arXiv 2604.21428, section 3, and its
quorum and grace window). Pure: no socket, no clock.

The caller (the syncer's loop, a simulator, a test) passes the time and carries out the actions:

    join(...), alive(...), left(...), answer(...)   members join, report and leave; answers arrive
    tick(now)   -> [Called, Merge, Unmet, Lost, Drained]
    merged(...) / failed(...)   the result of a Merge

The state is a function of these calls alone: replaying a journal of them takes the same decisions.

A call is open until it is merged. A fragment has one open call at a time, and the run at most tau, except at the end,
when every fragment is called once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from ..common.config import MAX_LAG, RunSettings
from ..common.errors import Diverged
from ..common.wire import Alive, Call, most_calls
from .ledger import Ledger, Who
from .membership import Member, Membership
from .round_events import Action, Answer, Called, Drained, Lost, Merge, OpenCall, Unmet
from .schedule import Ema, Schedule, grace_seconds

FIRST_STEP_PATIENCE_SECONDS = 60.0
"""The first call waits for each new learner's first timed step, but no longer than this after its join."""
FAILED_MERGES = 8
"""Consecutive unusable merges of one call after which the run has diverged."""
GRACE_SPREAD = 2.0
"""The grace window considers learners whose step takes at most this factor of the typical one."""
DRAIN_SECONDS, DRAIN_ATTEMPTS = 30.0, 4
"""Time, and number of usual attempts, for which the last calls of a run may stay below the quorum before they are given
up: the longer of the two."""

RoundState = Literal["running", "draining", "drained"]


def about_to_begin(member: Member, now: float) -> bool:
    """Whether a learner joined so recently that it may not have completed its first step."""
    return member.step_seconds == 0 and now - member.joined_at < FIRST_STEP_PATIENCE_SECONDS


class Rounds:
    """State of all rounds of a run. `parameters`: elements of each fragment."""

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
        """Some of the last calls wait because a beat cannot name more."""
        self._retired: set[Who] = set()
        self._forgotten: set[str] = set()
        self.paused = False

    # --- members -----------------------------------------------------------------------------------------------------
    def join(self, name: str, incarnation: int, now: float) -> Member:
        """Add a learner, or return it if it is a member. All other incarnations of its name have ended."""
        member = self.members.join(name, incarnation, now)
        self._retired.discard(member.who)
        self._retired |= {other for other in self.ledger.open_incarnations(name) if other != member.who}
        return member

    def alive(self, alive: Alive, now: float) -> Member | None:
        """Take a report; None if the sender is not a member."""
        member = self.members.alive(alive, now)
        if member is not None:
            self.ledger.report(member.who, alive.tokens)
        return member

    def left(self, who: Who, local_steps: int, tokens: int) -> None:
        """A learner left; its last counters."""
        self.ledger.report(who, tokens)
        self.members.leave(who, local_steps, tokens)
        self._retired.add(who)

    def forget_oldest(self) -> list[Member]:
        """Remove the oldest members that ended, beyond the limit; only their share of the totals is kept."""
        gone = self.members.forget_oldest()
        self._retired |= {member.who for member in gone}
        self._forgotten |= {member.name for member in gone}
        return gone

    # --- answers -----------------------------------------------------------------------------------------------------
    def refusal(self, answer: Answer) -> str:
        """Why the answer would be rejected now, as one word; '' if it would be accepted. Changes nothing."""
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
        """Accept a complete answer; returns '' or why it is rejected. It counts unless it covers more work than its
        learner's reports allow; an answer that counts is itself a report of that work.
        """
        reason = self.refusal(answer)
        if not reason:
            self.calls[answer.fragment].answers[answer.who] = answer
            if self.counts(answer):
                self.ledger.report(answer.who, answer.tokens_to)
                self.members.counters.reached(answer.who, answer.steps_to)
        return reason

    def counts(self, answer: Answer) -> bool:
        """Whether the learner can have done the work that the answer covers, by its last report."""
        member = self.members.get(answer.who)
        credible = 0 if member is None else member.credible_tokens
        return answer.tokens_to <= max(credible, self.ledger.reported(answer.who))

    def _better(self, answer: Answer, known: Answer) -> bool:
        """A credible answer replaces an uncredible one from the same learner, so a forged message cannot block the real
        one.
        """
        return self.counts(answer) and not self.counts(known)

    def ended(self, model_hash: str) -> None:
        """The final model has this hash; recorded by a journal."""

    def close(self) -> None:
        """No further call follows; recorded by a journal."""

    def pause(self) -> None:
        """Open no more slots, before the syncer stops."""
        self.paused = True

    # --- time --------------------------------------------------------------------------------------------------------
    def tick(self, now: float) -> list[Action]:
        """All actions due at `now`, in the order in which they must be carried out."""
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
        """The latest time for the next tick() if no message arrives; now + 1 s at most."""
        usual = self.attempt_seconds()
        times = [c.attempt_at + c.patience * usual if c.closes_at is None else c.closes_at for c in self.calls.values()]
        times.append(now + 1.0)
        opens_at = self._opens_at(now)
        if opens_at is not None:
            times.append(opens_at)
        return max(now, min(times))

    def step(self, now: float) -> int:
        """The global step t at `now`. Between two slots it follows the typical learner; it never decreases."""
        if self.state != "running":
            self.t = self.settings.steps
        elif self.slot and self._slot_at is not None:
            base, typical = self.schedule.step_of(self.slot - 1), self.members.typical_step_seconds()
            ahead = (now - self._slot_at) / typical if typical > 0 else 0.0
            limit = min(self.schedule.step_of(self.slot), self.settings.steps) - 1
            self.t = max(self.t, int(min(base + ahead, max(base, limit))))
        return self.t

    def may_answer(self) -> int:
        """Number of learners that can answer now; below the quorum nothing is merged."""
        return len(self.members.awaited())

    def hopeless(self) -> bool:
        """Whether the present learners cannot complete any open call, so that a stop need not wait for one."""
        return self.may_answer() < self.settings.quorum and all(call.quorum_at is None for call in self.calls.values())

    # --- results of merges -------------------------------------------------------------------------------------------
    def merged(self, merge: Merge, seconds: float, digest: str = "") -> None:
        """The merge made the next version, with this sha256: book its intervals and close the call."""
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
        """The merge was unusable: repeat the call with new captures. Diverged after FAILED_MERGES in a row."""
        merge.call.failures += 1
        if merge.call.failures >= FAILED_MERGES:
            raise Diverged(
                f"run {self.settings.run} has diverged: merging fragment {merge.call.fragment} gave values that are "
                f"not finite {FAILED_MERGES} times in a row; the last good state is saved; begin a new run (--init "
                "continues from its model) with a lower --outer-lr or --outer-momentum"
            )
        return self._attempt_again(merge.call, now, merge.call.patience)

    def wire_calls(self) -> tuple[Call, ...]:
        """All open calls as messages, by slot."""
        return tuple(self.wire_call(c) for c in sorted(self.calls.values(), key=lambda c: c.slot))

    def wire_call(self, call: OpenCall) -> Call:
        return Call(
            run=self.settings.run, epoch=self.epoch, slot=call.slot, t=call.t, fragment=call.fragment,
            version=call.version, attempt=call.attempt, contributors=self.contributors[call.fragment],
            received=tuple(sorted({name for name, _ in call.answers})),
        )  # fmt: skip

    # --- decisions ---------------------------------------------------------------------------------------------------
    def _settle(self, call: OpenCall, now: float) -> Iterator[Action]:
        counted = [a for _, a in sorted(call.answers.items()) if self.counts(a)]
        if len({a.who[0] for a in counted}) >= self.settings.quorum:
            if call.quorum_at is None:
                self._quorum_met(call, now)
            complete = {m.who for m in self.members.awaited()} <= {a.who for a in counted}
            if complete or call.closes_at is None or now >= call.closes_at:
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
        """Drop the answers, which are too old, and request new captures."""
        call.attempt += 1
        call.attempt_at, call.patience = now, patience
        call.answers = {}
        call.quorum_at = call.closes_at = None
        return Called(call)

    def attempt_seconds(self) -> float:
        """Duration of an attempt: H / P typical steps, but enough for each awaited learner to reach a step boundary,
        and twice the usual time of answers: on a slow path all answers would otherwise arrive after the next attempt
        began.
        """
        typical = self.members.typical_step_seconds()
        slowest = max((m.step_seconds for m in self.members.awaited()), default=0.0)
        usual = 2 * (self.xi_answer.value or 0.0)
        return max(self.schedule.steps_between * typical, 2 * slowest, usual, 0.05) if typical else 1.0

    def _opens_at(self, now: float) -> float | None:
        """Time at which the next slot opens; None while it waits for anything but time."""
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
        most = max(self.tau, most_calls(self.schedule.P, len(self.members.by_name)))  # the limit of one beat
        room = max(0, most - len(self.calls))
        if waiting and room and self._crowded:
            self._drain_at = now  # calls that waited for room get as much time as the first ones
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
                self.members.counters.forget(name)

    def _close(self, call: OpenCall) -> None:
        if self.calls.get(call.fragment) is call:
            del self.calls[call.fragment]

    # --- checkpoints -------------------------------------------------------------------------------------------------
    def to_json(self) -> dict[str, Any]:
        """State for a resumed run. Open calls are not kept; their slots are called again."""
        return {
            "slot": min([self.slot, *(c.slot for c in self.calls.values())]),
            "t": self.t,
            "versions": list(self.versions),
            "ledger": self.ledger.to_json(),
            "lives": self.members.counters.to_json(),
        }

    def load_json(self, rows: dict[str, Any]) -> None:
        self.slot, self.t = rows["slot"], min(rows["t"], self.settings.steps)
        self.versions = list(rows["versions"])
        self.ledger.load_json(rows["ledger"])
        self.members.counters.load_json(rows["lives"])
