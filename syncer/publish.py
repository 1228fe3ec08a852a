"""Publishing of updates: accepts answers, merges them, publishes the new version, and retransmits lost chunks."""

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
from .round_events import Merge
from .rounds import Rounds
from .run_metrics import RunMetrics
from .run_state import Components, RunState, TrainingState

GATHER_SECONDS = 0.1


@dataclass(frozen=True)
class Retransmission:
    """Chunks of a fragment to be sent: of its last update, its keyframe, or version 0."""

    what: str
    fragment: int
    chunks: tuple[int, ...]


@dataclass
class Retransmissions:
    """Requested chunks that were not sent yet. Requests are gathered for GATHER_SECONDS, so that several learners share
    one answer. Memory: one set of chunk numbers for each fragment and kind.
    """

    asked_at: float = float("-inf")
    """Time of the last Fetch."""
    due_at: float | None = None
    """Time at which the gathered requests are answered; None without any."""
    _wanted: dict[tuple[str, int], set[int]] = field(default_factory=dict)

    def ask(self, fetch: Fetch, now: float) -> None:
        self.asked_at = now
        self._wanted.setdefault((fetch.what, fetch.fragment), set()).update(fetch.chunks)
        if self.due_at is None:
            self.due_at = now + GATHER_SECONDS

    def due(self, now: float) -> list[Retransmission]:
        """The retransmissions due at `now`, each chunk once, ordered by kind and fragment."""
        if self.due_at is None or now < self.due_at:
            return []
        wanted, self._wanted, self.due_at = self._wanted, {}, None
        return [
            Retransmission(what, fragment, tuple(sorted(chunks))) for (what, fragment), chunks in sorted(wanted.items())
        ]


class Publisher:
    """Handles Delta and Fetch, and carries out merges."""

    def __init__(self, components: Components, run: RunState) -> None:
        self._components, self._run = components, run
        self.retransmissions = Retransmissions()

    def delta(self, delta: Delta, _now: float) -> None:
        """Take one chunk of an answer. Malformed with the reason if it is rejected."""
        training = self._run.training
        if training is None:
            raise Malformed("early", "the run has no version 0 yet")
        answer = training.delta_assembler.take(delta)
        if answer is None:
            return
        reason = training.rounds.answer(answer)
        if reason:
            raise Malformed(reason)
        member = training.rounds.members.get(answer.who)
        if member is not None:
            member.rejected_in_a_row = 0
        if training.rounds.counts(answer):
            self._run.rejections.accepted(answer.who, Delta.KIND)

    def merge(self, training: TrainingState, merge: Merge, now: float) -> tuple[Who, ...]:
        """Carry out a Merge and publish the new version. Returns the learners whose answers were not counted."""
        began, call, rounds, telemetry = time.perf_counter(), merge.call, training.rounds, self._components.telemetry
        try:
            merged = merge_answers(training, merge)
        except Malformed as wrong:
            telemetry.warn("merge_failed", fragment=call.fragment, slot=call.slot, detail=str(wrong))
            self._components.transport.send(rounds.wire_call(rounds.failed(merge, now).call))
            return ()
        t = rounds.step(now)
        self._publish(training, merge, merged, t)
        seconds = time.perf_counter() - began
        book_merge(training, merge, merged, now, seconds)
        telemetry.report_merge(training.model, merge, merged, t, seconds)
        for answer in merge.answers:
            self._run.rejections.accepted(answer.who, Delta.KIND)
        return tuple(a.who for a in merge.unreported)

    def fetch(self, fetch: Fetch, now: float) -> None:
        training = self._run.training
        if training is not None and fetch.epoch == self._run.epoch and fetch.fragment <= training.model.plan.P:
            self.retransmissions.ask(fetch, now)

    def retransmit(self, now: float) -> None:
        """Send the retransmissions that are due."""
        for retransmission in self.retransmissions.due(now):
            training = self._run.training
            try:
                source = self._source(training, retransmission) if training is not None else None
            except (Malformed, OSError) as wrong:  # version 0 cannot be read from the disk
                self._components.telemetry.warn(
                    "repair_failed", what=retransmission.what, fragment=retransmission.fragment, error=str(wrong)
                )
                continue
            if source is not None:
                make, payload = source
                for part in split(payload, retransmission.chunks):
                    self._components.transport.send(make(part))

    def _publish(self, training: TrainingState, merge: Merge, merged: MergeResult, t: int) -> None:
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
            self._components.transport.send(update)
        training.remember(updates[0])

    def _source(
        self, training: TrainingState, retransmission: Retransmission
    ) -> tuple[Callable[[dict[str, Any]], Chunked], memoryview] | None:
        """A function that makes the message of one chunk, and the whole payload; None if there is nothing to send."""
        state, p = training.model, retransmission.fragment
        if retransmission.what == "update":
            update, last = training.updates.get(p), state.last_update(p) if p < state.plan.P else None
            if update is None or last is None or last.version != update.version:
                return None
            return lambda part: Update(**{**vars(update), **part}), last.payload
        if retransmission.what == "initial" and p < state.plan.P:
            payload = self._components.checkpoints.initial(p)
            version, sha = 0, digest(payload)
        else:
            version, payload, sha = state.keyframe(p)
        header: dict[str, Any] = {"run": self._run.settings.run, "epoch": self._run.epoch, "t": training.rounds.t}
        header |= {"fragment": p, "version": version, "digest": sha}
        return lambda part: Keyframe(**header, **part), payload


def merge_answers(training: TrainingState, merge: Merge) -> MergeResult:
    """The fragment's next version from the weighted answers. Malformed if it is not finite."""
    weights = [token_weight(a.tokens, a.steps) for a in merge.answers]
    return training.model.merge(merge.call.fragment, [a.vector.delta for a in merge.answers], weights)


def book_merge(training: TrainingState, merge: Merge, merged: MergeResult, now: float, seconds: float) -> None:
    """Record a published merge, which took `seconds`, in rounds, norm filter and metrics."""
    rounds = training.rounds
    rounds.merged(merge, seconds, merged.digest)
    training.delta_assembler.forget_closed()
    for answer in merge.answers:
        training.norm_filter.merged(merge.call.fragment, answer.vector.norm, answer.steps)
    count_merge(rounds, training.metrics, merge, now, seconds)


def count_merge(rounds: Rounds, figures: RunMetrics, merge: Merge, now: float, seconds: float) -> None:
    """Add a recorded merge to the run's metrics."""
    figures.record_step(rounds.step(now), len(rounds.members.live()))
    figures.record_merge(
        now,
        contributors=len(merge.answers),
        live=rounds.may_answer(),
        typical_seconds=rounds.members.typical_step_seconds(),
        seconds=seconds,
    )
