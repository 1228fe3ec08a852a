"""Processes that are kept alive: started, watched, started again with back-off, and ended in order.

Each child leads a session of its own, so that Ctrl-C in a terminal reaches its parent only, and dies with its parent
(`die_with`, called in the child: the kernel's promise belongs to the thread that started it, so children are started
from the main thread).
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
SETTLED_SECONDS = 60.0
"""A child that lived so long starts again with the first delay."""
START_SECONDS = 15.0
"""A child that ends by itself sooner than this never really started."""
LOOK_SECONDS = 0.02
CRASHES = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS,
                     signal.SIGTRAP, signal.SIGXCPU, signal.SIGXFSZ})  # fmt: skip
"""Signals that are a program's own fault; the others are sent from outside."""


class Process(Protocol):
    """What is needed of a started process; `subprocess.Popen` has it."""

    pid: int

    def poll(self) -> int | None: ...


Launch = Callable[[], Process]


@dataclass(frozen=True, kw_only=True)
class Exit:
    """A child that ended although nobody asked it to."""

    name: str
    code: int
    """As the shell's, but -N for signal N. 1 if it could not be started at all."""
    lives: int
    """How often it had been started, this time included."""
    lived_seconds: float
    reason: str = ""
    """Why it could not be started."""

    def describe(self) -> str:
        if self.reason:
            return self.reason
        if self.code < 0:
            return f"killed by signal {-self.code}"
        return f"exit code {self.code}"


class Child:
    """One process and its back-off. `launch` starts it and returns at once, or raises DilocoError or OSError.

    began: whether it has begun its work since it was started last, where that can be known. Until then even a kill from
    outside is a false start, since the system kills what wants more memory than there is.
    """

    def __init__(self, name: str, launch: Launch, began: Callable[[], bool] | None = None) -> None:
        self.name = name
        self.process: Process | None = None
        self.lives = 0
        self.false_starts = 0
        """Ends by itself within START_SECONDS, or before it began, in a row."""
        self.due_at: float | None = None
        self._launch, self._began = launch, began
        self._launched_at = 0.0
        self._delay = FIRST_DELAY_SECONDS

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    def start(self, now: float) -> None:
        self.due_at, self._launched_at = None, now
        self.lives += 1
        self.process = self._launch()

    def revive(self, now: float) -> Exit | None:
        """Start it again; the Exit if that failed, with the next try later."""
        try:
            self.start(now)
        except (DilocoError, OSError) as wrong:
            return self._ended(1, now, str(wrong))
        return None

    def look(self, now: float) -> Exit | None:
        """Has it ended? Then the Exit, and `due_at` says when it is to be started again (exit code 0: only
        after `start_later`).
        """
        code = None if self.process is None else self.process.poll()
        return None if code is None else self._ended(code, now)

    def _ended(self, code: int, now: float, reason: str = "") -> Exit:
        self.process = None
        lived = now - self._launched_at
        if lived >= SETTLED_SECONDS:
            self._delay = FIRST_DELAY_SECONDS
        self.false_starts = self.false_starts + 1 if self._is_false_start(code, lived) else 0
        if code != 0:
            self.start_later(now)
        return Exit(name=self.name, code=code, lives=self.lives, lived_seconds=lived, reason=reason)

    def start_later(self, now: float) -> None:
        """Have it started again after a delay that doubles each time, until it has lived SETTLED_SECONDS."""
        self.due_at = now + self._delay
        self._delay = min(2 * self._delay, LONGEST_DELAY_SECONDS)

    def _is_false_start(self, code: int, lived_seconds: float) -> bool:
        by_itself = code > 0 or -code in CRASHES
        if by_itself and lived_seconds < START_SECONDS:
            return True
        return code != 0 and self._began is not None and not self._began()

    def signal(self, number: int) -> None:
        """Send a signal to the child and to what it started."""
        if self.process is not None and self.process.poll() is None:
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                return  # it ended between the two lines


class ChildProcesses:
    """All children by name, in the order in which they were added."""

    def __init__(self) -> None:
        self.children: dict[str, Child] = {}

    def add(self, name: str, launch: Launch, began: Callable[[], bool] | None = None) -> Child:
        """Start a child and keep it alive from now on. What `launch` raises is raised."""
        child = self.children[name] = Child(name, launch, began)
        child.start(time.monotonic())
        return child

    def look(self, now: float) -> list[Exit]:
        """Who has ended since the last call; also starts again whoever is due."""
        exits = []
        for child in self.children.values():
            due = child.due_at is not None and now >= child.due_at
            found = child.revive(now) if due else child.look(now)
            exits += [found] if found is not None else []
        return exits

    def pids(self) -> dict[str, int]:
        """Name -> process id of those that run now."""
        running = self.running(self.children)
        return {child.name: child.process.pid for child in running if child.process is not None}

    def running(self, names: Iterable[str]) -> list[Child]:
        """Those of `names` that run now."""
        children = [self.children[name] for name in names if name in self.children]
        return [child for child in children if child.process is not None and child.process.poll() is None]

    def wait(self, names: Iterable[str], deadline: float, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all of `names` have ended, or the deadline or `hurry` comes; True if they have."""
        names = list(names)
        while running := bool(self.running(names)):
            if time.monotonic() >= deadline or hurry():
                break
            time.sleep(LOOK_SECONDS)
        return not running

    def stop(self, names: Iterable[str], deadline: float) -> list[str]:
        """Ask them to end, wait, kill the rest; the names of those that had to be killed. None is started again."""
        names = list(names)
        for name in names:
            if name in self.children:
                self.children[name].due_at = None
        for child in self.running(names):
            child.signal(signal.SIGTERM)
        self.wait(names, deadline)
        killed = self.running(names)
        for child in killed:
            child.signal(signal.SIGKILL)
        self.wait(names, time.monotonic() + 5)
        return [child.name for child in killed]

    def kill(self) -> None:
        """End all at once, and wait until they have."""
        self.stop(self.children, deadline=0)

    def kill_now(self) -> None:
        """End all at once without waiting; may be called from a signal handler."""
        for child in self.children.values():
            child.signal(signal.SIGKILL)


def spawn(
    command: list[str], stderr: Path, threads: int, more: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A child in a session of its own; everything it prints is appended to the file `stderr`.

    `threads` bounds what numeric libraries take before anybody asks them; `more` is added to its environment,
    which has no other option of ours: all that it needs is in `command`. LimitReached if the system gives
    no more processes or files.
    """
    own = {"PYTHONFAULTHANDLER": "1", **_thread_limits(threads), **(more or {})}
    environment = without_options(os.environ) | own
    try:
        with stderr.open("ab") as file:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )
    except OSError as wrong:
        if not (reason := limit_of(wrong)):
            raise
        raise LimitReached(f"a process of the run cannot be started ({wrong.strerror}): {reason}") from wrong


def _thread_limits(threads: int) -> Mapping[str, str]:
    return {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


def die_with(parent: int) -> None:
    """In a child: be killed as soon as the process `parent`, which started it, is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it went before the line above
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        threading.Thread(target=_follow, args=(parent,), name="die-with-parent", daemon=True).start()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
