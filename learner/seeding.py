"""Giving version 0: the one learner that the syncer chose sends its model, and again what did not arrive. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from ..common.codec import digest
from ..common.errors import Malformed
from ..common.fragments import Fragment, Plan
from ..common.wire import Seed, split
from .identity import Identity

SEED_PATIENCE = 3
"""So many answers in a row that name the same fragments as missing, and these are sent again."""


class SeedSource(Protocol):
    """A model that does not train yet."""

    def vector(self, fragment: Fragment) -> Tensor:
        """Flat f32 in host memory."""
        ...

    def static_bytes(self) -> bytes: ...


class Seeding:
    """What is to be sent of version 0. `source` is None where nothing can be given (an observer)."""

    def __init__(self, me: Identity, source: Callable[[Plan], SeedSource] | None) -> None:
        self._me, self._source = me, source
        self._messages: Iterator[Seed] | None = None
        self._missing: tuple[int, ...] = ()
        self._repeats = 0

    @property
    def chosen(self) -> bool:
        """This learner was chosen."""
        return bool(self._missing)

    @property
    def sending(self) -> bool:
        return self._messages is not None

    def drop(self) -> None:
        """Another syncer process: it will choose anew."""
        self._messages, self._missing, self._repeats = None, (), 0

    def asked(self, plan: Plan, missing: tuple[int, ...], epoch: int) -> bool:
        """The syncer lacks these parts; True if they are sent now, False if they may be on their way still.

        Malformed if this process has nothing to give.
        """
        if self._source is None:
            raise Malformed("verdict", "an observer cannot give version 0")
        self._repeats = self._repeats + 1 if missing == self._missing else 0
        on_its_way = self.chosen and self._repeats < SEED_PATIENCE
        self._missing = missing
        if self.sending or on_its_way:
            return False
        self._repeats = 0
        self._messages = self._parts(self._source(plan), plan, missing, epoch)
        return True

    def next(self) -> Seed | None:
        """The next chunk to send; each fragment is copied out of the model only when its turn has come."""
        message = next(self._messages, None) if self._messages is not None else None
        if message is None:
            self._messages = None
        return message

    def _parts(self, source: SeedSource, plan: Plan, missing: Sequence[int], epoch: int) -> Iterator[Seed]:
        for index in missing:
            if index > plan.static_index:
                continue
            static = index == plan.static_index
            content = source.static_bytes() if static else source.vector(plan.fragments[index]).numpy().data.cast("B")
            told = digest(content)
            for part in split(content):
                yield Seed(
                    run=self._me.run, name=self._me.name, incarnation=self._me.incarnation, epoch=epoch,
                    fragment=index, digest=told, **part,
                )  # fmt: skip
