"""Supervisor of one run's processes on this machine: Redis, broker, syncer, evaluator and learners."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from ..common.environment import variable
from ..common.errors import DilocoError, SaveFailed, SettingError
from ..common.journal import FOLDER
from ..common.log import get_logger
from ..common.registry import redact_url
from ..common.run_folder import RunFolder
from .embedded_redis import EmbeddedRedis
from .preflight import Prepared
from .processes import Child, ChildProcesses, Exit, Process, spawn

log = get_logger("up")

FALSE_STARTS = 5
"""Consecutive false starts of a process after which a run without any merge is given up. (The evaluator does not count:
no other process waits for it.)"""
FALSE_STARTS_LATER = 10
"""The same after the first merge, for a process that the run needs: two to three minutes, with the back-off."""
_FATAL_SYNCER_CODES = {
    2: "a setting is wrong", 4: "another syncer serves the run", 6: "the last checkpoint was not written",
    7: "the global model has diverged",
}  # fmt: skip
"""Exit codes of the syncer after which a restart would not help."""
_SYNCER_STOP_SECONDS, _LEARNERS_STOP_SECONDS, _REST_STOP_SECONDS = 6.0, 2.0, 1.0
"""Most time for each group, one after the other, when a stop is requested. Learners have nothing to save."""
_LEARNERS_FINISH_SECONDS, _EVALUATOR_FINISH_SECONDS = 20.0, 120.0
"""Most time for learners and evaluator to exit by themselves after the syncer has finished."""


class _StoreProcess:
    """The embedded Redis as a child process."""

    def __init__(self, store: EmbeddedRedis) -> None:
        store.start()
        self._store = store
        self.pid = store.pid

    def poll(self) -> int | None:
        return None if self._store.running else -signal.SIGKILL


@dataclass
class Supervisor:
    """The processes of one run. `redis` is the URL of Redis once it has been started."""

    prepared: Prepared
    redis: str = ""
    faults: int = 0
    finished: bool = False
    """The syncer has exited and the run is finished."""

    def __post_init__(self) -> None:
        self.processes = ChildProcesses()
        self._published_pids: dict[str, int] | None = {}
        """Process ids in run.json; None while it could not be written."""
        self._log_start: dict[str, int] = {}
        """Name -> size of the log at the last start of that process."""
        self.folder: RunFolder = self.prepared.folder
        config = self.prepared.config
        self.learners = [f"learner-{number}" for number in range(1, config.learners + 1)]
        self.broker = f"tcp://127.0.0.1:{config.broker_port}"
        self.threads = config.threads or max(1, (os.cpu_count() or 1) // config.learners)

    # --- start -------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Start all processes; the learners before the evaluator, since training begins with them."""
        config = self.prepared.config
        if config.redis is None:
            store = EmbeddedRedis(self.folder.path / "logs", config.redis_port)
            self.processes.add("store", lambda: _StoreProcess(store))
            self.redis = store.url
        else:
            self.redis = config.redis
        self._add("broker", ["--port", str(config.broker_port)])
        tape = ["--tape", str(self.folder.path / FOLDER)] if config.tape else []
        self._add("syncer", ["--dir", str(self.folder.path), "--broker", self.broker, *tape])
        text = [] if config.data is None else ["--data", str(config.data)]
        run = ["--run", self.prepared.setup.settings.run]
        for name in self.learners:
            where = ["--device", config.device, "--threads", str(self.threads), "--dir", str(self.folder.path)]
            self._add(name, ["--broker", self.broker, *run, "--name", name, *where, *text, *tape], threads=self.threads)
        if config.evaluator:
            where = ["--dir", str(self.folder.path), "--eval-every", str(config.eval_every)]
            self._add("evaluator", ["--broker", self.broker, *run, *where, *text])
        self.write_run_map()

    def _add(self, name: str, arguments: list[str], threads: int = 1) -> None:
        kind = "learner" if name in self.learners else name
        own = ["--parent", str(os.getpid()), "--log-file", str(self.folder.log(name))]
        command = [sys.executable, "-P", "-m", "decoupled_diloco.cli", *own, kind, *arguments]
        environment = {variable("redis"): self.redis} if kind == "syncer" else {}

        def launch() -> Process:
            self._log_start[name] = _file_size(self.folder.log(name))
            return spawn(command, self.folder.stderr(name), threads, environment)

        self.processes.add(name, launch, (lambda: self._has_joined(name)) if kind == "learner" else None)

    def write_run_map(self) -> None:
        """Write run.json: addresses and process ids, for `diloco status` and for users. If that fails, as on a full
        disk, the run continues and each check tries again.
        """
        pids = self.processes.pids()
        rows = {
            "run": self.prepared.setup.settings.run,
            "pid": os.getpid(),
            "broker": self.broker,
            "redis": redact_url(self.redis),
            "learners_asked": self.learners,
            "faults": self.faults,
            "processes": pids,
        }
        try:
            self.folder.write_run_map(rows)
        except OSError as error:
            if self._published_pids is not None:
                log.warning("run_map_not_written", error=str(error))
            self._published_pids = None
        else:
            self._published_pids = pids

    # --- running -----------------------------------------------------------------------------------------------------
    def check_processes(self, *, merged: bool) -> list[str]:
        """Detect exits and restart processes; returns one sentence per event.

        `merged`: whether anything has been merged in this run. SettingError or DilocoError if the run cannot continue.
        """
        exits = self.processes.poll(time.monotonic())
        sentences = [self._handle_exit(exit_, merged) for exit_ in exits]
        if exits or self.processes.pids() != self._published_pids:
            self.write_run_map()
        return [sentence for sentence in sentences if sentence]

    def _handle_exit(self, exit_: Exit, merged: bool) -> str:
        child = self.processes.children[exit_.name]
        if exit_.code == 0:
            return self._exited_successfully(exit_.name)
        self._raise_if_pointless(exit_, child.false_starts, merged)
        self._count_fault(exit_)
        return f"{exit_.name} died ({exit_.describe()}); {_restart_delay(child)}"

    def _count_fault(self, exit_: Exit) -> None:
        self.faults += 1
        log.warning("process_died", name=exit_.name, how=exit_.describe(), ran_seconds=round(exit_.ran_seconds, 1))

    def _exited_successfully(self, name: str) -> str:
        if name == "syncer" and self.folder.summary().get("state") == "finished":
            self.finished = True
            return ""
        log.info("process_ended", name=name)
        if name in ("store", "broker", "syncer"):
            child = self.processes.children[name]
            child.schedule_restart(time.monotonic())
            return f"{name} was stopped; {_restart_delay(child)}"
        return ""

    def _raise_if_pointless(self, exit_: Exit, false_starts: int, merged: bool) -> None:
        sentence = exit_.reason or self._last_stderr_line(exit_.name)
        is_rejected = exit_.code == 2 and exit_.starts == 1 and not self._has_joined(exit_.name)
        if is_rejected or (exit_.name == "syncer" and exit_.code in _FATAL_SYNCER_CODES):
            error = SettingError(sentence or f"{exit_.name}: {_FATAL_SYNCER_CODES[exit_.code]}")
            error.exit_code = exit_.code
            raise error
        if exit_.name != "evaluator" and (self._is_blocked_by(exit_.name) if merged else false_starts >= FALSE_STARTS):
            where = self.folder.stderr(exit_.name)
            resume = f"; once fixed, continue with `diloco up --resume {self.folder.name}`" if merged else ""
            raise DilocoError(
                f"{exit_.name} failed {false_starts} times in a row right after its start ({exit_.describe()}); its "
                f"last line of output: {sentence or 'none'} (all output: {where}){resume}"
            )

    def _is_blocked_by(self, name: str) -> bool:
        """Whether the run cannot continue without `name`. A single learner is needed only if no other one can start."""
        needed = self.learners if name in self.learners else [name]
        return all(self.processes.children[each].false_starts >= FALSE_STARTS_LATER for each in needed)

    def _last_stderr_line(self, name: str) -> str:
        """Last line of a process's stderr, without the prefix `diloco: `."""
        try:
            lines = self.folder.stderr(name).read_text("utf-8", "replace").split("\n")
        except FileNotFoundError:
            return ""
        return next((line for line in reversed(lines) if line.strip()), "").removeprefix("diloco: ")

    # --- end ---------------------------------------------------------------------------------------------------------
    def finish(self, is_interrupted: Callable[[], bool]) -> None:
        """After the syncer has finished, wait for learners and evaluator to exit, then stop the rest."""
        now = time.monotonic()
        self._cancel_restarts()
        late = [name for name in (*self.learners, "evaluator") if not self._has_joined(name)]
        self.processes.stop(late, now + _LEARNERS_STOP_SECONDS)  # the syncer no longer answers them
        self.processes.wait(self.learners, now + _LEARNERS_FINISH_SECONDS, is_interrupted)
        self.processes.wait(["evaluator"], now + _EVALUATOR_FINISH_SECONDS, is_interrupted)
        for exit_ in self.processes.poll(time.monotonic()):
            if exit_.code != 0 and exit_.name not in late:
                self._count_fault(exit_)
        self._stop_all()

    def _has_joined(self, name: str) -> bool:
        """Whether a learner or evaluator has joined the run since its last start, according to its log."""
        try:
            with self.folder.log(name).open("rb") as file:
                file.seek(self._log_start.get(name, 0))
                return b'"event":"joined"' in file.read()
        except FileNotFoundError:
            return False

    def stop(self) -> None:
        """Stop the syncer, which first finishes its round and saves; then learners; then the rest; all within 10 s."""
        self._stop_all()
        self.finished = self.folder.summary().get("state") == "finished"

    def check_saved(self) -> None:
        """SaveFailed if the syncer, when stopped, did not exit successfully."""
        process, begun = self.processes.children["syncer"].process, self.folder.path / "global" / "version-0"
        code = process.poll() if process is not None else -signal.SIGKILL if begun.exists() else None
        if code not in (None, 0, -signal.SIGTERM):
            how = (
                self._last_stderr_line("syncer")
                if code == SaveFailed.exit_code
                else f"the syncer failed (exit code {code})"
            )
            raise SaveFailed(f"{how}; continue from the last checkpoint with `diloco up --resume {self.folder.name}`")

    def _stop_all(self) -> None:
        self._cancel_restarts()
        groups: list[tuple[Collection[str], float]] = [
            (["syncer"], _SYNCER_STOP_SECONDS),
            ([*self.learners, "evaluator"], _LEARNERS_STOP_SECONDS),
            (["broker", "store"], _REST_STOP_SECONDS),
        ]
        killed = [name for names, seconds in groups for name in self.processes.stop(names, time.monotonic() + seconds)]
        if killed:
            log.warning("processes_killed", names=killed)
        self.write_run_map()

    def _cancel_restarts(self) -> None:
        for child in self.processes.children.values():
            child.restart_at = None


def _restart_delay(child: Child) -> str:
    return f"it is restarted in {max(0.0, (child.restart_at or 0.0) - time.monotonic()):.1f} s"


def _file_size(path: Path) -> int:
    """Bytes in a file; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
