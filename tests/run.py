"""A whole run of real processes that a test may mistreat: `diloco up` with a small, fast model in a folder of its own.

Whatever happens, every process that it started is gone afterwards, each ended by its own process id.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
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
"""About 100 kB of ordinary text that is on every machine: read in no time."""
FOR_EVER = 10**7
START_SECONDS = 90.0
"""Everything may start slowly on a machine that is busy with other things."""


class Process:
    """A command of ours in a session of its own; what it says is kept."""

    def __init__(
        self,
        place: Path,
        *arguments: str,
        environment: Mapping[str, str | None] | None = None,
        around: Sequence[str] = (),
    ) -> None:
        """`around`: a command that runs ours."""
        changed = {**os.environ, **(environment or {})}
        self.place = place
        place.mkdir(parents=True, exist_ok=True)
        number = len(list(place.glob("said-*.txt")))
        self.out, self.err = place / f"said-{number}.txt", place / f"erred-{number}.txt"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.child = subprocess.Popen(
                [*around, *DILOCO, *arguments], cwd=place, stdout=out, stderr=err, start_new_session=True,
                env={name: value for name, value in changed.items() if value is not None},
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def said(self) -> str:
        return self.out.read_text("utf-8", "replace") + self.err.read_text("utf-8", "replace")

    @property
    def last_words(self) -> str:
        """What stands on stderr, if it is one sentence of ours; AssertionError otherwise."""
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
            raise AssertionError(f"still there after {seconds:g} s: {self.said[-3000:]}") from None

    def wait_until_it_says(self, words: str, seconds: float = START_SECONDS) -> None:
        def says() -> bool:
            assert self.child.poll() is None or words in self.said, self.said[-3000:]
            return words in self.said

        wait_for(says, f"it says {words!r}", seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()


class Run(Process):
    """`diloco up --json` as a child, and the eyes and hands of a test in it."""

    def __init__(
        self,
        place: Path,
        *arguments: str,
        run: str = "it",
        steps: int = FOR_EVER,
        evaluator: bool = False,
        resumes: bool = False,
        environment: Mapping[str, str | None] | None = None,
    ) -> None:
        """`resumes`: the run that is in `place` goes on, with what it had."""
        self.run = run
        self._store: Any = None
        self._logs: dict[str, tuple[list[dict[str, Any]], int]] = {}
        self.folder = RunFolder((place / "runs" / run).absolute())
        begun = ["--resume", f"runs/{run}"] if resumes else ["--run", run, "--steps", str(steps), *MODEL, *SCHEDULE]
        watch = [] if resumes else ["--evaluator" if evaluator else "--no-evaluator"]
        local = [] if resumes else ["--threads", "1", "--data", TEXT]
        super().__init__(
            place, "up", *begun, "--json", *watch, *local, "--broker-port", str(free_ports()), *arguments,
            environment=environment,
        )  # fmt: skip

    # --- eyes --------------------------------------------------------------------------------------------------------
    @property
    def told(self) -> dict[str, Any]:
        """run.json: ports and process ids; {} until this very `up` has written it."""
        assert self.child.poll() is None, f"it has ended with {self.child.poll()}: {self.said[-3000:]}"
        told = self.folder.run_map()
        return told if told.get("pid") == self.pid else {}

    @property
    def broker(self) -> str:
        return str(self.told["broker"])

    @property
    def store_url(self) -> str:
        return str(self.told["redis"])

    @property
    def store(self) -> Any:
        """A client of the run's store."""
        if self._store is None:
            self._store = redis.Redis.from_url(self.store_url, decode_responses=True, socket_timeout=10, protocol=2)
        return self._store

    def pid_of(self, name: str) -> int:
        """0 while it is not running."""
        return int(self.told.get("processes", {}).get(name, 0))

    def row(self, key: str) -> dict[str, str]:
        """A hash in the store; empty while it is not there, or the store is away."""
        if "redis" not in self.told:
            return {}
        try:
            return dict(self.store.hgetall(key))
        except (redis.ConnectionError, redis.TimeoutError):
            return {}

    def figure(self, name: str, run: str = "") -> int:
        """A whole number of the run's hash; 0 while it is not there."""
        return int(self.row(f"dd:{run or self.run}:run").get(name, 0))

    def learner(self, name: str, run: str = "") -> dict[str, str]:
        return self.row(f"dd:{run or self.run}:learner:{name}")

    def merged_of(self, name: str, run: str = "") -> int:
        """Tokens of this learner that were merged."""
        return int(self.learner(name, run).get("tokens_merged", 0))

    def versions(self, run: str = "") -> list[int]:
        """The newest version of each fragment; -1 where it is not there."""
        keys = [f"dd:{run or self.run}:fragment:{p}" for p in range(FRAGMENTS)]
        return [int(self.row(key).get("version", -1)) for key in keys]

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
        """Every fragment is merged so many times from now on (in whatever epoch)."""
        wait_for(lambda: min(self.versions(run)) >= 0, f"{why}: versions are shown")
        before = self.versions(run)
        goals = [version + more for version in before]
        wait_for(
            lambda: all(now >= goal for now, goal in zip(self.versions(run), goals, strict=True)),
            f"{why}: {more} more versions of every fragment than {before}",
            START_SECONDS,
        )

    def wait_until_it_runs(self) -> Self:
        """Everything is started, all are shown, and the first rounds are merged."""
        wait_for(lambda: len(self.told.get("processes", {})) >= 4, "all are started", START_SECONDS)
        wait_for(lambda: min(self.versions()) > 0, "the first rounds are merged", START_SECONDS)
        for name in self.told["learners_asked"]:
            wait_for(lambda name=name: self.learner(name).get("state") == "live", f"{name} is live", START_SECONDS)  # type: ignore[misc]
        return self

    # --- hands -------------------------------------------------------------------------------------------------------
    def kill(self, name: str) -> int:
        """kill -9, and wait until another process bears its name: the new one's id."""
        old = self.pid_of(name)
        os.kill(old, signal.SIGKILL)
        return wait_for(lambda: self.pid_of(name) not in (0, old) and self.pid_of(name), f"{name} is started again")

    def pids(self) -> list[int]:
        return [self.pid, *self.told.get("processes", {}).values()]

    # --- the end -----------------------------------------------------------------------------------------------------
    def figures(self, seconds: float = 120) -> dict[str, Any]:
        """Wait for its end by itself; the line of JSON, checked."""
        assert self.wait(seconds) == 0, self.said[-3000:]
        return self.check_figures()

    def check_figures(self) -> dict[str, Any]:
        """The line of JSON of a run that ended; its books must agree."""
        told: dict[str, Any] = json.loads(self.out.read_text("utf-8").splitlines()[-1])
        summary = self.folder.summary()
        check_books(told)
        for row in summary["learners"]:
            check_books(row)
            assert row["tokens_reported"] == TOKENS_A_STEP * row["local_steps"], row
        for share in ("uptime", "merge_participation", "goodput", "useful_share", "stall_share"):
            assert 0 <= told[share] <= 1, (share, told)
        assert told["tokens_reported"] == sum(row["tokens_reported"] for row in told["learners"]), told
        if summary["state"] == "finished":
            assert told["tokens_pending"] == 0, told
            assert told["model_hash"], told
            for name in self.finishers():
                heard = self.events(name, "finished")
                assert heard, f"{name} never took the final model"
                assert heard[-1]["model_hash"] == told["model_hash"][:16], name
        return told

    def finishers(self) -> list[str]:
        """Those that must hold the final model at the end."""
        return list(self.folder.run_map()["learners_asked"])


def check_books(figures: Mapping[str, Any]) -> None:
    """Not one reported token is missing."""
    merged, pending, lost = (figures[f"tokens_{what}"] for what in ("merged", "pending", "lost"))
    assert figures["tokens_reported"] == merged + pending + lost, figures
    assert min(merged, pending, lost) >= 0, figures


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], seconds: float = 15) -> None:
    wait_for(lambda: not any(lives(pid) for pid in pids), "no process is left", seconds)


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
