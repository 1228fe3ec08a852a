"""Alive and Goodbye messages of a learner: its report each second and at the end; the error text of an orphan. Pure.

A message with one figure out of range is rejected as a whole, and its sender is then considered lost. So every figure
is clamped to its range here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..common.config import LearnerConfig
from ..common.wire import GOODBYE_REASONS, MAX_COUNT, MAX_LOSS, MAX_SECONDS, Alive, Beat, Goodbye
from .counters import Counts
from .identity import Identity
from .mailbox import TrainingStatus
from .public_model import PublicFragment


@dataclass(frozen=True)
class ByteCounts:
    """Byte counts and gaps of the sockets so far."""

    bytes_up: int = 0
    bytes_down: int = 0
    gaps: int = 0


def alive(
    me: Identity,
    epoch: int,
    status: TrainingStatus | None,
    held: Sequence[PublicFragment | None],
    *,
    traffic: ByteCounts,
    now: float,
) -> Alive:
    """Alive with the learner's figures. status: None before it has joined. held: public fragments under `epoch`."""
    own = status or TrainingStatus(versions=(0,) * len(held), versions_epoch=epoch, last_step_at=now, started_at=now)
    whole = [public for public in held if public is not None]
    whole = whole if len(whole) == len(held) else []
    return Alive(
        run=me.run, name=me.name, incarnation=me.incarnation, epoch=_count(own.versions_epoch),
        local_steps=_count(own.counts.steps), tokens=_count(own.counts.tokens), step_seconds=_seconds(own.step_seconds),
        last_step_age_seconds=_seconds(now - own.last_step_at), inner_seconds=_seconds(own.inner_seconds),
        session_seconds=_seconds(own.session_seconds), since_first_step_seconds=_seconds(now - own.started_at),
        loss=_loss(own.loss), versions=own.versions, digests=tuple(public.digest[:16] for public in whole),
        digest_versions=tuple(public.version for public in whole), bytes_up=_count(traffic.bytes_up),
        bytes_down=_count(traffic.bytes_down), gaps=_count(traffic.gaps),
    )  # fmt: skip


def goodbye(
    me: Identity, reason: str, status: TrainingStatus | None, model_hash: str, buffers: int | None = 0
) -> Goodbye:
    """Goodbye with the last counters. A reason unknown to the protocol is sent as `stopped`."""
    counts = status.counts if status is not None else Counts()
    return Goodbye(
        run=me.run, name=me.name, incarnation=me.incarnation, model_hash=model_hash,
        reason=reason if reason in GOODBYE_REASONS else "stopped",
        local_steps=_count(counts.steps), tokens=_count(counts.tokens), buffers=buffers,
    )  # fmt: skip


def orphaned(config: LearnerConfig, beat: Beat, silent_seconds: float, refusal: str = "") -> str:
    """Error text of a learner that stops because nothing came since `beat`; if the run has probably finished meanwhile,
    it says how to get the final model.
    """
    sentence = f"{config.name} heard no beat of run {beat.run} for {config.orphan_timeout_seconds:g} s"
    if refusal:
        sentence += f": {refusal}"
    ahead = silent_seconds / beat.step_seconds if beat.step_seconds else 0.0
    if beat.state in ("draining", "finished") or (beat.state == "running" and beat.t + ahead >= beat.steps):
        sentence += (
            f"; the run was at step {beat.t} of {beat.steps} and has probably finished: its final model is "
            "model.safetensors in the folder of its syncer, which gives it to learners that are started again while "
            f"`diloco syncer --broker {config.broker} --dir FOLDER` runs there"
        )
    return sentence


def _count(value: int) -> int:
    return min(max(int(value), 0), MAX_COUNT)


def _seconds(value: float) -> float:
    """0 for an invalid duration: negative, because a clock went back, or not finite."""
    value = float(value)
    return min(max(value, 0.0), MAX_SECONDS) if math.isfinite(value) else 0.0


def _loss(value: float | None) -> float | None:
    """The loss, clamped to its range; None if there is none or it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return min(max(float(value), -MAX_LOSS), MAX_LOSS)
