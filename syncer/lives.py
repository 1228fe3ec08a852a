"""What each learner has done in all its lives: the last report of every incarnation of a name, added up. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..common.wire import Alive
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
"""Counters of an Alive, cumulative since its sender's own start."""
Sums = dict[str, Any]


@dataclass
class Lives:
    """One sum a name for incarnations that ended, and the last report of the one that is here. Memory is O(names)."""

    _ended: dict[str, Sums] = field(default_factory=dict)
    _present: dict[str, tuple[int, Sums]] = field(default_factory=dict)

    def report(self, alive: Alive) -> None:
        """The newest report of `alive.name`; of another incarnation than before: the one before has ended."""
        incarnation, before = self._present.get(alive.name, (alive.incarnation, _NOTHING))
        row = {name: getattr(alive, name) for name in SUMMED}
        if incarnation != alive.incarnation:
            self._ended[alive.name] = _added(self._ended.get(alive.name, _NOTHING), before)
        else:
            row["local_steps"] = max(row["local_steps"], before["local_steps"])
        self._present[alive.name] = (alive.incarnation, row)

    def reached(self, who: Who, local_steps: int) -> None:
        """An answer of `who` says how many steps it has made: more, perhaps, than its last report did."""
        incarnation, row = self._present.get(who[0], (None, _NOTHING))
        if incarnation == who[1]:
            row["local_steps"] = max(row["local_steps"], local_steps)

    def forget(self, name: str) -> None:
        """Add what `name` did to what stands under FORGOTTEN."""
        self._ended[FORGOTTEN] = _added(self.of(FORGOTTEN), self.of(name))
        self._ended.pop(name, None)
        self._present.pop(name, None)

    def of(self, name: str) -> Sums:
        """All incarnations of `name` together."""
        return _added(self._ended.get(name, _NOTHING), self._present.get(name, (0, _NOTHING))[1])

    def total(self) -> Sums:
        """All learners together."""
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
