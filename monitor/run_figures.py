"""Run figures of `diloco up --json` and `diloco status --json`; README.md defines them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

SYNCER_FIGURES = ("run", "cycles", "merges", "tokens_reported", "tokens_merged", "tokens_pending", "tokens_lost",
                  "uptime", "merge_participation", "useful_share", "bytes_f32_allreduce", "model_hash",
                  "seconds")  # fmt: skip
"""Figures copied from the syncer's summary."""
REPORTED_PART = "B"
"""The held-out part for reporting."""


def run_figures(
    summary: Mapping[str, Any], *, requested: Collection[str], faults: int, evaluations: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The figures from the syncer's `summary` (or the same fields of a running run). Unknown figures are None.

    `requested`: names of the learners that `up` was asked to start; only their work counts for goodput.
    """
    rows = list(summary.get("learners", ()))
    seconds = summary.get("seconds")
    first, last = validation(evaluations)
    figures = {name: summary.get(name) for name in SYNCER_FIGURES}
    inner = _sum((row for row in rows if row["name"] in requested), "inner_seconds")
    return figures | {
        "steps": summary.get("t"),
        "learners": [_learner(name, [row for row in rows if row["name"] == name]) for name in _names(rows)],
        "val_loss_first": first,
        "val_loss_last": last,
        "faults": faults,
        "goodput": _share(inner, len(requested) * seconds) if seconds else None,
        "stall_share": _share(_sum(rows, "session_seconds"), _sum(rows, "since_first_step_seconds")),
        "bytes_up": _sum(rows, "bytes_up") if rows else None,
        "bytes_down": _sum(rows, "bytes_down") if rows else None,
    }


def validation(evaluations: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Nats per byte of the global model (at version 0, now), from full evaluations if there are any."""
    reported = [row for row in evaluations if row.get("part") == REPORTED_PART] or evaluations
    full = [row for row in reported if row.get("size") == "full"]
    first = next((row["val_loss"] for row in full if row.get("t") == 0), None)
    later = [row for row in full if row.get("t", 0) > 0] or [row for row in evaluations if row.get("t", 0) > 0]
    return first, later[-1]["val_loss"] if later else first


def _learner(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One learner: the sum of its incarnations."""
    return {
        "name": name,
        "local_steps": _sum(rows, "local_steps"),
        "tokens_reported": _sum(rows, "tokens_reported"),
        "tokens_merged": _sum(rows, "tokens_merged"),
        "stall_share": _share(_sum(rows, "session_seconds"), _sum(rows, "since_first_step_seconds")),
    }


def _names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted({row["name"] for row in rows})


def _sum(rows: Iterable[Mapping[str, Any]], name: str) -> Any:
    return sum(row.get(name) or 0 for row in rows)


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None
