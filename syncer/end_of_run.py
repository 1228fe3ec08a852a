"""End of a run: the exported model, summary.json, and warnings about learners and buffers that it does not cover."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ..common.fragments import TRAINABLE_DTYPES
from .final_confirmations import describe_missing
from .model_file import save_model
from .run_state import Components, RunState, Served
from .telemetry import learner_rows, run_figures, write_summary


def export(parts: Components, run: RunState, served: Served, unconfirmed: Mapping[str, str]) -> None:
    """Write model.safetensors and summary.json into the run's folder. SettingError or OSError if that fails.

    unconfirmed: names of learners that did not confirm the final model, with the reason.
    """
    folder = parts.config.directory.parent
    save_model(served.state, folder / "model.safetensors")
    state = run.phase if run.phase == "finished" else "stopped"
    summary = run_figures(served.rounds, served.figures, state, parts.clock.now()) | {
        "steps": run.settings.steps,
        "t": served.rounds.t,
        "model_hash": served.state.model_hash(),
        "learners": learner_rows(served.rounds),
        "rejected": parts.telemetry.rejection_counts(),
        "messages_dropped": parts.transport.dropped,
        "unconfirmed": unconfirmed,
        **_buffers_summary(served),
        "buffers_failed": run.buffers.failed,
        "messages_missed": parts.transport.gaps,
        "syncer_bytes_up": parts.transport.bytes_up,
        "syncer_bytes_down": parts.transport.bytes_down,
    }
    write_summary(folder / "summary.json", summary)


def _buffers_summary(served: Served) -> dict[str, Any]:
    """The learner whose static tensors the exported model has; None for those of version 0."""
    origin = served.state.static_origin
    names = origin.names if origin else ()
    return {"buffers_from": origin.learner if origin else None, "buffers": len(names), "buffers_first": names[:3]}


def warn_unconfirmed(parts: Components, unconfirmed: Mapping[str, str]) -> None:
    """Log the learners that did not confirm the final model, and how they can still get it."""
    if not unconfirmed:
        return
    names, config = describe_missing(unconfirmed), parts.config
    folder = shlex.quote(str(config.directory.parent))
    sentence = (
        f"{names} had not confirmed the final model when the syncer ended, which waits "
        f"{config.drain_seconds:g} s after the end or a learner's last Hello or Fetch, and "
        f"{config.drain_most_seconds:g} s at most; the model is saved, and "
        f"`diloco syncer --broker {config.broker} --dir {folder}` gives it to learners that still train"
    )
    parts.telemetry.warn("unconfirmed", learners=names, count=len(unconfirmed), sentence=sentence)


def warn_buffers(parts: Components, run: RunState, unconfirmed: Mapping[str, str]) -> None:
    """Log that the exported model has the buffers of version 0, if the learners trained with others."""
    state, buffers = run.served.state if run.served else None, run.buffers
    if state is None or state.static_origin is not None:
        return
    finished = run.phase == "finished"
    live = [s.name for s in state.plan.layout.static if s.kind == "buffer" and s.dtype in TRAINABLE_DTYPES]
    if (finished and (buffers.offered or (live and unconfirmed))) or (live and not finished):
        reason = _without_buffers(run) if finished else "the run was stopped"
        parts.telemetry.warn(
            "buffers_of_version_0",
            sentence=f"model.safetensors has the buffers of version 0, because {reason}; their values from training "
            f"are in the learners alone (first of {len(live)}: {', '.join(live[:1]) or 'frozen parameters'})",
        )  # fmt: skip


def _without_buffers(run: RunState) -> str:
    if run.buffers.checking:
        return f"those of {run.buffers.checking.last.name} were not stored in time"
    failed = "; ".join(run.buffers.failed[:3])
    return f"no learner could give its own ({failed})" if failed else "no learner could give its own"
