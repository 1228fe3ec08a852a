"""Which learners still have to confirm that they hold the final model. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

AWAITED = 1_000
"""So many names are awaited at the most: more than a run has learners, so that made-up ones take no memory."""


@dataclass
class Confirmations:
    """Learners that were live when the last calls of the run began, or came later. One that falls silent stays in the
    list until its Goodbye: it may be frozen, or cut off together with the broker.
    """

    asked_at: float = float("-inf")
    """When one of them last said Hello or fetched a piece of the model, on the real clock."""
    _missing: dict[str, None] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names that have not said goodbye yet, sorted."""
        return tuple(sorted(self._missing))

    def await_from(self, names: Iterable[str]) -> None:
        """These learners are live at the end of the run."""
        for name in names:
            if len(self._missing) < AWAITED:
                self._missing[name] = None

    def left(self, name: str) -> None:
        """A Goodbye came, of whatever incarnation of the name: the one before it is gone."""
        self._missing.pop(name, None)

    def asked(self, name: str, now: float) -> None:
        """A Hello or Fetch came: a learner that still fetches the final model is not silent."""
        if name in self._missing:
            self.asked_at = now
