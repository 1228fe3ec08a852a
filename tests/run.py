"""Whole runs of real processes: `diloco up` with a small, fast model in a folder of its own, and the faults that tests
cause in it (kill, freeze, interrupt).

Every process that a run started has ended when its context is left; each is ended by its own process id.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import redis
from decoupled_diloco.common.run_folder import RunFolder
from transport import free_ports
from waiting import wait_for

DILOCO = [sys.executable, "-P", "-m", "decoupled_diloco.cli"]
MODEL = ["--layers", "1", "--width", "32", "--sequence-length", "32", "--batch-sequences", "4"]
TOKENS_A_STEP = 4 * 32
FRAGMENTS = 6
SCHEDULE = ["--sync-every", "12", "--fragments", str(FRAGMENTS)]
TEXT = argparse.__file__
"""About 100 kB of ordinary text that every machine has."""
FOR_EVER = 10**7
START_SECONDS = 90.0
"""Limit for a start on a busy machine."""
STOP_SECONDS = 10.0
"""Limit for a graceful stop."""


class Process:
    """A `diloco` command in a session of its own; its output is kept."""

    def __init__(
        self,
        place: Path,
        *arguments: str,
        environment: Mapping[str, str | None] | None = None,
        around: Sequence[str] = (),
        display_is_closed: bool = False,
    ) -> None:
        """`around`: a command that runs this one. `display_is_closed`: the reader of stderr goes after the first line,
        as `head -1` does.
        """
        changed = {**os.environ, **(environment or {})}
        self.place = place
        place.mkdir(parents=True, exist_ok=True)
        number = len(list(place.glob("out-*.txt")))
        self.out, self.err = place / f"out-{number}.txt", place / f"err-{number}.txt"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.child = subprocess.Popen(
                [*around, *DILOCO, *arguments], cwd=place, stdout=out, start_new_session=True,
                stderr=subprocess.PIPE if display_is_closed else err,
                env={name: value for name, value in changed.items() if value is not None},
            )  # fmt: skip
        if display_is_closed:
            assert self.child.stderr is not None
            self.child.stderr.readline()
            self.child.stderr.close()

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def output(self) -> str:
        return self.out.read_text("utf-8", "replace") + self.err.read_text("utf-8", "replace")

    @property
    def error_sentence(self) -> str:
        """Stderr, if it is one sentence of `diloco`; AssertionError otherwise."""
        sentence = self.err.read_text("utf-8")
        assert sentence.startswith("diloco: "), sentence
        assert sentence.count("\n") == 1, sentence
        return sentence

    def signal(self, number: int) -> None:
        if self.child.poll() is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float = 60) -> int:
        """The exit code."""
        try:
            return self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:g} s: {self.output[-3000:]}") from None

    def interrupt(self, seconds: float = STOP_SECONDS) -> int:
        """Ctrl-C once; the exit code."""
        self.signal(signal.SIGINT)
        return self.wait(seconds)

    def wait_for_output(self, words: str, seconds: float = START_SECONDS) -> None:
        def is_printed() -> bool:
            assert self.child.poll() is None or words in self.output, self.output[-3000:]
            return words in self.output

        wait_for(is_printed, f"{words!r} is printed", seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()


class Run(Process):
    """`diloco up --json` as a child: its state, and faults in its processes."""

    def __init__(
        self,
        place: Path,
        *arguments: str,
        run: str = "it",
        steps: int = FOR_EVER,
        evaluator: bool = False,
        resumes: bool = False,
        environment: Mapping[str, str | None] | None = None,
        display_is_closed: bool = False,
    ) -> None:
        """`resumes`: continues the run in `place` with its own settings."""
        self.run = run
        self._store: Any = None
        self._logs: dict[str, tuple[list[dict[str, Any]], int]] = {}
        self.folder = RunFolder((place / "runs" / run).absolute())
        begun = ["--resume", f"runs/{run}"] if resumes else ["--run", run, "--steps", str(steps), *MODEL, *SCHEDULE]
        watch = [] if resumes else ["--evaluator" if evaluator else "--no-evaluator"]
        local = [] if resumes else ["--threads", "1", "--data", TEXT]
        super().__init__(
            place, "up", *begun, "--json", *watch, *local, "--broker-port", str(free_ports()), *arguments,
            environment=environment, display_is_closed=display_is_closed,
        )  # fmt: skip

    # --- state -------------------------------------------------------------------------------------------------------
    @property
    def run_map(self) -> dict[str, Any]:
        """run.json: ports and process ids; {} until this `diloco up` has written it."""
        assert self.child.poll() is None, f"ended with exit code {self.child.poll()}: {self.output[-3000:]}"
        run_map = self.folder.run_map()
        return run_map if run_map.get("pid") == self.pid else {}

    @property
    def broker(self) -> str:
        return str(self.run_map["broker"])

    @property
    def store_url(self) -> str:
        return str(self.run_map["redis"])

    @property
    def store(self) -> Any:
        """A client of the run's Redis."""
        if self._store is None:
            self._store = redis.Redis.from_url(self.store_url, decode_responses=True, socket_timeout=10, protocol=2)
        return self._store

    def pid_of(self, name: str) -> int:
        """0 while the process is not running."""
        return int(self.run_map.get("processes", {}).get(name, 0))

    def redis_hash(self, key: str) -> dict[str, str]:
        """A hash in Redis; empty while it does not exist or Redis does not answer."""
        if "redis" not in self.run_map:
            return {}
        try:
            return dict(self.store.hgetall(key))
        except (redis.ConnectionError, redis.TimeoutError):
            return {}

    def figure(self, name: str, run: str = "") -> int:
        """An integer field of the run's hash; 0 while it does not exist."""
        return int(self.redis_hash(f"dd:{run or self.run}:run").get(name, 0))

    def learner(self, name: str, run: str = "") -> dict[str, str]:
        return self.redis_hash(f"dd:{run or self.run}:learner:{name}")

    def merged_of(self, name: str, run: str = "") -> int:
        """Merged tokens of this learner."""
        return int(self.learner(name, run).get("tokens_merged", 0))

    def versions(self, run: str = "") -> list[int]:
        """The newest version of each fragment; -1 where Redis has none."""
        keys = [f"dd:{run or self.run}:fragment:{p}" for p in range(FRAGMENTS)]
        return [int(self.redis_hash(key).get("version", -1)) for key in keys]

    def log(self, process: str) -> list[dict[str, Any]]:
        """The events in its log so far; every line is JSON."""
        rows, read = self._logs.get(process, ([], 0))
        path = self.folder.log(process)
        if path.exists():
            with path.open("rb") as file:
                file.seek(read)
                new = file.read()
            new = new[: new.rfind(b"\n") + 1]
            rows += [json.loads(line) for line in new.decode("utf-8").splitlines()]
            self._logs[process] = (rows, read + len(new))
        return rows

    def events(self, process: str, event: str) -> list[dict[str, Any]]:
        return [row for row in self.log(process) if row["event"] == event]

    def wait_for_versions(self, more: int, why: str, run: str = "") -> None:
        """Wait until every fragment has been merged `more` times from now on (in any epoch)."""
        wait_for(lambda: min(self.versions(run)) >= 0, f"{why}: Redis has the versions")
        before = self.versions(run)
        goals = [version + more for version in before]
        wait_for(
            lambda: all(now >= goal for now, goal in zip(self.versions(run), goals, strict=True)),
            f"{why}: {more} more versions of every fragment than {before}",
            START_SECONDS,
        )

    def wait_until_training(self) -> Self:
        """Wait until all processes run, all learners are live, and the first rounds are merged."""
        wait_for(lambda: len(self.run_map.get("processes", {})) >= 4, "all processes are started", START_SECONDS)
        wait_for(lambda: min(self.versions()) > 0, "the first rounds are merged", START_SECONDS)
        for name in self.run_map["learners_asked"]:
            wait_for(lambda name=name: self.learner(name).get("state") == "live", f"{name} is live", START_SECONDS)  # type: ignore[misc]
        return self

    # --- faults ------------------------------------------------------------------------------------------------------
    def kill(self, *names: str) -> None:
        """kill -9, and wait until all are restarted."""
        old = {name: self.pid_of(name) for name in names}
        for pid in old.values():
            os.kill(pid, signal.SIGKILL)
        for name, pid in old.items():
            wait_for(lambda name=name, pid=pid: self.pid_of(name) not in (0, pid), f"{name} is restarted")  # type: ignore[misc]

    @contextmanager
    def frozen(self, name: str) -> Iterator[int]:
        """SIGSTOP, and SIGCONT when the context is left; the process id."""
        pid = self.pid_of(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield pid
        finally:
            with suppress(ProcessLookupError):  # it may have been killed meanwhile
                os.kill(pid, signal.SIGCONT)

    def pids(self) -> list[int]:
        return [self.pid, *self.run_map.get("processes", {}).values()]

    # --- the end -----------------------------------------------------------------------------------------------------
    def final_figures(self, seconds: float = 120) -> dict[str, Any]:
        """Wait until the run finishes; the line of JSON, checked."""
        assert self.wait(seconds) == 0, self.output[-3000:]
        return self.figures

    @cached_property
    def figures(self) -> dict[str, Any]:
        """The line of JSON of a run that ended, checked when first read; its token ledger must agree."""
        figures: dict[str, Any] = json.loads(self.out.read_text("utf-8").splitlines()[-1])
        summary = self.folder.summary()
        check_token_ledger(figures)
        for row in summary["learners"]:
            check_token_ledger(row)
            assert row["tokens_reported"] == TOKENS_A_STEP * row["local_steps"], row
        for share in ("uptime", "merge_participation", "goodput", "useful_share", "stall_share"):
            assert 0 <= figures[share] <= 1, (share, figures)
        assert figures["tokens_reported"] == sum(row["tokens_reported"] for row in figures["learners"]), figures
        if summary["state"] == "finished":
            assert figures["tokens_pending"] == 0, figures
            assert figures["model_hash"], figures
            for name in self.finishers():
                finished = self.events(name, "finished")
                assert finished, f"{name} never adopted the final model"
                assert finished[-1]["model_hash"] == figures["model_hash"][:16], name
        return figures

    def finishers(self) -> list[str]:
        """Learners that must hold the final model at the end."""
        return list(self.folder.run_map()["learners_asked"])


def check_token_ledger(figures: Mapping[str, Any]) -> None:
    """Every reported token is merged, pending or lost."""
    merged, pending, lost = (figures[f"tokens_{what}"] for what in ("merged", "pending", "lost"))
    assert figures["tokens_reported"] == merged + pending + lost, figures
    assert min(merged, pending, lost) >= 0, figures


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_ended(pids: list[int], seconds: float = 15) -> None:
    wait_for(lambda: not any(is_alive(pid) for pid in pids), "all processes have ended", seconds)


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
