"""Deltas in, updates out: answers are taken, merged and published, and lost pieces are sent again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..common.codec import digest
from ..common.errors import Malformed
from ..common.wire import Chunked, Delta, Fetch, Keyframe, Update, split
from .aggregate import token_weight
from .global_model import MergeResult
from .ledger import Who
from .metrics import RunMetrics
from .round_events import Merge
from .rounds import Rounds
from .run_state import Components, RunState, Served

GATHER_SECONDS = 0.1


@dataclass(frozen=True)
class Retransmission:
    """Send these chunks of this fragment once: its last update, its keyframe, or version 0."""

    what: str
    fragment: int
    chunks: tuple[int, ...]


@dataclass
class Retransmissions:
    """What is wanted and not sent yet. Memory: one set of chunk numbers a fragment and kind."""

    asked_at: float = float("-inf")
    """When the last Fetch came."""
    due_at: float | None = None
    """When the gathered requests are answered; None while there are none."""
    _wanted: dict[tuple[str, int], set[int]] = field(default_factory=dict)

    def ask(self, fetch: Fetch, now: float) -> None:
        self.asked_at = now
        self._wanted.setdefault((fetch.what, fetch.fragment), set()).update(fetch.chunks)
        if self.due_at is None:
            self.due_at = now + GATHER_SECONDS

    def due(self, now: float) -> list[Retransmission]:
        """What to send now, each chunk once, in order of kind and fragment."""
        if self.due_at is None or now < self.due_at:
            return []
        wanted, self._wanted, self.due_at = self._wanted, {}, None
        return [
            Retransmission(what, fragment, tuple(sorted(chunks))) for (what, fragment), chunks in sorted(wanted.items())
        ]


class Publisher:
    """Everything that moves the model's bytes."""

    def __init__(self, parts: Components, run: RunState) -> None:
        self._parts, self._run = parts, run
        self.repairs = Retransmissions()

    def delta(self, delta: Delta, _now: float) -> None:
        """Take one chunk of an answer. Malformed with the reason if it is refused."""
        served = self._run.served
        if served is None:
            raise Malformed("early", "the run has no version 0 yet")
        answer = served.intake.take(delta)
        if answer is None:
            return
        reason = served.rounds.answer(answer)
        if reason:
            raise Malformed(reason)
        member = served.rounds.members.get(answer.who)
        if member is not None:
            member.rejected_in_a_row = 0
        if served.rounds.counts(answer):
            self._run.rejections.accepted(answer.who, Delta.KIND)

    def merge(self, served: Served, merge: Merge, now: float) -> tuple[Who, ...]:
        """Carry out a Merge: new version, published to all. Whose answers could not be counted."""
        began, call, rounds, teller = time.perf_counter(), merge.call, served.rounds, self._parts.teller
        try:
            merged = merge_answers(served, merge)
        except Malformed as wrong:
            teller.warn("merge_failed", fragment=call.fragment, slot=call.slot, detail=str(wrong))
            self._parts.lines.send(rounds.wire_call(rounds.failed(merge, now).call))
            return ()
        t = rounds.step(now)
        self._publish(served, merge, merged, t)
        seconds = time.perf_counter() - began
        book_merge(served, merge, merged, now, seconds)
        teller.report_merge(served.state, merge, merged, t, seconds)
        for answer in merge.answers:
            self._run.rejections.accepted(answer.who, Delta.KIND)
        return tuple(a.who for a in merge.unreported)

    def fetch(self, fetch: Fetch, now: float) -> None:
        served = self._run.served
        if served is not None and fetch.epoch == self._run.epoch and fetch.fragment <= served.state.plan.P:
            self.repairs.ask(fetch, now)

    def repair(self, now: float) -> None:
        """Send what was asked for, where it is time."""
        for repair in self.repairs.due(now):
            served = self._run.served
            try:
                source = self._source(served, repair) if served is not None else None
            except (Malformed, OSError) as wrong:  # version 0 cannot be read from the disk any more
                self._parts.teller.warn("repair_failed", what=repair.what, fragment=repair.fragment, error=str(wrong))
                continue
            if source is not None:
                make, payload = source
                for part in split(payload, repair.chunks):
                    self._parts.lines.send(make(part))

    def _publish(self, served: Served, merge: Merge, merged: MergeResult, t: int) -> None:
        settings, call = self._run.settings, merge.call
        header: dict[str, Any] = {
            "run": settings.run,
            "epoch": self._run.epoch,
            "slot": call.slot,
            "t": t,
            "fragment": call.fragment,
            "version": merged.version,
            "base_version": merged.base_version,
            "contributors": merge.contributors,
            "codec": settings.codec_down,
            "digest": merged.digest,
        }
        updates = [Update(**header, **part) for part in split(merged.payload)]
        for update in updates:
            self._parts.lines.send(update)
        served.remember(updates[0])

    def _source(
        self, served: Served, repair: Retransmission
    ) -> tuple[Callable[[dict[str, Any]], Chunked], memoryview] | None:
        """How to make the message of one chunk, and the whole payload; None where there is nothing to give."""
        state, p = served.state, repair.fragment
        if repair.what == "update":
            update, last = served.updates.get(p), state.last_update(p) if p < state.plan.P else None
            if update is None or last is None or last.version != update.version:
                return None
            return lambda part: Update(**{**vars(update), **part}), last.payload
        if repair.what == "initial" and p < state.plan.P:
            payload = self._parts.checkpoints.initial(p)
            version, sha = 0, digest(payload)
        else:
            version, payload, sha = state.keyframe(p)
        header: dict[str, Any] = {"run": self._run.settings.run, "epoch": self._run.epoch, "t": served.rounds.t}
        header |= {"fragment": p, "version": version, "digest": sha}
        return lambda part: Keyframe(**header, **part), payload


def merge_answers(served: Served, merge: Merge) -> MergeResult:
    """The fragment's next version from these answers, by their weights. Malformed if it is not finite."""
    weights = [token_weight(a.tokens, a.steps) for a in merge.answers]
    return served.state.merge(merge.call.fragment, [a.vector.delta for a in merge.answers], weights)


def book_merge(served: Served, merge: Merge, merged: MergeResult, now: float, seconds: float) -> None:
    """Everybody who keeps count learns of a merge that was published and took so many seconds."""
    rounds = served.rounds
    rounds.merged(merge, seconds, merged.digest)
    served.intake.forget_closed()
    for answer in merge.answers:
        served.screen.merged(merge.call.fragment, answer.vector.norm, answer.steps)
    count_merge(rounds, served.figures, merge, now, seconds)


def count_merge(rounds: Rounds, figures: RunMetrics, merge: Merge, now: float, seconds: float) -> None:
    """Add a merge that is booked to the run's figures."""
    figures.record_step(rounds.step(now), len(rounds.members.live()))
    figures.record_merge(
        now,
        contributors=len(merge.answers),
        live=rounds.may_answer(),
        typical_seconds=rounds.members.typical_step_seconds(),
        seconds=seconds,
    )
