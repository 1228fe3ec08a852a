"""Where every reported token went: reported = merged + pending + lost, in integers, for every fragment.

Kept per (learner, incarnation, fragment) from the half-open intervals [from, to) of the learner's own cumulative
counter that each Delta states. An interval that begins before the end of the last merged one would count progress
twice and is refused; a gap between them is progress that an adoption overwrote, and is lost. Totals weight fragments
by their parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Who = tuple[str, int]
"""(name, incarnation)"""


FORGOTTEN = "(forgotten)"
"""No learner's name: under it stand together those that ended long ago and are listed no more."""


@dataclass(frozen=True)
class TokenAccount:
    """Tokens of one learner, or of all; exact sums over fragments, weighted by parameters, rounded to integers."""

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
class _Book:
    """One incarnation: `mark[p]` is the end of its last merged interval, what lies before is merged or lost."""

    reported: int = 0
    mark: list[int] = field(default_factory=list)
    merged: list[int] = field(default_factory=list)


class Ledger:
    """The books of all learners that are here, and one closed sum per name for those that ended.

    `parameters` are the fragments' sizes: the weights of the totals. Memory is O(names x fragments), whatever the
    number of restarts; and there are only so many names, if those that are gone are forgotten.
    """

    def __init__(self, parameters: Sequence[int]) -> None:
        self._parameters = list(parameters)
        self._books: dict[Who, _Book] = {}
        self._closed: dict[str, TokenAccount] = {}

    def report(self, who: Who, tokens: int) -> None:
        """The learner says it has worked through `tokens` since its start; less than before changes nothing."""
        book = self._book(who)
        book.reported = max(book.reported, tokens)

    def reported(self, who: Who) -> int:
        return self._books[who].reported if who in self._books else 0

    def accepts(self, who: Who, fragment: int, tokens_from: int) -> bool:
        """False if an interval from there would meet one already merged."""
        return who not in self._books or tokens_from >= self._books[who].mark[fragment]

    def merge(self, who: Who, fragment: int, tokens_from: int, tokens_to: int) -> None:
        """Book [from, to) as merged and what lies between the last merged interval and it as lost."""
        if not self.accepts(who, fragment, tokens_from) or tokens_to < tokens_from:
            raise ValueError(f"[{tokens_from}, {tokens_to}) of {who} meets what is already merged")
        book = self._book(who)
        book.reported = max(book.reported, tokens_to)
        book.merged[fragment] += tokens_to - tokens_from
        book.mark[fragment] = tokens_to

    def close(self, who: Who) -> None:
        """This incarnation has ended: what is pending is lost, and its book becomes part of its name's closed sum."""
        if who in self._books:
            self._closed[who[0]] = self._closed.get(who[0], TokenAccount()) + self._sum(
                self._books.pop(who), ended=True
            )

    def forget(self, name: str) -> None:
        """Add what `name` did, all of whose books are closed, to what stands under FORGOTTEN."""
        if name in self._closed:
            self._closed[FORGOTTEN] = self._closed.get(FORGOTTEN, TokenAccount()) + self._closed.pop(name)

    def close_all(self) -> None:
        for who in list(self._books):
            self.close(who)

    def pending(self, who: Who, fragment: int) -> int:
        """Tokens reported after the fragment's last merged interval: still able to be merged."""
        book = self._book(who)
        return book.reported - book.mark[fragment]

    def account(self, name: str) -> TokenAccount:
        """All incarnations of `name` together."""
        return sum(
            (self._sum(b) for w, b in self._books.items() if w[0] == name), self._closed.get(name, TokenAccount())
        )

    def total(self) -> TokenAccount:
        return sum((*self._closed.values(), *(self._sum(book) for book in self._books.values())), TokenAccount())

    def names(self) -> Iterator[str]:
        return iter(sorted({who[0] for who in self._books} | self._closed.keys()))

    def open_incarnations(self, name: str) -> Iterator[Who]:
        """Incarnations of `name` that were not closed."""
        return (who for who in self._books if who[0] == name)

    def to_json(self) -> dict[str, Any]:
        return {
            "books": [[*who, b.reported, b.mark, b.merged] for who, b in sorted(self._books.items())],
            "closed": {n: [a.reported, a.merged, a.pending, a.lost] for n, a in sorted(self._closed.items())},
        }

    def load_json(self, rows: dict[str, Any]) -> None:
        self._books = {(n, i): _Book(told, list(mark), list(merged)) for n, i, told, mark, merged in rows["books"]}
        self._closed = {name: TokenAccount(*row) for name, row in rows["closed"].items()}

    def _book(self, who: Who) -> _Book:
        if who not in self._books:
            P = len(self._parameters)
            self._books[who] = _Book(0, [0] * P, [0] * P)
        return self._books[who]

    def _sum(self, book: _Book, *, ended: bool = False) -> TokenAccount:
        weights, whole = self._parameters, sum(self._parameters)
        merged = sum(n * m for n, m in zip(weights, book.merged, strict=True)) // whole
        waiting = sum(n * (book.reported - m) for n, m in zip(weights, book.mark, strict=True)) // whole
        pending = 0 if ended else waiting
        return TokenAccount(book.reported, merged, pending, book.reported - merged - pending)
