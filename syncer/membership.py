"""Membership of learners: their states, last reports, and lifetime counters. Pure: the time is an argument, in seconds
of the syncer's steady clock.

hello -> (wait | refused | joined) -> live <-> stalled (alive, but no steps)
silent for 3 beats -> lost, and live again when heard
goodbye -> left
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any, Literal

from ..common.config import BEAT_SECONDS, SILENT_BEATS
from ..common.wire import MAX_COUNT, Alive
from .ledger import FORGOTTEN, Who

SUMMED = (
    "local_steps",
    "inner_seconds",
    "session_seconds",
    "since_first_step_seconds",
    "bytes_up",
    "bytes_down",
    "gaps",
)
"""Counters of an Alive, cumulative since its sender's start."""
Sums = dict[str, Any]


@dataclass
class LifetimeCounters:
    """Counters of each name over all its incarnations: a sum of those that ended, and the present one's last report.
    Memory: O(names).
    """

    _ended: dict[str, Sums] = field(default_factory=dict)
    _present: dict[str, tuple[int, Sums]] = field(default_factory=dict)

    def report(self, alive: Alive) -> None:
        """Take the newest report of `alive.name`. If it is of another incarnation, the previous one has ended."""
        incarnation, before = self._present.get(alive.name, (alive.incarnation, _NOTHING))
        row = {name: getattr(alive, name) for name in SUMMED}
        if incarnation != alive.incarnation:
            self._ended[alive.name] = _added(self._ended.get(alive.name, _NOTHING), before)
        else:
            row["local_steps"] = max(row["local_steps"], before["local_steps"])
        self._present[alive.name] = (alive.incarnation, row)

    def reached(self, who: Who, local_steps: int) -> None:
        """Take the steps stated by an answer of `who`, which may exceed its last report."""
        incarnation, row = self._present.get(who[0], (None, _NOTHING))
        if incarnation == who[1]:
            row["local_steps"] = max(row["local_steps"], local_steps)

    def forget(self, name: str) -> None:
        """Add the counters of `name` to those of FORGOTTEN, and remove them."""
        self._ended[FORGOTTEN] = _added(self.of(FORGOTTEN), self.of(name))
        self._ended.pop(name, None)
        self._present.pop(name, None)

    def of(self, name: str) -> Sums:
        """The sum over all incarnations of `name`."""
        return _added(self._ended.get(name, _NOTHING), self._present.get(name, (0, _NOTHING))[1])

    def total(self) -> Sums:
        """The sum over all learners."""
        sums = dict(_NOTHING)
        for name in {*self._ended, *self._present}:
            sums = _added(sums, self.of(name))
        return sums

    def to_json(self) -> dict[str, Any]:
        return {
            "ended": self._ended,
            "present": {name: [incarnation, row] for name, (incarnation, row) in self._present.items()},
        }

    def load_json(self, rows: dict[str, Any]) -> None:
        self._ended = {name: dict(row) for name, row in rows["ended"].items()}
        self._present = {name: (incarnation, dict(row)) for name, (incarnation, row) in rows["present"].items()}


_NOTHING: Sums = dict.fromkeys(SUMMED, 0)


def _added(one: Sums, other: Sums) -> Sums:
    return {name: one[name] + other[name] for name in SUMMED}


State = Literal["live", "stalled", "lost", "left"]
SILENCE_SECONDS = SILENT_BEATS * BEAT_SECONDS
STALL_FACTOR = 10
"""A learner is stalled after this many of its usual step times without a step, but not before SILENCE_SECONDS."""
PACE_FACTOR, SPARE_STEPS = 2, 2
"""Since its last report a learner can credibly have worked at this factor of its pace, plus this number of steps."""
REMEMBERED = 256
"""Most names that left or were lost and are still listed; the oldest are forgotten first."""


RESET_AFTER = 3
"""Consecutive answers rejected for their content after which a learner is reset by keyframes."""
RESET_SECONDS = 5.0
"""Time for a reset before it is commanded again."""
CONTENT_REASONS = frozenset({"nonfinite", "norm", "scale", "code", "size", "stale", "unreported"})
"""Reasons that concern the content of an answer; a late or repeated answer is no fault."""


@dataclass
class Member:
    """One learner as the syncer sees it; `alive` is its last report."""

    name: str
    incarnation: int
    joined_at: float
    heard_at: float
    state: State = "live"
    host: str = ""
    device: str = ""
    pid: int = 0
    alive: Alive | None = None
    rejected: int = 0
    rejected_in_a_row: int = 0
    reset_at: float = float("-inf")
    """Time of its last reset."""

    @property
    def who(self) -> Who:
        return self.name, self.incarnation

    def reject(self, reason: str) -> bool:
        """Count a rejected answer. Returns whether too many in a row were rejected for their content."""
        self.rejected += 1
        self.rejected_in_a_row += reason in CONTENT_REASONS
        return reason in CONTENT_REASONS and self.rejected_in_a_row >= RESET_AFTER

    def order_reset(self, now: float) -> bool:
        """Whether to send a reset now: False if the last one was a moment ago."""
        if now - self.reset_at < RESET_SECONDS:
            return False
        self.rejected_in_a_row, self.reset_at = 0, now
        return True

    @property
    def step_seconds(self) -> float:
        """Its EMA of an inner step in seconds; 0 until one step after its join was timed."""
        return self.alive.step_seconds if self.alive else 0.0

    @property
    def tokens(self) -> int:
        return self.alive.tokens if self.alive else 0

    @property
    def credible_tokens(self) -> int:
        """Upper bound of its token counter until its next report or loss: the reported tokens, and those of that time
        at PACE_FACTOR times its pace.
        """
        alive = self.alive
        if alive is None or not alive.local_steps:
            return 0
        more = PACE_FACTOR * SILENCE_SECONDS / alive.step_seconds if alive.step_seconds > 0 else 0
        steps = SPARE_STEPS + min(more, MAX_COUNT)  # a tiny step time would give an infinite number of steps
        return alive.tokens + math.ceil(steps * alive.tokens / alive.local_steps)


@dataclass
class Membership:
    """All members by name, and the incarnations that wait for a name in use."""

    by_name: dict[str, Member] = field(default_factory=dict)
    counters: LifetimeCounters = field(default_factory=LifetimeCounters)
    _waiting: dict[str, tuple[int, float]] = field(default_factory=dict)

    def get(self, who: Who) -> Member | None:
        """The member of this name and incarnation."""
        member = self.by_name.get(who[0])
        return member if member is not None and member.incarnation == who[1] else None

    def live(self) -> list[Member]:
        """Members heard within 3 beats, sorted by name, including stalled ones."""
        return [m for _, m in sorted(self.by_name.items()) if m.state in ("live", "stalled")]

    def awaited(self) -> list[Member]:
        """Members that a round waits for: live, not stalled, and with a timed step."""
        return [m for m in self.live() if m.state == "live" and m.step_seconds > 0]

    def admit(self, name: str, incarnation: int, now: float) -> Literal["welcome", "wait", "refused"]:
        """Whether this incarnation may use `name`. A name becomes free when its holder is silent for 3 beats."""
        holder = self.by_name.get(name)
        free = holder is None or holder.incarnation == incarnation or holder.state in ("left", "lost")
        if holder is None or free or now - holder.heard_at >= SILENCE_SECONDS:
            self._waiting.pop(name, None)
            return "welcome"
        if len(self._waiting) > REMEMBERED:
            self._waiting.clear()
        waiting, since = self._waiting.get(name, (incarnation, now))
        if waiting != incarnation:
            since = now
        self._waiting[name] = (incarnation, since)
        return "refused" if holder.heard_at > since else "wait"

    def join(self, name: str, incarnation: int, now: float) -> Member:
        """Add a member, or return it if it is one. Another incarnation of the name is no longer a member."""
        member = self.by_name.get(name)
        if member is not None and member.incarnation == incarnation:
            member.heard_at, member.state = now, "live"
        else:
            member = self.by_name[name] = Member(name, incarnation, joined_at=now, heard_at=now)
        return member

    def alive(self, alive: Alive, now: float) -> Member | None:
        """Take a report; None if the sender is not a member. A lost member that is heard is live again."""
        member = self.get((alive.name, alive.incarnation))
        if member is None or member.state == "left":
            return None
        last = member.alive
        if last is not None and (alive.tokens < last.tokens or alive.local_steps < last.local_steps):
            return member  # an older report, overtaken by a newer one: counters never decrease
        member.alive, member.heard_at = alive, now
        self.counters.report(alive)
        ema = alive.step_seconds
        stalled = ema > 0 and alive.last_step_age_seconds > max(STALL_FACTOR * ema, SILENCE_SECONDS)
        member.state = "stalled" if stalled else "live"
        return member

    def leave(self, who: Who, local_steps: int = 0, tokens: int = 0) -> Member | None:
        """A member left; its last counters."""
        member = self.get(who)
        if member is not None:
            member.state = "left"
            if member.alive is not None and local_steps > member.alive.local_steps:
                member.alive = replace(member.alive, local_steps=local_steps, tokens=tokens)
                self.counters.report(member.alive)
        return member

    def silent(self, now: float) -> list[Member]:
        """Mark silent members as lost; returns those that became lost now."""
        gone = [m for m in self.live() if now - m.heard_at >= SILENCE_SECONDS]
        for member in gone:
            member.state = "lost"
        return gone

    def forget_oldest(self) -> list[Member]:
        """Remove the oldest members that ended, beyond REMEMBERED; returns them."""
        ended = sorted((m for m in self.by_name.values() if m.state in ("left", "lost")), key=lambda m: m.heard_at)
        removed = ended[: max(0, len(ended) - REMEMBERED)]
        for member in removed:
            del self.by_name[member.name]
        return removed

    def typical_step_seconds(self) -> float:
        """Lower median of the awaited members' step EMAs in seconds; 0 while there is none."""
        emas = [m.step_seconds for m in self.awaited()]
        return median_low(emas) if emas else 0.0

    def slowest_step_seconds(self, *, within: float) -> float:
        """The largest step EMA among awaited members, of those at most `within` times the typical one."""
        limit = within * self.typical_step_seconds()
        return max((m.step_seconds for m in self.awaited() if m.step_seconds <= limit), default=0.0)
