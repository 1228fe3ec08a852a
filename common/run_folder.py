"""A run's folder, `runs/NAME/`: what lies where in it, and how it is read and written.

settings.json        the run's settings, its text's hash, and what `diloco up` was told (this file makes it a run)
run.json             ports, process ids and faults of the `diloco up` that is or was here
up.lock              held by that `diloco up` for as long as it lives
global/              the syncer's: version 0 and checkpoints
logs/NAME.jsonl      one JSON line an event; logs/NAME.err what the process wrote to stderr
evaluations.jsonl    the evaluator's: one line an evaluation
summary.json         the syncer's figures when it finished or stopped
model.safetensors, metrics.csv, loss.png     the results
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from .checkpoints import CHECKPOINT, saved_at
from .config import RunSettings, TaskSettings
from .errors import Malformed, SettingError
from .printable import printable

NUMBERS = ("t", "steps", "cycles", "merges", "seconds", "uptime", "merge_participation", "useful_share", "saved_at",
           "blocked_seconds", "tokens_reported", "tokens_merged", "tokens_pending", "tokens_lost", "bytes_up",
           "bytes_down", "bytes_f32_allreduce", "local_steps", "inner_seconds", "session_seconds",
           "since_first_step_seconds", "step_seconds", "loss")  # fmt: skip
"""In summary.json, of the run or of one learner."""
RUNS = Path("runs")
"""Where runs are made and looked for, under the working directory."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What settings.json holds."""

    settings: RunSettings
    task: TaskSettings | None
    """None where learners bring their own model."""
    data_hash: str = ""
    local: Mapping[str, Any] | None = None
    """What `diloco up` was told about this machine (number of learners, device, ...); None without `up`."""


@dataclass(frozen=True)
class RunFolder:
    """One run's folder; `path` is absolute."""

    path: Path

    @property
    def name(self) -> str:
        return shown(self.path)

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    def log(self, process: str) -> Path:
        return self.path / "logs" / f"{process}.jsonl"

    def stderr(self, process: str) -> Path:
        return self.path / "logs" / f"{process}.err"

    # --- settings.json -----------------------------------------------------------------------------------------------
    @staticmethod
    def create(path: Path, setup: Setup) -> RunFolder:
        """A new run's folder; SettingError if anything is there already, or if it cannot be written."""
        folder = RunFolder(path.absolute())
        if (folder.path / "settings.json").exists():
            raise SettingError(
                f"{folder.name} holds the run {folder.setup().settings.run!r} already; "
                f"go on with it by `diloco up --resume {folder.name}`, or choose another --run or --dir"
            )
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            if any(folder.path.iterdir()):
                raise SettingError(f"{folder.name} is not empty; choose a --dir that is, or that is not there yet")
            (folder.path / "logs").mkdir()
            folder.write_setup(setup)
        except OSError as wrong:
            raise SettingError(f"cannot write {folder.name}: {wrong.strerror}; choose another --dir") from wrong
        return folder

    @staticmethod
    def open(path: Path) -> RunFolder:
        """The folder of a run that is there; SettingError otherwise."""
        folder = RunFolder(path.absolute())
        if not (folder.path / "settings.json").is_file():
            raise SettingError(f"{folder.name} holds no run (there is no settings.json in it)")
        return folder

    def setup(self) -> Setup:
        """SettingError if settings.json is not what this version writes."""
        rows = self._read("settings.json")
        try:
            task = rows.get("task")
            return Setup(
                settings=RunSettings.from_map(rows["run"]),
                task=None if task is None else TaskSettings.from_map(task),
                data_hash=str(rows["data_hash"]),
                local=rows.get("local"),
            )
        except (KeyError, TypeError, AttributeError, Malformed) as wrong:
            raise SettingError(f"{self.name}/settings.json is not a run's settings ({wrong})") from wrong

    def write_setup(self, setup: Setup) -> None:
        rows = {
            "run": setup.settings.to_map(),
            "task": None if setup.task is None else setup.task.to_map(),
            "data_hash": setup.data_hash,
            "local": setup.local,
        }
        write_json(self.path / "settings.json", rows)

    def check_steps(self, steps: int) -> None:
        """SettingError if `steps` is fewer than the run has now."""
        setup = self.setup()
        if steps < setup.settings.steps:
            raise SettingError(
                f"--steps {steps} is below the {setup.settings.steps} that {self.name} has; it may only rise"
            )

    def raise_steps(self, steps: int) -> None:
        """Let the run go on to `steps` global steps; SettingError if that is fewer than it has now."""
        self.check_steps(steps)
        setup = self.setup()
        self.write_setup(replace(setup, settings=replace(setup.settings, steps=steps)))

    # --- what happened -----------------------------------------------------------------------------------------------
    def run_map(self) -> dict[str, Any]:
        """run.json; {} where no `diloco up` has been. SettingError if it is not what `diloco up` writes."""
        rows = self._read("run.json", missing={})
        kinds = {"faults": int, "learners_asked": list, "processes": dict, "redis": str, "pid": int}
        odd = [name for name, kind in kinds.items() if not isinstance(rows.get(name, kind()), kind)]
        if not odd and not all(isinstance(name, str) for name in rows.get("learners_asked", ())):
            odd = ["learners_asked"]
        self._check("run.json", odd)
        return rows

    def write_run_map(self, rows: Mapping[str, Any]) -> None:
        write_json(self.path / "run.json", rows)

    def summary(self) -> dict[str, Any]:
        """The syncer's figures of a run that finished or stopped; {} otherwise. SettingError if they are none."""
        rows = self._read("summary.json", missing={})
        learners = rows.get("learners", [])
        if not isinstance(learners, list):
            learners = [None]
        if not all(isinstance(row, dict) and isinstance(row.get("name"), str) for row in learners):
            self._check("summary.json", ["learners"])
        odd = [n for row in (rows, *learners) for n in NUMBERS if not isinstance(row.get(n), int | float | None)]
        odd += [name for name, kind in (("t", int), ("state", str)) if not isinstance(rows.get(name, kind()), kind)]
        self._check("summary.json", odd)
        return rows

    def saved_step(self) -> int | None:
        """The global step of the newest checkpoint, for runs that left no summary; None if there is none."""
        for path in sorted((self.path / "global").glob(f"{CHECKPOINT}*/state.json"), reverse=True):
            try:
                return int(json.loads(path.read_text("utf-8"))["bookkeeping"]["rounds"]["t"])
            except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue  # being written, or damaged: the syncer would take an older one, too
        return None

    def saved_at(self) -> float | None:
        """When the newest checkpoint was written, in unix seconds; None if there is none."""
        return saved_at(self.path / "global")

    def evaluations(self) -> list[dict[str, Any]]:
        """All evaluations so far, oldest first; a line that is none, or that is just being written, is left out."""
        try:
            lines = (self.path / "evaluations.jsonl").read_text("utf-8", "replace").splitlines()
        except FileNotFoundError:
            return []
        rows = []
        for line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue  # the last line, half written; the next reading has it
            numbers = ("t", "val_loss")
            if isinstance(row, dict) and all(isinstance(row.get(name), int | float) for name in numbers):
                rows.append(row)
        return rows

    def _read(self, name: str, missing: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            rows = json.loads((self.path / name).read_text("utf-8"))
        except FileNotFoundError:
            if missing is None:
                raise SettingError(f"{self.name} has no {name}") from None
            return missing
        except (OSError, ValueError, RecursionError) as wrong:
            raise SettingError(f"cannot read {self.name}/{name}: {wrong}") from wrong
        if not isinstance(rows, dict):
            raise SettingError(f"{self.name}/{name} is not a map")
        return rows

    def _check(self, name: str, odd: list[str]) -> None:
        if odd:
            raise SettingError(
                f"{self.name}/{name} is not what this version writes ({', '.join(sorted(set(odd)))}); "
                "put it back from a copy, or move it away"
            )

    # --- who is here -------------------------------------------------------------------------------------------------
    def lock(self) -> IO[bytes] | None:
        """The lock that one `diloco up` holds while it lives, as an open file; None if another process has it."""
        file = (self.path / "up.lock").open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return None
        return file

    def is_up(self) -> bool:
        """Does a `diloco up` run here now?"""
        return _is_locked(self.path / "up.lock")

    def is_served(self) -> bool:
        """Does a syncer run here now, of a `diloco up` or by itself?"""
        lock = self.path / "global" / "lock"
        try:
            os.kill(int(lock.read_text()), 0)  # looked at first: a syncer that starts must not find its lock probed
        except PermissionError:
            return _is_locked(lock)  # somebody else's
        except (OSError, ValueError):
            return False
        return _is_locked(lock)


def _is_locked(path: Path) -> bool:
    try:
        file = path.open("rb")
    except OSError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def find(run: str) -> RunFolder:
    """The folder of a run given by its path or by its name under `runs/`, '' for the newest; SettingError if there is
    none.
    """
    if not run:
        runs = all_runs()
        if not runs:
            raise SettingError(f"no run is under {RUNS}/ here; start one by `diloco up`, or name one by its folder")
        return runs[-1]
    for path in (Path(run), RUNS / run):
        if (path / "settings.json").is_file():
            return RunFolder.open(path)
    known = [folder.path.name for folder in all_runs()]
    there = f"; there are {', '.join(known[-5:])}" if known else ""
    raise SettingError(f"no run called {run!r} is in {RUNS}/ or at that path{there}")


def all_runs() -> list[RunFolder]:
    """Every run under `runs/`, the oldest first."""
    try:
        paths = [path for path in RUNS.iterdir() if (path / "settings.json").is_file()]
    except OSError:
        return []
    return [RunFolder(path.absolute()) for path in sorted(paths, key=lambda path: (path.stat().st_mtime, path.name))]


def shown(path: Path) -> str:
    """`path` as a person would type it (relative where that is shorter), printable whatever bytes it is made of."""
    path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return printable(str(path))


def write_json(path: Path, rows: Mapping[str, Any]) -> None:
    """`rows` at `path`: the old file or the new one, never half of one."""
    aside = path.with_name(path.name + ".new")
    with aside.open("w", encoding="utf-8") as file:
        json.dump(rows, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
