"""State of the run as the syncer publishes it each second: the Beat for processes, Redis for people."""

from __future__ import annotations

from ..common.config import SyncerConfig
from ..common.wire import Beat
from .run_state import Components, RunState
from .telemetry import run_figures


def beat_message(run: RunState, config: SyncerConfig, now: float) -> Beat:
    """The Beat at `now` (seconds of the syncer's steady clock)."""
    served, settings = run.served, run.settings
    return Beat(
        run=settings.run,
        epoch=run.epoch,
        state=run.phase,
        t=served.rounds.step(now) if served else 0,
        steps=settings.steps,
        step_seconds=served.rounds.members.typical_step_seconds() if served else 0.0,
        versions=tuple(served.state.versions) if served else (),
        calls=served.rounds.wire_calls() if served else (),
        settings=settings.to_map(),
        task=config.task.to_map() if config.task else {},
        fingerprint=served.state.plan.layout.fingerprint if served else "",
        data_hash=config.data_hash,
        model_hash=run.model_hash,
        buffer_source=run.buffers.source,
        buffers_held=run.buffers.held,
        syncer=run.number,
    )


def publish_status(parts: Components, run: RunState, now: float, state: str | None = None) -> None:
    """Write the run and its learners to Redis; `state` replaces the run's phase."""
    telemetry, stall, writer = parts.telemetry, run.block, parts.writer
    state = state or run.phase
    blocked = {"blocked": stall.text, "blocked_seconds": round(stall.seconds) if stall.text else ""}
    if run.served is None:
        telemetry.publish_waiting(run.settings, state, run.epoch, blocked)
        return
    rounds = run.served.rounds
    figures = run_figures(rounds, run.served.figures, state, now)
    saving = {"saved_at": writer.saved_at and round(writer.saved_at, 3), "save_error": writer.last_error}
    telemetry.publish_run(figures | blocked | {"model_hash": run.model_hash} | saving)
    for member in rounds.forget_oldest():
        telemetry.registry.forget_learner(member.name)
    for member in rounds.members.by_name.values():
        reason = "" if member.state == "left" else run.rejections.repeated(member.who)
        telemetry.publish_learner(member, rounds, now, rejected_reason=reason)
