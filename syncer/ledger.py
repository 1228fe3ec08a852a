"""Ledger of tokens: reported = merged + pending + lost, in integers, for every fragment.

Kept per (learner, incarnation, fragment) from the half-open interval [from, to) of the learner's cumulative counter in
each Delta. An interval that begins before the end of the last merged one would count progress twice and is rejected; a
gap between them is progress that an adoption overwrote, and is lost. Totals weight fragments by their parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Who = tuple[str, int]
"""(name, incarnation)"""


FORGOTTEN = "(forgotten)"
"""Not a valid learner name: the key for the sum of all learners that ended long ago and are no longer listed."""


@dataclass(frozen=True)
class TokenAccount:
    """Tokens of one learner, or of all: sums over fragments, weighted by parameters, rounded to integers."""

    reported: int = 0
    merged: int = 0
    pending: int = 0
    lost: int = 0

    def __add__(self, other: TokenAccount) -> TokenAccount:
        return TokenAccount(
            self.reported + other.reported,
            self.merged + other.merged,
            self.pending + other.pending,
            self.lost + other.lost,
        )


@dataclass
class _TokenCounters:
    """One incarnation. `mark[p]` is the end of its last merged interval: tokens before it are merged or lost."""

    reported: int = 0
    mark: list[int] = field(default_factory=list)
    merged: list[int] = field(default_factory=list)


class Ledger:
    """Token counters of all current incarnations, and one closed sum per name for those that ended.

    `parameters` are the fragments' sizes: the weights of the totals. Memory is O(names x fragments), whatever the
    number of restarts; `forget` bounds the number of names.
    """

    def __init__(self, parameters: Sequence[int]) -> None:
        self._parameters = list(parameters)
        self._open: dict[Who, _TokenCounters] = {}
        self._closed: dict[str, TokenAccount] = {}

    def report(self, who: Who, tokens: int) -> None:
        """The learner reports `tokens` processed since its start; less than before changes nothing."""
        counters = self._counters(who)
        counters.reported = max(counters.reported, tokens)

    def reported(self, who: Who) -> int:
        return self._open[who].reported if who in self._open else 0

    def accepts(self, who: Who, fragment: int, tokens_from: int) -> bool:
        """False if an interval starting at `tokens_from` would overlap one already merged."""
        return who not in self._open or tokens_from >= self._open[who].mark[fragment]

    def merge(self, who: Who, fragment: int, tokens_from: int, tokens_to: int) -> None:
        """Count [from, to) as merged and the gap after the last merged interval as lost."""
        if not self.accepts(who, fragment, tokens_from) or tokens_to < tokens_from:
            raise ValueError(f"[{tokens_from}, {tokens_to}) of {who} overlaps what is already merged")
        counters = self._counters(who)
        counters.reported = max(counters.reported, tokens_to)
        counters.merged[fragment] += tokens_to - tokens_from
        counters.mark[fragment] = tokens_to

    def close(self, who: Who) -> None:
        """This incarnation has ended: its pending tokens are lost, and its counters join its name's closed sum."""
        if who in self._open:
            self._closed[who[0]] = self._closed.get(who[0], TokenAccount()) + self._sum(self._open.pop(who), ended=True)

    def forget(self, name: str) -> None:
        """Move the closed sum of `name`, which has no open incarnation, to FORGOTTEN."""
        if name in self._closed:
            self._closed[FORGOTTEN] = self._closed.get(FORGOTTEN, TokenAccount()) + self._closed.pop(name)

    def close_all(self) -> None:
        for who in list(self._open):
            self.close(who)

    def pending(self, who: Who, fragment: int) -> int:
        """Tokens reported after the fragment's last merged interval, which can still be merged."""
        counters = self._counters(who)
        return counters.reported - counters.mark[fragment]

    def account(self, name: str) -> TokenAccount:
        """All incarnations of `name` together."""
        return sum(
            (self._sum(b) for w, b in self._open.items() if w[0] == name), self._closed.get(name, TokenAccount())
        )

    def total(self) -> TokenAccount:
        return sum((*self._closed.values(), *(self._sum(counters) for counters in self._open.values())), TokenAccount())

    def names(self) -> Iterator[str]:
        return iter(sorted({who[0] for who in self._open} | self._closed.keys()))

    def open_incarnations(self, name: str) -> Iterator[Who]:
        """Incarnations of `name` that were not closed."""
        return (who for who in self._open if who[0] == name)

    def to_json(self) -> dict[str, Any]:
        return {
            "books": [[*who, b.reported, b.mark, b.merged] for who, b in sorted(self._open.items())],
            "closed": {n: [a.reported, a.merged, a.pending, a.lost] for n, a in sorted(self._closed.items())},
        }

    def load_json(self, rows: dict[str, Any]) -> None:
        self._open = {
            (name, incarnation): _TokenCounters(reported, list(mark), list(merged))
            for name, incarnation, reported, mark, merged in rows["books"]
        }
        self._closed = {name: TokenAccount(*row) for name, row in rows["closed"].items()}

    def _counters(self, who: Who) -> _TokenCounters:
        if who not in self._open:
            P = len(self._parameters)
            self._open[who] = _TokenCounters(0, [0] * P, [0] * P)
        return self._open[who]

    def _sum(self, counters: _TokenCounters, *, ended: bool = False) -> TokenAccount:
        weights, whole = self._parameters, sum(self._parameters)
        merged = sum(n * m for n, m in zip(weights, counters.merged, strict=True)) // whole
        waiting = sum(n * (counters.reported - m) for n, m in zip(weights, counters.mark, strict=True)) // whole
        pending = 0 if ended else waiting
        return TokenAccount(counters.reported, merged, pending, counters.reported - merged - pending)
