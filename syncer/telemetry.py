"""Telemetry: publishes run status to Redis, the log and summary.json. Makes no decisions."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.config import RunSettings
from ..common.registry import Registry
from ..common.report_intervals import Repeats

if TYPE_CHECKING:  # the syncer reports events before it has loaded torch
    from .global_model import GlobalModel, MergeResult
    from .membership import Member
    from .round_events import Merge
    from .rounds import Rounds
    from .run_metrics import RunMetrics

REJECT_LOG_SECONDS = 1.0
"""Initial interval between log lines on the same rejection of the same learner; it doubles. All are counted."""


class Telemetry:
    """Writes to the registry and the log, with the same fields."""

    def __init__(self, registry: Registry, log: Any, run: str) -> None:
        self.registry, self.log, self._run = registry, log, run
        self.rejected: Counter[tuple[str, str]] = Counter()
        self._reports: defaultdict[tuple[str, str], Repeats] = defaultdict(lambda: Repeats(REJECT_LOG_SECONDS))
        self._began_at = time.time()

    def event(self, kind: str, /, **fields: Any) -> None:
        """One event: a log line and an entry of the Redis stream."""
        self.log.info(kind, **fields)
        self.registry.event(kind, **fields)

    def warn(self, kind: str, /, **fields: Any) -> None:
        self.log.warning(kind, **fields)
        self.registry.event(kind, **fields)

    def reject(self, learner: str, reason: str, **fields: Any) -> None:
        """Count a rejected message and log it, at increasing intervals for the same reason."""
        key, now = (learner, reason), time.monotonic()
        if len(self.rejected) > 10_000:  # invented names must not fill memory
            self.rejected.clear()
            self._reports.clear()
        self.rejected[key] += 1
        if self._reports[key].due(now):
            self.warn("rejected", learner=learner, reason=reason, times=self.rejected[key], **fields)

    def report_merge(self, model: GlobalModel, merge: Merge, merged: MergeResult, t: int, seconds: float) -> None:
        fragment = model.plan.fragments[merge.call.fragment]
        names = [a.who[0] for a in merge.answers]
        self.event(
            "merged", fragment=fragment.index, version=merged.version, slot=merge.call.slot, step=t,
            contributors=len(names), learners=",".join(names[:16]), attempt=merge.call.attempt,
            tokens=sum(a.tokens for a in merge.answers), seconds=round(seconds, 6),
        )  # fmt: skip
        self.registry.publish_fragment(
            fragment.index, version=merged.version, step=t, contributors=len(names),
            tokens=sum(a.tokens for a in merge.answers), delta_norm=merged.delta_norm,
            bytes=len(merged.payload), merged_at=round(time.time(), 3), parameters=fragment.parameters,
        )  # fmt: skip

    def publish_fragments(self, model: GlobalModel, t: int) -> None:
        """All fragments, after a start or a resume."""
        for f in model.plan.fragments:
            self.registry.publish_fragment(
                f.index, version=model.versions[f.index], step=t, contributors=0, tokens=0, delta_norm=0.0,
                bytes=0, merged_at=0, parameters=f.parameters,
            )  # fmt: skip

    def publish_waiting(self, settings: RunSettings, phase: str, epoch: int, block: Mapping[str, Any]) -> None:
        """The status of a run that has no version 0 yet."""
        self.publish_run({"run": settings.run, "state": phase, "epoch": epoch, "step": 0, "steps_total": settings.steps,
                  "quorum": settings.quorum, "learners_live": 0, **block})  # fmt: skip

    def rejection_counts(self) -> dict[str, int]:
        """Number of rejected messages, by `learner:reason`."""
        return {f"{name}:{reason}": times for (name, reason), times in sorted(self.rejected.items())}

    def publish_run(self, figures: Mapping[str, Any]) -> None:
        self.registry.publish_run(started_at=round(self._began_at, 3), **figures)

    def publish_learner(self, member: Member, rounds: Rounds, now: float, *, rejected_reason: str = "") -> None:
        """One learner's hash and its entry in the sorted set of learners."""
        alive, account, counters = (
            member.alive,
            rounds.ledger.account(member.name),
            rounds.members.counters.of(member.name),
        )
        seen = time.time() - (now - member.heard_at)
        self.registry.publish_learner(
            member.name, seen,
            incarnation=member.incarnation, state=member.state, host=member.host, device=member.device, pid=member.pid,
            local_step=counters["local_steps"], tokens_reported=account.reported,
            tokens_merged=account.merged, tokens_pending=account.pending, tokens_lost=account.lost,
            step_seconds=round(member.step_seconds, 6), loss="" if alive is None or alive.loss is None else alive.loss,
            joined_at=round(time.time() - (now - member.joined_at), 3), rejected=member.rejected,
            rejected_reason=rejected_reason,
            inner_seconds=round(counters["inner_seconds"], 3), session_seconds=round(counters["session_seconds"], 4),
            since_first_step_seconds=round(counters["since_first_step_seconds"], 3),
            bytes_up=counters["bytes_up"], bytes_down=counters["bytes_down"], gaps=counters["gaps"],
        )  # fmt: skip


def learner_rows(rounds: Rounds) -> list[dict[str, Any]]:
    """One row per learner name: the sum of all its incarnations."""
    rows = []
    for name in sorted({*rounds.ledger.names(), *rounds.members.by_name}):
        member, account = rounds.members.by_name.get(name), rounds.ledger.account(name)
        rows.append(
            {
                "name": name,
                "incarnation": member.incarnation if member else 0,
                "state": member.state if member else "gone",
                "tokens_reported": account.reported,
                "tokens_merged": account.merged,
                "tokens_pending": account.pending,
                "tokens_lost": account.lost,
                "rejected": member.rejected if member else 0,
                **rounds.members.counters.of(name),
            }
        )
    return rows


def run_figures(rounds: Rounds, figures: RunMetrics, state: str, now: float) -> dict[str, Any]:
    """The run's figures, as published in `dd:RUN:run` and summary.json."""
    total, t, settings = rounds.ledger.total(), rounds.step(now), rounds.settings
    live, able = len(rounds.members.live()), rounds.may_answer()
    counters = rounds.members.counters.total()
    return {
        "run": settings.run,
        "state": state,
        "epoch": rounds.epoch,
        "step": t,
        "steps_total": settings.steps,
        "cycles": rounds.schedule.cycle_of(rounds.slot),
        "quorum": settings.quorum,
        "quorum_state": f"{able} of {settings.quorum}" if able < settings.quorum else "met",
        "learners_live": live,
        "typical_step_seconds": round(rounds.members.typical_step_seconds(), 6),
        "calls_open": len(rounds.calls),
        "tokens_reported": total.reported,
        "tokens_merged": total.merged,
        "tokens_pending": total.pending,
        "tokens_lost": total.lost,
        "useful_share": round(total.merged / total.reported, 4) if total.reported else 0.0,
        "bytes_up": counters["bytes_up"],
        "bytes_down": counters["bytes_down"],
        **figures.to_summary(),
    }


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json atomically."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(summary, indent=1) + "\n")
    temporary.replace(path)
