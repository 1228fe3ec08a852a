"""Child processes: started, monitored, restarted with exponential back-off, and stopped.

Each child leads its own session, so that Ctrl-C in a terminal reaches only the parent, and is killed with its parent
(`die_with`, called in the child). For Linux the parent is the thread that started the child: start children from the
main thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..common.environment import without_options
from ..common.errors import DilocoError, LimitReached
from ..common.system_limits import limit_of

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 30.0
_SETTLED_SECONDS = 60.0
"""A child that ran this long is restarted after the first delay."""
_START_SECONDS = 15.0
"""A child that exits by itself sooner counts as a false start."""
_POLL_SECONDS = 0.02
_CRASHES = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS,
                     signal.SIGTRAP, signal.SIGXCPU, signal.SIGXFSZ})  # fmt: skip
"""Signals caused by the program itself; others are sent by other processes."""


class Process(Protocol):
    """A started process, such as a `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None: ...


Launch = Callable[[], Process]


@dataclass(frozen=True, kw_only=True)
class Exit:
    """Unrequested exit of a child."""

    name: str
    code: int
    """Exit code, or -N if killed by signal N, or 1 if it could not be started."""
    starts: int
    """How often it has been started."""
    ran_seconds: float
    reason: str = ""
    """Why it could not be started."""

    def describe(self) -> str:
        if self.reason:
            return self.reason
        if self.code < 0:
            return f"killed by signal {-self.code}"
        return f"exit code {self.code}"


class Child:
    """A process and its restart back-off. `launch` starts it without waiting, or raises DilocoError or OSError.

    is_working: whether it has begun its work since its last start, if that can be known. Until then even a kill by
    another process counts as a false start, since the system kills a process for which memory does not suffice.
    """

    def __init__(self, name: str, launch: Launch, is_working: Callable[[], bool] | None = None) -> None:
        self.name = name
        self.process: Process | None = None
        self.starts = 0
        self.false_starts = 0
        """Consecutive exits by itself within `_START_SECONDS`, or before it began its work."""
        self.restart_at: float | None = None
        self._launch, self._is_working = launch, is_working
        self._launched_at = 0.0
        self._delay = FIRST_DELAY_SECONDS

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    def start(self, now: float) -> None:
        self.restart_at, self._launched_at = None, now
        self.starts += 1
        self.process = self._launch()

    def restart(self, now: float) -> Exit | None:
        """Start it again; returns an Exit if that failed, and schedules another try."""
        try:
            self.start(now)
        except (DilocoError, OSError) as error:
            return self._exited(1, now, str(error))
        return None

    def poll(self, now: float) -> Exit | None:
        """Return its Exit if it has exited, and schedule a restart (after exit code 0 only `schedule_restart` does)."""
        code = None if self.process is None else self.process.poll()
        return None if code is None else self._exited(code, now)

    def _exited(self, code: int, now: float, reason: str = "") -> Exit:
        self.process = None
        ran_seconds = now - self._launched_at
        if ran_seconds >= _SETTLED_SECONDS:
            self._delay = FIRST_DELAY_SECONDS
        self.false_starts = self.false_starts + 1 if self._is_false_start(code, ran_seconds) else 0
        if code != 0:
            self.schedule_restart(now)
        return Exit(name=self.name, code=code, starts=self.starts, ran_seconds=ran_seconds, reason=reason)

    def schedule_restart(self, now: float) -> None:
        """Schedule a restart after a delay that doubles each time, until the child has run for `_SETTLED_SECONDS`."""
        self.restart_at = now + self._delay
        self._delay = min(2 * self._delay, LONGEST_DELAY_SECONDS)

    def _is_false_start(self, code: int, ran_seconds: float) -> bool:
        by_itself = code > 0 or -code in _CRASHES
        if by_itself and ran_seconds < _START_SECONDS:
            return True
        return code != 0 and self._is_working is not None and not self._is_working()

    def signal(self, number: int) -> None:
        """Send a signal to the child and its descendants."""
        if self.process is not None and self.process.poll() is None:
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                return  # it exited after the check above


class ChildProcesses:
    """All children by name, in the order of their first start."""

    def __init__(self) -> None:
        self.children: dict[str, Child] = {}

    def add(self, name: str, launch: Launch, is_working: Callable[[], bool] | None = None) -> Child:
        """Start a child, which `poll` restarts from now on. Raises what `launch` raises."""
        child = self.children[name] = Child(name, launch, is_working)
        child.start(time.monotonic())
        return child

    def poll(self, now: float) -> list[Exit]:
        """Exits since the last call; also restarts the children whose restart is due."""
        exits = []
        for child in self.children.values():
            is_due = child.restart_at is not None and now >= child.restart_at
            exited = child.restart(now) if is_due else child.poll(now)
            exits += [exited] if exited is not None else []
        return exits

    def pids(self) -> dict[str, int]:
        """Name -> process id of each running child."""
        running = self.running(self.children)
        return {child.name: child.process.pid for child in running if child.process is not None}

    def running(self, names: Iterable[str]) -> list[Child]:
        """The running children among `names`."""
        children = [self.children[name] for name in names if name in self.children]
        return [child for child in children if child.process is not None and child.process.poll() is None]

    def wait(self, names: Iterable[str], deadline: float, is_interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all of `names` have exited, the deadline passes or `is_interrupted`; whether all have exited."""
        names = list(names)
        while running := bool(self.running(names)):
            if time.monotonic() >= deadline or is_interrupted():
                break
            time.sleep(_POLL_SECONDS)
        return not running

    def stop(self, names: Iterable[str], deadline: float) -> list[str]:
        """Terminate children without restart, and kill those left at the deadline; returns the names of the killed."""
        names = list(names)
        for name in names:
            if name in self.children:
                self.children[name].restart_at = None
        for child in self.running(names):
            child.signal(signal.SIGTERM)
        self.wait(names, deadline)
        killed = self.running(names)
        for child in killed:
            child.signal(signal.SIGKILL)
        self.wait(names, time.monotonic() + 5)
        return [child.name for child in killed]

    def kill(self) -> None:
        """Kill all children and wait until they have exited."""
        self.stop(self.children, deadline=0)

    def kill_now(self) -> None:
        """Kill all children without waiting; may be called from a signal handler."""
        for child in self.children.values():
            child.signal(signal.SIGKILL)


def spawn(
    command: list[str], stderr: Path, threads: int, more: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a child in its own session; its output is appended to the file `stderr`.

    `threads` limits the threads of numeric libraries. `more` is added to its environment, which holds no other option
    of `diloco`: all of them are in `command`. LimitReached if the system allows no more processes or files.
    """
    own = {"PYTHONFAULTHANDLER": "1", **_thread_limits(threads), **(more or {})}
    environment = without_options(os.environ) | own
    try:
        with stderr.open("ab") as file:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )
    except OSError as error:
        if not (reason := limit_of(error)):
            raise
        raise LimitReached(f"a process of the run cannot be started ({error.strerror}): {reason}") from error


def _thread_limits(threads: int) -> Mapping[str, str]:
    return {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


def die_with(parent: int) -> None:
    """Called in a child: have it killed as soon as its parent process, `parent`, is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent ended before the line above
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), name="die-with-parent", daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
