"""Counters of a learner: inner steps and tokens, the adopted version of each fragment, and which calls it may answer.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..common.config import MAX_LAG
from ..common.wire import Call


@dataclass(frozen=True)
class Counts:
    """Inner steps and tokens since join, at one moment."""

    steps: int = 0
    tokens: int = 0


@dataclass
class FragmentCounters:
    """State of one fragment."""

    epoch: int = -1
    version: int = 0
    """Adopted, under `epoch`."""
    since: Counts = field(default_factory=Counts)
    """Start of the next delta's interval."""
    captured_steps: int = 0
    """The step counter at the last capture or adoption."""
    answered: tuple[int, int, int] = (-1, -1, -1)
    """(epoch, slot, attempt) of the last answered call."""


class Counters:
    """Counters since join, in total and for each fragment. Only the training thread uses it."""

    def __init__(self, me: tuple[str, int], fragments: int) -> None:
        self.me = me
        self.now = Counts()
        self.accounts = [FragmentCounters() for _ in range(fragments)]

    def count(self, tokens: int) -> None:
        """One inner step was made, on `tokens` tokens."""
        self.now = Counts(self.now.steps + 1, self.now.tokens + tokens)

    def adopted(self, fragment: int, epoch: int, version: int, since: Counts | None = None) -> None:
        """The fragment was written into the model. With `since`, progress from that capture on was kept."""
        account = self.accounts[fragment]
        account.epoch, account.version = epoch, version
        account.since = self.now if since is None else since
        account.captured_steps = self.now.steps

    def may_answer(self, call: Call) -> bool:
        """Whether to capture the fragment for this call now."""
        if call.fragment >= len(self.accounts):
            return False
        account = self.accounts[call.fragment]
        lag = call.version - account.version
        return (
            account.epoch == call.epoch
            and (call.epoch, call.slot, call.attempt) > account.answered
            and self.now.steps > account.captured_steps
            and self.now.tokens
            > account.since.tokens  # merges are weighted by tokens, so without tokens it has no weight
            and 0 <= lag <= MAX_LAG
            and not (lag and self.me in call.contributors)  # its own merged work would be counted twice
        )

    def captured(self, call: Call) -> tuple[Counts, Counts]:
        """The fragment is captured for `call`. Returns the interval [from, to) that the answer covers."""
        account = self.accounts[call.fragment]
        account.answered = (call.epoch, call.slot, call.attempt)
        account.captured_steps = self.now.steps
        return account.since, self.now

    def versions(self, epoch: int) -> tuple[int, ...]:
        """The adopted version of each fragment; 0 for one not adopted under this epoch yet."""
        return tuple(a.version if a.epoch == epoch else 0 for a in self.accounts)
