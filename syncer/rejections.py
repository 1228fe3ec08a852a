"""Messages that are rejected again and again: whose they are, why, and when their sender has to hear of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..common.silence import Repeats
from ..common.wire import MESSAGES
from .ledger import Who

AGAIN = 3
"""So many rejections of one kind of message, with none of that kind taken in between, are no accident any more."""
APART_SECONDS = 1.0
"""Rejections that follow one another sooner count once: the chunks of one answer, or a flood."""
NOTICE_SECONDS, LONGEST_NOTICE_SECONDS = 10.0, 640.0
"""Between two notices to one sender, at first and at the most; doubled each time."""
SENDERS = 1000
"""So many senders are remembered; the one that was rejected first is forgotten first."""
MEANINGS = {
    "attempt": "a newer attempt had begun when it came; it is too long under way, or its steps are long",
    "duplicate": "the same was taken already",
    "empty": "it covers 0 tokens or 0 steps, and session.step(tokens=...) must count what was trained on",
    "late": "its call was closed when it came",
    "overlap": "it covers work that was merged already",
    "stale": "it is measured from a version long gone",
    "stranger": "its sender is no member",
    "unreported": "it covers more tokens than its sender has reported",
}
"""Of reasons that come without a detail."""


@dataclass
class Streak:
    """Rejections of one kind of message of one sender, since one of that kind was taken."""

    kind: str
    sentence: str = ""
    """Why the last one was rejected."""
    times: int = 0
    _apart: int = 0
    _counted_at: float = float("-inf")

    @property
    def again(self) -> bool:
        """It happens again and again."""
        return self._apart >= AGAIN

    def take(self, sentence: str, now: float) -> None:
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
    """Of each sender that is known, what is rejected at present. Memory is O(SENDERS)."""

    def __init__(self) -> None:
        self._senders: dict[Who, _Sender] = {}

    def rejected(self, who: Who, kind: str, sentence: str, now: float) -> str:
        """Count it; what the sender has to hear of it now, '' where that is nothing."""
        sender = self._senders.setdefault(who, _Sender())
        streak = sender.streaks.setdefault(kind, Streak(kind))
        streak.take(sentence, now)
        while len(self._senders) > SENDERS:
            del self._senders[next(iter(self._senders))]
        return str(streak) if streak.again and sender.notices.due(now) else ""

    def accepted(self, who: Who, kind: str) -> None:
        """A message of this kind was as it should be."""
        sender = self._senders.get(who)
        if sender is not None:
            sender.streaks.pop(kind, None)

    def of(self, who: Who, kind: str) -> Streak | None:
        """What is rejected at present of this kind."""
        sender = self._senders.get(who)
        return None if sender is None else sender.streaks.get(kind)

    def repeated(self, who: Who) -> str:
        """What is rejected again and again of this sender, in words; '' where nothing is."""
        sender = self._senders.get(who)
        return "" if sender is None else "; ".join(str(s) for s in sender.streaks.values() if s.again)


def describe_rejection(reason: str, detail: str = "") -> str:
    """Why a message was rejected: the reason's word, and what is known beside it."""
    more = detail.removeprefix(reason).removeprefix(": ") or MEANINGS.get(reason, "")
    return f"{reason}: {more}" if more else reason


def sender_from_topic(topic: bytes) -> tuple[str, str]:
    """(name, kind) as a topic has them, as far as they can be believed; '?' where it has none."""
    parts = topic.decode("ascii", "replace").split("/")
    name = parts[-2][:40] if len(parts) > 3 and parts[-2].isprintable() else "?"
    return name, parts[1] if len(parts) > 1 and parts[1] in MESSAGES else "?"
