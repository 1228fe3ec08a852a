"""Repeated rejections: counts rejected messages per sender and decides when to notify the sender. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..common.report_intervals import Repeats
from ..common.wire import MESSAGES
from .ledger import Who

REPEATED = 3
"""Rejections of one kind of message, with none of that kind accepted in between, that are no accident any more."""
APART_SECONDS = 1.0
"""Rejections closer together than this count once: the chunks of one answer, or a flood."""
NOTICE_SECONDS, LONGEST_NOTICE_SECONDS = 10.0, 640.0
"""Interval between two notices to one sender, initial and longest; doubled each time."""
SENDERS = 1000
"""Most senders remembered; the one that was rejected first is dropped first."""
MEANINGS = {
    "attempt": "a newer attempt had begun when it arrived; the network is slow, or the learner's steps are long",
    "duplicate": "the same answer was accepted before",
    "empty": "it covers 0 tokens or 0 steps, and session.step(tokens=...) must count what was trained on",
    "late": "its call was closed when it arrived",
    "overlap": "it covers work that was already merged",
    "stale": "it is based on a version that is no longer kept",
    "stranger": "its sender is not a member",
    "unreported": "it covers more tokens than its sender has reported",
}
"""Explanations of reasons that come without a detail."""


@dataclass
class Streak:
    """Rejections of one kind of message from one sender, since one of that kind was accepted."""

    kind: str
    sentence: str = ""
    """Why the last one was rejected."""
    times: int = 0
    _apart: int = 0
    _counted_at: float = float("-inf")

    @property
    def repeated(self) -> bool:
        """There were enough of them to report."""
        return self._apart >= REPEATED

    def add(self, sentence: str, now: float) -> None:
        self.times, self.sentence = self.times + 1, sentence
        if now - self._counted_at >= APART_SECONDS:
            self._apart, self._counted_at = self._apart + 1, now

    def __str__(self) -> str:
        return f"{self.kind} {self.sentence} ({self.times} in a row)"


@dataclass
class _Sender:
    streaks: dict[str, Streak] = field(default_factory=dict)
    """By kind of message."""
    notices: Repeats = field(default_factory=lambda: Repeats(NOTICE_SECONDS, LONGEST_NOTICE_SECONDS))


class Rejections:
    """Current streaks of rejections of each known sender. Memory is O(SENDERS)."""

    def __init__(self) -> None:
        self._senders: dict[Who, _Sender] = {}

    def rejected(self, who: Who, kind: str, sentence: str, now: float) -> str:
        """Count a rejection; returns the notice to send to its sender now, or ''."""
        sender = self._senders.setdefault(who, _Sender())
        streak = sender.streaks.setdefault(kind, Streak(kind))
        streak.add(sentence, now)
        while len(self._senders) > SENDERS:
            del self._senders[next(iter(self._senders))]
        return str(streak) if streak.repeated and sender.notices.due(now) else ""

    def accepted(self, who: Who, kind: str) -> None:
        """A message of this kind was accepted: its streak ends."""
        sender = self._senders.get(who)
        if sender is not None:
            sender.streaks.pop(kind, None)

    def of(self, who: Who, kind: str) -> Streak | None:
        """The current streak of this kind of message, if any."""
        sender = self._senders.get(who)
        return None if sender is None else sender.streaks.get(kind)

    def repeated(self, who: Who) -> str:
        """All repeated rejections of this sender as text; '' if there are none."""
        sender = self._senders.get(who)
        return "" if sender is None else "; ".join(str(s) for s in sender.streaks.values() if s.repeated)


def describe_rejection(reason: str, detail: str = "") -> str:
    """Why a message was rejected: the reason's keyword and its detail or explanation."""
    more = detail.removeprefix(reason).removeprefix(": ") or MEANINGS.get(reason, "")
    return f"{reason}: {more}" if more else reason


def sender_from_topic(topic: bytes) -> tuple[str, str]:
    """(name, kind) claimed by a topic; '?' where it has none or one that is not plausible."""
    parts = topic.decode("ascii", "replace").split("/")
    name = parts[-2][:40] if len(parts) > 3 and parts[-2].isprintable() else "?"
    return name, parts[1] if len(parts) > 1 and parts[1] in MESSAGES else "?"
