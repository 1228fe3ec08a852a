"""Final results of a run: exported model, summary.json, and warnings about learners and buffers that they lack."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ..common.fragments import TRAINABLE_DTYPES
from .final_confirmations import describe_missing
from .model_file import save_model
from .run_state import Components, RunState, TrainingState
from .telemetry import learner_rows, run_figures, write_summary


def export(components: Components, run: RunState, training: TrainingState, unconfirmed: Mapping[str, str]) -> None:
    """Write model.safetensors and summary.json into the run's folder. SettingError or OSError if that fails.

    unconfirmed: names of learners that did not confirm the final model, with the reason.
    """
    folder = components.config.directory.parent
    save_model(training.model, folder / "model.safetensors")
    state = run.phase if run.phase == "finished" else "stopped"
    summary = run_figures(training.rounds, training.metrics, state, components.clock.now()) | {
        "steps": run.settings.steps,
        "t": training.rounds.t,
        "model_hash": training.model.model_hash(),
        "learners": learner_rows(training.rounds),
        "rejected": components.telemetry.rejection_counts(),
        "messages_dropped": components.transport.dropped,
        "unconfirmed": unconfirmed,
        **_buffers_summary(training),
        "buffers_failed": run.buffers.failed,
        "messages_missed": components.transport.gaps,
        "syncer_bytes_up": components.transport.bytes_up,
        "syncer_bytes_down": components.transport.bytes_down,
    }
    write_summary(folder / "summary.json", summary)


def _buffers_summary(training: TrainingState) -> dict[str, Any]:
    """The learner whose static tensors the exported model has; None for those of version 0."""
    origin = training.model.static_origin
    names = origin.names if origin else ()
    return {"buffers_from": origin.learner if origin else None, "buffers": len(names), "buffers_first": names[:3]}


def warn_unconfirmed(components: Components, unconfirmed: Mapping[str, str]) -> None:
    """Log the learners that did not confirm the final model, and how they can still get it."""
    if not unconfirmed:
        return
    names, config = describe_missing(unconfirmed), components.config
    folder = shlex.quote(str(config.directory.parent))
    sentence = (
        f"{names} had not confirmed the final model when the syncer ended, which waits "
        f"{config.drain_seconds:g} s after the end or a learner's last Hello or Fetch, and "
        f"{config.drain_most_seconds:g} s at most; the model is saved, and "
        f"`diloco syncer --broker {config.broker} --dir {folder}` gives it to learners that still train"
    )
    components.telemetry.warn("unconfirmed", learners=names, count=len(unconfirmed), sentence=sentence)


def warn_buffers(components: Components, run: RunState, unconfirmed: Mapping[str, str]) -> None:
    """Log that the exported model has the buffers of version 0, if the learners trained with others."""
    state, buffers = run.training.model if run.training else None, run.buffers
    if state is None or state.static_origin is not None:
        return
    finished = run.phase == "finished"
    live = [s.name for s in state.plan.layout.static if s.kind == "buffer" and s.dtype in TRAINABLE_DTYPES]
    if (finished and (buffers.offered or (live and unconfirmed))) or (live and not finished):
        reason = _without_buffers(run) if finished else "the run was stopped"
        components.telemetry.warn(
            "buffers_of_version_0",
            sentence=f"model.safetensors has the buffers of version 0, because {reason}; their values from training "
            f"are in the learners alone (first of {len(live)}: {', '.join(live[:1]) or 'frozen parameters'})",
        )  # fmt: skip


def _without_buffers(run: RunState) -> str:
    if run.buffers.checking:
        return f"those of {run.buffers.checking.last.name} were not stored in time"
    failed = "; ".join(run.buffers.failed[:3])
    return f"no learner could give its own ({failed})" if failed else "no learner could give its own"
