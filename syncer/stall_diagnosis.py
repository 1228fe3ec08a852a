"""Stall diagnosis: why a run makes no progress, as a sentence for users. Pure; no decision depends on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..common.config import BEAT_SECONDS
from ..common.report_intervals import Repeats
from .membership import Member
from .rejections import Rejections
from .round_events import OpenCall
from .rounds import Rounds, about_to_begin

SURE_SECONDS = 5.0
"""Minimum duration of a cause that blocks every round: learners that are started together do not join together."""
STALL_SECONDS = 30.0
"""The same if learners that are heard take no steps: they may be inside session.global_weights(), or saving."""
SEED_SECONDS = 30.0
"""The same if no part of version 0 arrives; over a slow link one takes a while."""
PATIENCE_SECONDS, PATIENCE_ROUNDS = 10.0, 4
"""The same if answers are missing that may still come: this many usual rounds, but at least this many seconds."""
REPEAT_SECONDS, LONGEST_REPEAT_SECONDS = 30.0, 600.0
"""Interval between reports of a run that stays blocked, initial and longest; doubled each time."""
NAMES = 8
"""Most learners named in one sentence."""


@dataclass(frozen=True)
class StallReason:
    """What the run is waiting for. The run is blocked if this lasts `patience_seconds` without a merge."""

    kind: Literal["broker", "seed", "quorum", "answers"]
    text: str
    patience_seconds: float


def stall_reason(rounds: Rounds, rejections: Rejections, now: float) -> StallReason | None:
    """What a seeded run is waiting for, other than time; None if nothing is wrong."""
    if rounds.paused or rounds.state == "drained":
        return None
    able, quorum = rounds.may_answer(), rounds.settings.quorum
    if able < quorum:
        live = rounds.members.live()
        if able + sum(about_to_begin(member, now) for member in live) >= quorum:
            return None
        stalled = sum(member.state == "stalled" for member in live)
        patience = STALL_SECONDS if able + stalled >= quorum else SURE_SECONDS
        return StallReason("quorum", _below_quorum(rounds, rejections, now), patience)
    calls = sorted(rounds.calls.values(), key=lambda call: call.slot)
    if not calls or any(call.quorum_at is not None for call in calls):
        return None
    usual = rounds.schedule.steps_between * rounds.members.typical_step_seconds() + rounds.attempt_seconds()
    patience = max(PATIENCE_SECONDS, PATIENCE_ROUNDS * usual)
    return StallReason("answers", _unanswered(rounds, rejections, calls[0]), patience)


def _below_quorum(rounds: Rounds, rejections: Rejections, now: float) -> str:
    able = {member.name for member in rounds.members.awaited()}
    count = f"{len(able)} of the {rounds.settings.quorum} learners that --quorum asks for can answer"
    others = [m for _, m in sorted(rounds.members.by_name.items()) if m.state != "left" and m.name not in able]
    return _listed(
        f"{count} ({_names(sorted(able))})" if able else count, (_absence(m, rejections, now) for m in others)
    )


def _absence(member: Member, rejections: Rejections, now: float) -> str:
    """Why no round waits for this learner."""
    last_step = member.alive.last_step_age_seconds if member.alive else 0.0
    if member.state == "lost":
        sentence = f"{member.name} has not been heard for {now - member.heard_at:.0f} s"
    elif member.state == "stalled":
        sentence = f"{member.name} has taken no step for {last_step + now - member.heard_at:.0f} s"
    else:
        sentence = f"{member.name} has not completed two steps since it joined {now - member.joined_at:.0f} s ago"
    rejected = rejections.of(member.who, "alive")
    return f"{sentence}, and what it reports is rejected, {rejected.sentence}" if rejected else sentence


def _unanswered(rounds: Rounds, rejections: Rejections, call: OpenCall) -> str:
    """The state of the answers to this call."""
    counted = {who for who, answer in call.answers.items() if rounds.counts(answer)}
    count = (
        f"fragment {call.fragment} has {len(counted)} of the {rounds.settings.quorum} answers that --quorum asks for, "
        f"at attempt {call.attempt}"
    )
    failed = [f"{call.failures} merges of it gave values that are not finite"] if call.failures else []
    alike: dict[str, list[str]] = {}
    for member in rounds.members.awaited():
        if member.who not in counted:
            alike.setdefault(_wrong(member, rejections, call), []).append(member.name)
    silent = alike.pop("", [])
    wrong = [f"those of {_names(names)} {sentence}" for sentence, names in alike.items()]
    return _listed(count, [*failed, *wrong, *([f"none of {_names(silent)}"] if silent else [])])


def _wrong(member: Member, rejections: Rejections, call: OpenCall) -> str:
    """Why the answers of this learner do not count, or would not; '' if it simply has not answered."""
    if member.alive is not None and member.alive.local_steps and not member.tokens:
        return "do not count, because 0 tokens are reported: session.step(tokens=...) must count what is trained on"
    if member.who in call.answers:
        return "cover more tokens than were reported"
    rejected = rejections.of(member.who, "delta")
    if rejected is None:
        return ""
    return f"are rejected, {rejected.sentence}"


def _listed(first: str, more: Iterable[str]) -> str:
    sentences = list(more)
    left = len(sentences) - NAMES
    return "; ".join([first, *sentences[:NAMES], *([f"and {left} more"] if left > 0 else [])])


def _names(names: Sequence[str]) -> str:
    left = len(names) - NAMES
    return ", ".join(names[:NAMES]) + (f" and {left} more" if left > 0 else "")


@dataclass(frozen=True)
class StallChange:
    """A change to report: the run is blocked (repeated while it stays so), or makes progress again."""

    kind: Literal["blocked", "unblocked"]
    seconds: float
    """How long there has been no progress."""
    text: str = ""


class StallMonitor:
    """Tracks whether the run makes progress, and when to report that. Updated once per beat."""

    def __init__(self) -> None:
        self.text = ""
        """Why the run makes no progress; '' while it does."""
        self.seconds = 0.0
        """How long that reason has lasted without a merge."""
        self._reason: StallReason | None = None
        self._progress: object = None
        self._updated_at: float | None = None
        self._reports: Repeats | None = None
        """On the scale of `seconds`; None while the run is not blocked."""

    def update(self, reason: StallReason | None, progress: object, real: float) -> StallChange | None:
        """Update with what the run is waiting for now; returns the change to report, if any.

        progress: any value that changes with the run's progress. real: seconds of a clock that never stops; a time in
        which this process was suspended counts as two beats.
        """
        passed = 0.0 if self._updated_at is None else min(real - self._updated_at, 2 * BEAT_SECONDS)
        moved, known = progress != self._progress, self._reason
        self._updated_at, self._progress, self._reason = real, progress, reason
        blocked, seconds = self._reports is not None, self.seconds + passed
        if moved:
            self.text, self.seconds, self._reports = "", 0.0, None
            return StallChange("unblocked", seconds) if blocked else None
        if not blocked and (reason is None or known is None or reason.kind != known.kind):
            self.seconds = 0.0
            return None
        self.seconds = seconds
        if reason is None or (not blocked and seconds < reason.patience_seconds):
            self.text = ""  # if the run was blocked, it is about to continue
            return None
        self.text = reason.text
        self._reports = self._reports or Repeats(REPEAT_SECONDS, LONGEST_REPEAT_SECONDS)
        return StallChange("blocked", seconds, reason.text) if self._reports.due(seconds) else None
