"""Final confirmations: which learners still have to confirm that they hold the final model. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .ledger import Who

MAX_EXPECTED = 1_000
"""Most names to wait for: more than a run has learners, so that invented names cannot fill the memory."""
NAMES = 8
"""Most learners named in one sentence."""
SILENT = "no goodbye"
OTHER_MODEL = "another final model"


@dataclass
class _Expected:
    incarnation: int
    departed: str = ""
    """Why it sent a Goodbye without holding the final model; '' while it may still confirm."""


@dataclass
class Confirmations:
    """Learners that were live when the last calls of the run began, or joined later. A silent one stays in the list
    until its Goodbye: it may be frozen, or disconnected together with the broker.
    """

    requested_at: float = float("-inf")
    """When one of them last sent a Hello or a Fetch, on the real clock."""
    _missing: dict[str, _Expected] = field(default_factory=dict)

    @property
    def pending(self) -> bool:
        """A learner may still confirm; one that left without the final model will not."""
        return any(not expected.departed for expected in self._missing.values())

    @property
    def missing(self) -> dict[str, str]:
        """Names that have not confirmed, sorted, and why: the reason in their Goodbye, or SILENT."""
        return {name: expected.departed or SILENT for name, expected in sorted(self._missing.items())}

    def expect(self, learners: Iterable[Who]) -> None:
        """Wait for these learners; each replaces an earlier incarnation of its name."""
        for name, incarnation in learners:
            known = self._missing.get(name)
            if known is None and len(self._missing) >= MAX_EXPECTED:
                continue
            if known is None or known.incarnation != incarnation:
                self._missing[name] = _Expected(incarnation)

    def record_goodbye(self, who: Who, reason: str, model_hash: str, final_hash: str) -> None:
        """A Goodbye arrived. It confirms if the expected incarnation finished with the final model; `final_hash` is ''
        before there is one.
        """
        expected = self._find(who)
        if expected is None:
            return
        if reason != "finished":
            expected.departed = reason
        elif not final_hash or model_hash != final_hash:
            expected.departed = OTHER_MODEL
        else:
            del self._missing[who[0]]

    def record_request(self, who: Who, now: float) -> None:
        """A Hello or Fetch arrived: a learner that still fetches the final model is not silent."""
        expected = self._find(who)
        if expected is not None:
            expected.departed = ""
            self.requested_at = now

    def timed_out(self, finished_at: float, now: float, *, wait_seconds: float, most_seconds: float) -> bool:
        """Whether to stop waiting: no request came for `wait_seconds`, or `most_seconds` have passed since the finish,
        whatever was requested.
        """
        return now - max(finished_at, self.requested_at) >= wait_seconds or now - finished_at >= most_seconds

    def _find(self, who: Who) -> _Expected | None:
        expected = self._missing.get(who[0])
        return expected if expected is not None and expected.incarnation == who[1] else None


def describe_missing(missing: Mapping[str, str]) -> str:
    """The first few learners that have not confirmed, with reasons, and the number of others."""
    names = [f"{name} ({reason})" for name, reason in list(missing.items())[:NAMES]]
    left = len(missing) - NAMES
    return ", ".join(names) + (f" and {left} more" if left > 0 else "")
