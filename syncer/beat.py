"""State of the run as the syncer publishes it each second: the Beat for processes, Redis for people."""

from __future__ import annotations

from ..common.config import SyncerConfig
from ..common.wire import Beat
from .run_state import Components, RunState
from .telemetry import run_figures


def beat_message(run: RunState, config: SyncerConfig, now: float) -> Beat:
    """The Beat at `now` (seconds of the syncer's steady clock)."""
    training, settings = run.training, run.settings
    return Beat(
        run=settings.run,
        epoch=run.epoch,
        state=run.phase,
        t=training.rounds.step(now) if training else 0,
        steps=settings.steps,
        step_seconds=training.rounds.members.typical_step_seconds() if training else 0.0,
        versions=tuple(training.model.versions) if training else (),
        calls=training.rounds.wire_calls() if training else (),
        settings=settings.to_map(),
        task=config.task.to_map() if config.task else {},
        fingerprint=training.model.plan.layout.fingerprint if training else "",
        data_hash=config.data_hash,
        model_hash=run.model_hash,
        buffer_source=run.buffers.source,
        buffers_held=run.buffers.held,
        syncer=run.number,
    )


def publish_status(components: Components, run: RunState, now: float, state: str | None = None) -> None:
    """Write the run and its learners to Redis; `state` replaces the run's phase."""
    telemetry, stall, writer = components.telemetry, run.stall_monitor, components.writer
    state = state or run.phase
    blocked = {"blocked": stall.text, "blocked_seconds": round(stall.seconds) if stall.text else ""}
    if run.training is None:
        telemetry.publish_waiting(run.settings, state, run.epoch, blocked)
        return
    rounds = run.training.rounds
    figures = run_figures(rounds, run.training.metrics, state, now)
    saving = {"saved_at": writer.saved_at and round(writer.saved_at, 3), "save_error": writer.last_error}
    telemetry.publish_run(figures | blocked | {"model_hash": run.model_hash} | saving)
    for member in rounds.forget_oldest():
        telemetry.registry.forget_learner(member.name)
    for member in rounds.members.by_name.values():
        reason = "" if member.state == "left" else run.rejections.repeated(member.who)
        telemetry.publish_learner(member, rounds, now, rejected_reason=reason)
