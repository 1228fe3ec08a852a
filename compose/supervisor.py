"""The processes of one run on this machine: store, broker, syncer, evaluator and learners, kept alive together."""

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
from .embedded_redis import EmbeddedStore
from .preflight import Prepared
from .processes import Child, ChildProcesses, Exit, Process, spawn

log = get_logger("up")

FALSE_STARTS = 5
"""A process that so often in a row ends right after its start, before anything was merged, ends the run. (Not the
evaluator: nobody waits for it.)"""
FALSE_STARTS_LATER = 10
"""The same once something was merged, for what the run cannot do without; two to three minutes, with the back-off."""
ENDS_THE_RUN = {
    2: "a setting is wrong", 4: "another syncer serves the run", 6: "the last checkpoint was not written",
    7: "the global model has diverged",
}  # fmt: skip
"""Exit codes of the syncer after which starting it again helps nobody."""
SYNCER_STOPS_SECONDS, LEARNERS_STOP_SECONDS, REST_STOPS_SECONDS = 6.0, 2.0, 1.0
"""After a wish to stop, one after the other: how long each may take. Learners have nothing to save."""
LEARNERS_FINISH_SECONDS, EVALUATOR_FINISHES_SECONDS = 20.0, 120.0
"""After the syncer finished: how long the others may take for their own ends."""


class _StoreProcess:
    """The embedded store as a child among children."""

    def __init__(self, store: EmbeddedStore) -> None:
        store.start()
        self._store = store
        self.pid = store.pid

    def poll(self) -> int | None:
        return None if self._store.running else -signal.SIGKILL


@dataclass
class Supervisor:
    """One run's processes. `redis` is the store's URL once it is started."""

    prepared: Prepared
    redis: str = ""
    faults: int = 0
    finished: bool = False
    """The syncer ended, and said that the run is finished."""

    def __post_init__(self) -> None:
        self.family = ChildProcesses()
        self._told_pids: dict[str, int] | None = {}
        """What run.json says; None while it is not known to be true."""
        self._log_began: dict[str, int] = {}
        """Name -> how long its log was when it was started last."""
        self.folder: RunFolder = self.prepared.folder
        config = self.prepared.config
        self.learners = [f"learner-{number}" for number in range(1, config.learners + 1)]
        self.broker = f"tcp://127.0.0.1:{config.broker_port}"
        self.threads = config.threads or max(1, (os.cpu_count() or 1) // config.learners)

    # --- start -------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Start everything; learners come first among the heavy ones, since they decide when training begins."""
        config = self.prepared.config
        if config.redis is None:
            store = EmbeddedStore(self.folder.path / "logs", config.redis_port)
            self.family.add("store", lambda: _StoreProcess(store))
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
        self.tell()

    def _add(self, name: str, arguments: list[str], threads: int = 1) -> None:
        kind = "learner" if name in self.learners else name
        own = ["--parent", str(os.getpid()), "--log-file", str(self.folder.log(name))]
        command = [sys.executable, "-P", "-m", "decoupled_diloco.cli", *own, kind, *arguments]
        environment = {variable("redis"): self.redis} if kind == "syncer" else {}

        def launch() -> Process:
            self._log_began[name] = size_of(self.folder.log(name))
            return spawn(command, self.folder.stderr(name), threads, environment)

        self.family.add(name, launch, (lambda: self._has_joined(name)) if kind == "learner" else None)

    def tell(self) -> None:
        """Write run.json: where everything is, for `diloco status` and for people. A full disk ends no run: as long as
        it cannot be written, it is tried again at each look.
        """
        pids = self.family.pids()
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
        except OSError as wrong:
            if self._told_pids is not None:
                log.warning("run_map_not_written", error=str(wrong))
            self._told_pids = None
        else:
            self._told_pids = pids

    # --- while it runs -----------------------------------------------------------------------------------------------
    def look(self, *, merged: bool) -> list[str]:
        """Notice who ended and start again whoever is due; what happened, in sentences.

        `merged`: has anything been merged in this run? SettingError or DilocoError if going on is pointless.
        """
        exits = self.family.look(time.monotonic())
        happened = [self._take(exit_, merged) for exit_ in exits]
        if exits or self.family.pids() != self._told_pids:
            self.tell()
        return [sentence for sentence in happened if sentence]

    def _take(self, exit_: Exit, merged: bool) -> str:
        child = self.family.children[exit_.name]
        if exit_.code == 0:
            return self._ended_well(exit_.name)
        self._check_pointless(exit_, child.false_starts, merged)
        self._count_fault(exit_)
        return f"{exit_.name} died ({exit_.describe()}) and {_again(child)}"

    def _count_fault(self, exit_: Exit) -> None:
        self.faults += 1
        log.warning("process_died", name=exit_.name, how=exit_.describe(), lived_seconds=round(exit_.lived_seconds, 1))

    def _ended_well(self, name: str) -> str:
        if name == "syncer" and self.folder.summary().get("state") == "finished":
            self.finished = True
            return ""
        log.info("process_ended", name=name)
        if name in ("store", "broker", "syncer"):
            child = self.family.children[name]
            child.start_later(time.monotonic())
            return f"{name} was stopped and {_again(child)}"
        return ""

    def _check_pointless(self, exit_: Exit, false_starts: int, merged: bool) -> None:
        sentence = exit_.reason or self.last_words(exit_.name)
        first_refusal = exit_.code == 2 and exit_.lives == 1 and not self._has_joined(exit_.name)
        if first_refusal or (exit_.name == "syncer" and exit_.code in ENDS_THE_RUN):
            wrong = SettingError(sentence or f"{exit_.name}: {ENDS_THE_RUN[exit_.code]}")
            wrong.exit_code = exit_.code
            raise wrong
        if exit_.name != "evaluator" and (self._stands_still(exit_.name) if merged else false_starts >= FALSE_STARTS):
            where = self.folder.stderr(exit_.name)
            again = f"; go on by `diloco up --resume {self.folder.name}` once that is mended" if merged else ""
            raise DilocoError(
                f"{exit_.name} ended {false_starts} times right after its start ({exit_.describe()}); its last words: "
                f"{sentence or 'none'} (all of them: {where}){again}"
            )

    def _stands_still(self, name: str) -> bool:
        """Whether a run under way waits in vain for `name`: a learner is missed only if no other can start, either."""
        needed = self.learners if name in self.learners else [name]
        return all(self.family.children[each].false_starts >= FALSE_STARTS_LATER for each in needed)

    def last_words(self, name: str) -> str:
        """The last line that a process wrote to stderr, without our own prefix."""
        try:
            lines = self.folder.stderr(name).read_text("utf-8", "replace").split("\n")
        except FileNotFoundError:
            return ""
        return next((line for line in reversed(lines) if line.strip()), "").removeprefix("diloco: ")

    # --- end ---------------------------------------------------------------------------------------------------------
    def finish(self, hurry: Callable[[], bool]) -> None:
        """After the syncer finished: let learners and evaluator end by themselves, then end the rest."""
        now = time.monotonic()
        self._leave_the_dead()
        late = [name for name in (*self.learners, "evaluator") if not self._has_joined(name)]
        self.family.stop(late, now + LEARNERS_STOP_SECONDS)  # nobody answers them any more
        self.family.wait(self.learners, now + LEARNERS_FINISH_SECONDS, hurry)
        self.family.wait(["evaluator"], now + EVALUATOR_FINISHES_SECONDS, hurry)
        for exit_ in self.family.look(time.monotonic()):
            if exit_.code != 0 and exit_.name not in late:
                self._count_fault(exit_)
        self._stop_all()

    def _has_joined(self, name: str) -> bool:
        """A learner or evaluator that takes part in the run since it was started last; its log says so."""
        try:
            with self.folder.log(name).open("rb") as file:
                file.seek(self._log_began.get(name, 0))
                return b'"event":"joined"' in file.read()
        except FileNotFoundError:
            return False

    def stop(self) -> None:
        """The syncer finishes its round, saves and ends; then the learners; then the rest, all within 10 s."""
        self._stop_all()
        self.finished = self.folder.summary().get("state") == "finished"

    def check_saved(self) -> None:
        """SaveFailed if the syncer did not end well by our wish."""
        process, begun = self.family.children["syncer"].process, self.folder.path / "global" / "version-0"
        code = process.poll() if process is not None else -signal.SIGKILL if begun.exists() else None
        if code not in (None, 0, -signal.SIGTERM):
            how = self.last_words("syncer") if code == SaveFailed.exit_code else f"the syncer ended badly ({code})"
            raise SaveFailed(
                f"{how}; the run goes on from its last checkpoint by `diloco up --resume {self.folder.name}`"
            )

    def _stop_all(self) -> None:
        self._leave_the_dead()
        groups: list[tuple[Collection[str], float]] = [
            (["syncer"], SYNCER_STOPS_SECONDS),
            ([*self.learners, "evaluator"], LEARNERS_STOP_SECONDS),
            (["broker", "store"], REST_STOPS_SECONDS),
        ]
        killed = [name for names, seconds in groups for name in self.family.stop(names, time.monotonic() + seconds)]
        if killed:
            log.warning("processes_killed", names=killed)
        self.tell()

    def _leave_the_dead(self) -> None:
        for child in self.family.children.values():
            child.due_at = None


def _again(child: Child) -> str:
    return f"starts again in {max(0.0, (child.due_at or 0.0) - time.monotonic()):.1f} s"


def size_of(path: Path) -> int:
    """Bytes in a file; 0 if it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
