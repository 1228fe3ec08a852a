"""A run's folder, `runs/NAME/`: its files, and functions to read and write them.

settings.json        the run's settings, the hash of its text, and the options of `diloco up` (this file makes it a run)
run.json             ports, process ids and faults of the current or last `diloco up`
up.lock              locked by that `diloco up` while it runs
global/              written by the syncer: version 0 and checkpoints
logs/NAME.jsonl      one JSON line per event; logs/NAME.err: the process's stderr
evaluations.jsonl    written by the evaluator: one line per evaluation
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
"""Numeric fields of summary.json, of the run or of a learner."""
RUNS = Path("runs")
"""Where runs are created and searched, relative to the working directory."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The content of settings.json."""

    settings: RunSettings
    task: TaskSettings | None
    """None if learners bring their own model."""
    data_hash: str = ""
    local: Mapping[str, Any] | None = None
    """Options of `diloco up` on this machine (number of learners, device, ...); None without `up`."""


@dataclass(frozen=True)
class RunFolder:
    """One run's folder; `path` is absolute."""

    path: Path

    @property
    def name(self) -> str:
        return display_path(self.path)

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
        """Create the folder of a new run; SettingError if it is not empty or cannot be written."""
        folder = RunFolder(path.absolute())
        if (folder.path / "settings.json").exists():
            raise SettingError(
                f"{folder.name} already holds the run {folder.setup().settings.run!r}; "
                f"continue it with `diloco up --resume {folder.name}`, or choose another --run or --dir"
            )
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            if any(folder.path.iterdir()):
                raise SettingError(f"{folder.name} is not empty; choose an empty --dir, or one that does not exist yet")
            (folder.path / "logs").mkdir()
            folder.write_setup(setup)
        except OSError as error:
            raise SettingError(f"cannot write {folder.name}: {error.strerror}; choose another --dir") from error
        return folder

    @staticmethod
    def open(path: Path) -> RunFolder:
        """The folder of an existing run; SettingError otherwise."""
        folder = RunFolder(path.absolute())
        if not (folder.path / "settings.json").is_file():
            raise SettingError(f"{folder.name} holds no run (there is no settings.json in it)")
        return folder

    def setup(self) -> Setup:
        """Read settings.json; SettingError if this version cannot read it."""
        rows = self._read("settings.json")
        try:
            task = rows.get("task")
            return Setup(
                settings=RunSettings.from_map(rows["run"]),
                task=None if task is None else TaskSettings.from_map(task),
                data_hash=str(rows["data_hash"]),
                local=rows.get("local"),
            )
        except (KeyError, TypeError, AttributeError, Malformed) as error:
            raise SettingError(f"{self.name}/settings.json is not a run's settings ({error})") from error

    def write_setup(self, setup: Setup) -> None:
        rows = {
            "run": setup.settings.to_map(),
            "task": None if setup.task is None else setup.task.to_map(),
            "data_hash": setup.data_hash,
            "local": setup.local,
        }
        write_json(self.path / "settings.json", rows)

    def check_steps(self, steps: int) -> None:
        """SettingError if `steps` is below the run's current number of steps."""
        setup = self.setup()
        if steps < setup.settings.steps:
            raise SettingError(
                f"--steps {steps} is below the {setup.settings.steps} of {self.name}; it can only be raised"
            )

    def raise_steps(self, steps: int) -> None:
        """Raise the run's number of global steps; SettingError if `steps` is below the current number."""
        self.check_steps(steps)
        setup = self.setup()
        self.write_setup(replace(setup, settings=replace(setup.settings, steps=steps)))

    # --- state and results --------------------------------------------------------------------------------------------
    def run_map(self) -> dict[str, Any]:
        """run.json; {} if `diloco up` never ran here. SettingError if it is invalid."""
        rows = self._read("run.json", missing={})
        kinds = {"faults": int, "learners_asked": list, "processes": dict, "redis": str, "pid": int}
        invalid = [name for name, kind in kinds.items() if not isinstance(rows.get(name, kind()), kind)]
        if not invalid and not all(isinstance(name, str) for name in rows.get("learners_asked", ())):
            invalid = ["learners_asked"]
        self._check("run.json", invalid)
        return rows

    def write_run_map(self, rows: Mapping[str, Any]) -> None:
        write_json(self.path / "run.json", rows)

    def summary(self) -> dict[str, Any]:
        """The syncer's figures of a run that finished or stopped; {} otherwise. SettingError if they are invalid."""
        rows = self._read("summary.json", missing={})
        learners = rows.get("learners", [])
        if not isinstance(learners, list):
            learners = [None]
        if not all(isinstance(row, dict) and isinstance(row.get("name"), str) for row in learners):
            self._check("summary.json", ["learners"])
        invalid = [n for row in (rows, *learners) for n in NUMBERS if not isinstance(row.get(n), int | float | None)]
        invalid += [name for name, kind in (("t", int), ("state", str)) if not isinstance(rows.get(name, kind()), kind)]
        self._check("summary.json", invalid)
        return rows

    def saved_step(self) -> int | None:
        """The global step of the newest checkpoint, for runs without a summary; None if there is none."""
        for path in sorted((self.path / "global").glob(f"{CHECKPOINT}*/state.json"), reverse=True):
            try:
                return int(json.loads(path.read_text("utf-8"))["bookkeeping"]["rounds"]["t"])
            except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue  # incomplete or damaged: the syncer would use an older one, too
        return None

    def saved_at(self) -> float | None:
        """When the newest checkpoint was written, in unix seconds; None if there is none."""
        return saved_at(self.path / "global")

    def evaluations(self) -> list[dict[str, Any]]:
        """All evaluations so far, oldest first, without invalid or incomplete lines."""
        try:
            lines = (self.path / "evaluations.jsonl").read_text("utf-8", "replace").splitlines()
        except FileNotFoundError:
            return []
        rows = []
        for line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue  # the last line, half written; the next call returns it
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
        except (OSError, ValueError, RecursionError) as error:
            raise SettingError(f"cannot read {self.name}/{name}: {error}") from error
        if not isinstance(rows, dict):
            raise SettingError(f"{self.name}/{name} is not a map")
        return rows

    def _check(self, name: str, invalid: list[str]) -> None:
        if invalid:
            raise SettingError(
                f"{self.name}/{name} is not what this version writes ({', '.join(sorted(set(invalid)))}); "
                "restore it from a copy, or move it away"
            )

    # --- processes ---------------------------------------------------------------------------------------------------
    def lock(self) -> IO[bytes] | None:
        """Lock this folder for one `diloco up`, as an open file; None if another process holds the lock."""
        file = (self.path / "up.lock").open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return None
        return file

    def is_up(self) -> bool:
        """Whether a `diloco up` is running here."""
        return _is_locked(self.path / "up.lock")

    def is_served(self) -> bool:
        """Whether a syncer is running here, started by `diloco up` or not."""
        lock = self.path / "global" / "lock"
        try:
            os.kill(int(lock.read_text()), 0)  # checked first: probing the lock must not disturb a syncer that starts
        except PermissionError:
            return _is_locked(lock)  # a process of another user
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


def find_run(run: str) -> RunFolder:
    """The folder of the run with this path or name under `runs/`, '' for the newest; SettingError if there is none."""
    if not run:
        runs = all_runs()
        if not runs:
            raise SettingError(f"there is no run in {RUNS}/ here; start one with `diloco up`, or give a run's folder")
        return runs[-1]
    for path in (Path(run), RUNS / run):
        if (path / "settings.json").is_file():
            return RunFolder.open(path)
    known = [folder.path.name for folder in all_runs()]
    known_runs = f"; there are {', '.join(known[-5:])}" if known else ""
    raise SettingError(f"there is no run {run!r} in {RUNS}/ or at that path{known_runs}")


def all_runs() -> list[RunFolder]:
    """All runs under `runs/`, oldest first."""
    try:
        paths = [path for path in RUNS.iterdir() if (path / "settings.json").is_file()]
    except OSError:
        return []
    return [RunFolder(path.absolute()) for path in sorted(paths, key=lambda path: (path.stat().st_mtime, path.name))]


def display_path(path: Path) -> str:
    """`path` for display: relative to the working directory if it is inside, unprintable characters escaped."""
    path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return printable(str(path))


def write_json(path: Path, rows: Mapping[str, Any]) -> None:
    """Write `rows` to `path` atomically and durably."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(rows, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
