"""Run status: read from Redis, and from the run's folder if that is on this machine."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..common.errors import DilocoError, SettingError
from ..common.printable import printable
from ..common.registry import list_runs, read_status
from ..common.run_folder import RunFolder, all_runs, find_run
from .run_figures import REPORTED_PART, run_figures

TRAINING = ("running", "draining", "stopping", "finished")
"""States in which Redis has the run's step and tokens."""
NOTES = 3
"""Number of notes on left-out values that are shown."""
RATE_SECONDS = 15.0
"""Window over which tokens per second and the time left are averaged."""

NO_REDIS = (
    "the step is that of the last checkpoint, because its syncer was not started by `diloco up`; "
    "to see more, start it with --redis URL and give the same URL here"
)
NO_SUMMARY = (
    "the step is that of the last checkpoint, because the run ended without a summary; "
    "continue it with `diloco up --resume {}`"
)


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run at one moment. Unknown values are None or empty."""

    run: str
    state: str
    t: int = 0
    steps: int = 0
    summary: Mapping[str, Any] = field(default_factory=dict)
    """As in summary.json."""
    learners: Sequence[Mapping[str, Any]] = ()
    """As in summary.json, and what matters only while they run."""
    evaluations: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    requested: Sequence[str] = ()
    faults: int = 0
    processes: Mapping[str, int] = field(default_factory=dict)
    """Name -> process id of the run's processes on this machine."""
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    trouble: str = ""
    """Why nothing new could be read (the other values are then older), or which values were left out."""

    @property
    def live(self) -> list[str]:
        return [row["name"] for row in self.learners if row.get("state") in ("live", "stalled")]

    @property
    def blocked(self) -> str:
        """Why the run makes no progress, and for how long; '' while it does."""
        why, seconds = self.summary.get("blocked"), self.summary.get("blocked_seconds") or 0
        return f"blocked for {seconds:.0f} s: {printable(str(why))}" if why else ""

    @property
    def rejected(self) -> dict[str, str]:
        """Learner -> why its messages are repeatedly rejected."""
        why = {row["name"]: row.get("rejected_reason") for row in self.learners}
        return {name: printable(str(reason)) for name, reason in sorted(why.items()) if reason}

    @property
    def saving(self) -> str:
        """Age of the newest checkpoint, and why there is no newer one; "" if neither is known."""
        saved_at, error = self.summary.get("saved_at"), self.summary.get("save_error")
        if not isinstance(saved_at, int | float):
            return f"no checkpoint yet, failing: {printable(str(error))}" if error else ""
        age = f"last checkpoint {max(0.0, time.time() - saved_at):.0f} s ago"
        return f"{age}, failing: {printable(str(error))}" if error else age

    @property
    def troubles(self) -> list[str]:
        """Problems to show: why nothing new could be read, why the run is blocked, why nothing is saved."""
        failing = self.saving if self.summary.get("save_error") else ""
        return [sentence for sentence in (self.trouble, self.blocked, failing) if sentence]

    @property
    def val_loss(self) -> float | None:
        """Nats per byte of the newest evaluation, small or full, on the part for reporting."""
        rows = [row for row in self.evaluations if row.get("part") == REPORTED_PART]
        return rows[-1]["val_loss"] if rows else None

    def figures(self) -> dict[str, Any]:
        """The output of `diloco status --json`: the keys of `diloco up --json`, the state, and process ids."""
        summary = {**self.summary, "run": self.run, "t": self.t, "learners": self.learners}
        requested = self.requested or [row["name"] for row in self.learners]
        figures = run_figures(summary, requested=requested, faults=self.faults, evaluations=self.evaluations)
        more = {
            "state": self.state,
            "steps_total": self.steps,
            "processes": dict(self.processes),
            "saved_at": self.summary.get("saved_at"),
            "save_error": self.summary.get("save_error") or "",
            "blocked": self.blocked,
            "rejected": self.rejected,
        }
        return figures | more | {"trouble": self.trouble} if self.trouble else figures | more


class RunSource:
    """The source of a run's status: Redis, the run's folder, or both. Keeps recent readings to compute rates."""

    def __init__(self, run: str, url: str, folder: RunFolder | None = None) -> None:
        self.run = run
        self._url = url
        self._folder = folder
        self._last = RunStatus(run=run, state="starting")
        self._seen: deque[tuple[float, int, int]] = deque()
        """(seconds, global step, tokens reported) of recent readings."""

    def read(self) -> RunStatus:
        """The current status; the last one, with `trouble` set, if Redis does not answer."""
        local = self._local()
        if self._folder is not None and not self._folder.is_up():
            return self._ended(local)
        try:
            stored = read_status(self._url, self.run)
        except DilocoError as error:
            return RunStatus(**{**vars(self._last), **local, "trouble": str(error)})
        self._last = self._from_redis(stored, local)
        return self._last

    def _local(self) -> dict[str, Any]:
        """The values read from the folder."""
        if self._folder is None:
            return {}
        run_map = self._folder.run_map()
        return {
            "evaluations": self._folder.evaluations(),
            "requested": run_map.get("learners_asked", []),
            "faults": run_map.get("faults", 0),
            "processes": run_map.get("processes", {}) if self._folder.is_up() else {},
        }

    def _from_redis(self, stored: Mapping[str, Any], local: Mapping[str, Any]) -> RunStatus:
        row, notes = stored["run"], stored["notes"]
        t, steps = _count(row, "step"), _count(row, "steps_total")
        learners = [
            {**learner, "name": name, "local_steps": _count(learner, "local_step")}
            for name, learner in stored["learners"].items()
        ]
        here = {
            row["name"]: row["pid"] for row in learners if row.get("host") == socket.gethostname() and row.get("pid")
        }
        rate, steps_per_second = None, None
        if row.get("state") in TRAINING:  # before that, even a resumed run is at step 0, and the jump distorts the rate
            seconds = float(row.get("seconds") or 0)
            rate, steps_per_second = self._rates(t, _count(row, "tokens_reported"), seconds)
        return RunStatus(
            run=self.run,
            state=row.get("state", "starting"),
            t=t,
            steps=steps,
            summary=row,
            learners=learners,
            events=stored["events"],
            tokens_per_second=rate,
            seconds_left=(steps - t) / steps_per_second if steps_per_second else None,
            trouble="; ".join([*notes[:NOTES], *([f"and {len(notes) - NOTES} more"] if len(notes) > NOTES else [])]),
            **{**local, "processes": _alive(here | dict(local.get("processes", {})))},
        )

    def _rates(self, t: int, tokens: int, seconds: float) -> tuple[float | None, float | None]:
        """(tokens, global steps) per second over RATE_SECONDS, or over the whole run at the first reading."""
        now = time.monotonic()
        self._seen.append((now, t, tokens))
        while len(self._seen) > 2 and now - self._seen[0][0] > RATE_SECONDS:
            self._seen.popleft()
        began, t_then, tokens_then = self._seen[0]
        if t <= t_then or tokens < tokens_then:
            return (tokens / seconds, t / seconds) if seconds and t else (None, None)
        return (tokens - tokens_then) / (now - began), (t - t_then) / (now - began)

    def _ended(self, local: Mapping[str, Any]) -> RunStatus:
        """The status from the folder of a run that is not up."""
        if self._folder is None:
            raise SettingError(f"nothing is known of run {self.run}")
        summary, served = self._folder.summary(), self._folder.is_served()
        if served or not summary:
            summary = {"t": self._folder.saved_step() or 0, "state": "running" if served else "stopped"}
            summary["saved_at"] = self._folder.saved_at()
        return RunStatus(
            run=self.run,
            state=summary.get("state", "stopped"),
            t=summary.get("t", 0),
            steps=summary.get("steps", self._folder.setup().settings.steps),
            summary=summary,
            learners=[{**row, "state": "left"} for row in summary.get("learners", [])],
            trouble="" if "merges" in summary else NO_REDIS if served else NO_SUMMARY.format(self._folder.name),
            **local,
        )


def find_source(run: str, redis: str | None) -> RunSource:
    """The source for `run`: a name, a folder, or '' for the run that is up here, otherwise the newest.

    SettingError if there is none.
    """
    if redis is not None:
        return RunSource(*_from_url(run, redis))
    if run:
        folder = find_run(run)
    else:
        up = [folder for folder in all_runs() if folder.is_up()]
        folder = up[-1] if up else find_run("")
    run_map, setup = folder.run_map(), folder.setup()
    url = str(run_map.get("redis", ""))
    if folder.is_up() and "***" in url:
        raise SettingError(f"the Redis of {folder.name} needs a password, which is not stored there; give --redis URL")
    return RunSource(setup.settings.run, url, folder)


def _from_url(run: str, redis: str) -> tuple[str, str]:
    names = list_runs(redis)
    if run and run in names:
        return run, redis
    if not run and len(names) == 1:
        return names[0], redis
    known = f"it has {', '.join(names[:10])}" if names else "it has none"
    raise SettingError(f"that Redis has no run {run!r}; {known}" if run else f"name one run of that Redis; {known}")


def _count(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    return max(0, value) if isinstance(value, int) else 0


def _alive(pids: Mapping[str, Any]) -> dict[str, int]:
    """The processes that exist on this machine now."""
    return {name: pid for name, pid in pids.items() if isinstance(pid, int) and 0 < pid < 2**31 and _exists(pid)}


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
