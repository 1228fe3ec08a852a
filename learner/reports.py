"""What a learner tells about itself: Alive each second, Goodbye at the end. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..common.wire import Alive, Goodbye
from .books import Mark
from .desk import Counters
from .follower import Public
from .identity import Identity


@dataclass(frozen=True)
class Traffic:
    """What the sockets counted so far."""

    bytes_up: int = 0
    bytes_down: int = 0
    gaps: int = 0


def alive(
    me: Identity, epoch: int, counters: Counters | None, held: Sequence[Public | None], *, traffic: Traffic, now: float
) -> Alive:
    """The learner's own figures. counters: None while it has not joined yet; held: public fragments under `epoch`."""
    own = counters or Counters(versions=(0,) * len(held), versions_epoch=epoch, last_step_at=now, started_at=now)
    whole = [public for public in held if public is not None]
    whole = whole if len(whole) == len(held) else []
    return Alive(
        run=me.run, name=me.name, incarnation=me.incarnation, epoch=own.versions_epoch,
        local_steps=own.books.steps, tokens=own.books.tokens, step_seconds=own.step_seconds,
        last_step_age_seconds=max(0.0, now - own.last_step_at), inner_seconds=own.inner_seconds,
        session_seconds=own.session_seconds, since_first_step_seconds=max(0.0, now - own.started_at),
        loss=own.loss, versions=own.versions, digests=tuple(public.digest[:16] for public in whole),
        digest_versions=tuple(public.version for public in whole),
        bytes_up=traffic.bytes_up, bytes_down=traffic.bytes_down, gaps=traffic.gaps,
    )  # fmt: skip


def goodbye(me: Identity, reason: str, counters: Counters | None, model_hash: str) -> Goodbye:
    books = counters.books if counters is not None else Mark()
    return Goodbye(
        run=me.run, name=me.name, incarnation=me.incarnation, reason=reason,
        local_steps=books.steps, tokens=books.tokens, model_hash=model_hash,
    )  # fmt: skip
