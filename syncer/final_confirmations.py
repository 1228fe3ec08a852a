"""Which learners still have to confirm that they hold the final model, and how long they are waited for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .ledger import Who

AWAITED = 1_000
"""So many names are awaited at the most: more than a run has learners, so that made-up ones take no memory."""
NAMES = 8
"""So many learners are named in one sentence."""
SILENT = "no goodbye"
OTHER_MODEL = "another final model"


@dataclass
class _Awaited:
    incarnation: int
    departed: str = ""
    """Why it said goodbye without the final model; '' while it may still confirm."""


@dataclass
class Confirmations:
    """Learners that were live when the last calls of the run began, or came later. One that falls silent stays in the
    list until its Goodbye: it may be frozen, or cut off together with the broker.
    """

    asked_at: float = float("-inf")
    """When one of them last said Hello or fetched a piece of the model, on the real clock."""
    _missing: dict[str, _Awaited] = field(default_factory=dict)

    @property
    def pending(self) -> bool:
        """A learner may still confirm; one that left without the final model will not."""
        return any(not awaited.departed for awaited in self._missing.values())

    @property
    def missing(self) -> dict[str, str]:
        """Names that have not confirmed, sorted, and why: the reason of their Goodbye, or that none came."""
        return {name: awaited.departed or SILENT for name, awaited in sorted(self._missing.items())}

    def expect(self, learners: Iterable[Who]) -> None:
        """These learners hold their names at the end of the run; an earlier incarnation is awaited no more."""
        for name, incarnation in learners:
            known = self._missing.get(name)
            if known is None and len(self._missing) >= AWAITED:
                continue
            if known is None or known.incarnation != incarnation:
                self._missing[name] = _Awaited(incarnation)

    def record_goodbye(self, who: Who, reason: str, model_hash: str, final_hash: str) -> None:
        """A Goodbye came. It confirms if it is of the incarnation that is awaited, which has finished with the final
        model; `final_hash` is '' before there is one.
        """
        awaited = self._awaited(who)
        if awaited is None:
            return
        if reason != "finished":
            awaited.departed = reason
        elif not final_hash or model_hash != final_hash:
            awaited.departed = OTHER_MODEL
        else:
            del self._missing[who[0]]

    def record_request(self, who: Who, now: float) -> None:
        """A Hello or Fetch came: a learner that still fetches the final model is not silent."""
        awaited = self._awaited(who)
        if awaited is not None:
            awaited.departed = ""
            self.asked_at = now

    def timed_out(self, finished_at: float, now: float, *, wait_seconds: float, most_seconds: float) -> bool:
        """No learner is waited for any longer: none has asked for `wait_seconds`, or the end has lasted
        `most_seconds`, whatever they ask.
        """
        return now - max(finished_at, self.asked_at) >= wait_seconds or now - finished_at >= most_seconds

    def _awaited(self, who: Who) -> _Awaited | None:
        awaited = self._missing.get(who[0])
        return awaited if awaited is not None and awaited.incarnation == who[1] else None


def describe_missing(missing: Mapping[str, str]) -> str:
    """The first few learners that have not confirmed, each with the reason, and how many more there are."""
    names = [f"{name} ({reason})" for name, reason in list(missing.items())[:NAMES]]
    left = len(missing) - NAMES
    return ", ".join(names) + (f" and {left} more" if left > 0 else "")
