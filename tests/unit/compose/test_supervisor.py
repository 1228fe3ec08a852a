"""When `diloco up` stops restarting a process: real children and a run folder, but no other part of a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from decoupled_diloco.common.errors import DilocoError
from decoupled_diloco.common.run_folder import RunFolder
from decoupled_diloco.compose.processes import spawn
from decoupled_diloco.compose.supervisor import FALSE_STARTS, FALSE_STARTS_LATER, Supervisor
from waiting import wait_for

FAILS = "import sys; sys.exit('Too many open files')"
LIVES = "import time; time.sleep(600)"


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    """A run with two learners, of which nothing is started yet."""
    folder = RunFolder(tmp_path / "runs" / "a")
    (folder.path / "logs").mkdir(parents=True)
    config = SimpleNamespace(learners=2, broker_port=1, threads=1)
    setup = SimpleNamespace(settings=SimpleNamespace(run="a"))
    supervisor = Supervisor(cast("Any", SimpleNamespace(folder=folder, config=config, setup=setup)))
    yield supervisor
    supervisor.processes.kill()


def fails_again(supervisor: Supervisor, name: str, times: int, *, merged: bool) -> list[str]:
    """`name` fails once more, after it did so often before."""
    command = [sys.executable, "-S", "-c", FAILS]
    child = supervisor.processes.add(name, lambda: spawn(command, supervisor.folder.stderr(name), threads=1))
    child.false_starts = times
    return wait_for(lambda: supervisor.check_processes(merged=merged), f"{name} has failed again")


def lives(supervisor: Supervisor, name: str) -> None:
    command = [sys.executable, "-S", "-c", LIVES]
    supervisor.processes.add(name, lambda: spawn(command, supervisor.folder.stderr(name), threads=1))


@pytest.mark.parametrize("name", ["broker", "syncer", "learner-1"])
def test_before_anything_was_merged_a_process_that_cannot_start_ends_the_run_with_its_last_words(
    supervisor: Supervisor, name: str
) -> None:
    assert fails_again(supervisor, name, FALSE_STARTS - 2, merged=False)
    with pytest.raises(
        DilocoError, match=rf"^{name} failed 5 times .*exit code 1.*last line of output: Too many open files"
    ):
        fails_again(supervisor, name, FALSE_STARTS - 1, merged=False)


@pytest.mark.parametrize("name", ["store", "broker", "syncer"])
def test_a_run_under_way_ends_too_once_what_it_needs_cannot_start_for_minutes(
    supervisor: Supervisor, name: str
) -> None:
    lives(supervisor, "learner-1")
    assert fails_again(supervisor, name, FALSE_STARTS_LATER - 2, merged=True)
    with pytest.raises(
        DilocoError, match=rf"^{name} failed 10 times .*once fixed, continue with `diloco up --resume .*runs/a`"
    ):
        fails_again(supervisor, name, FALSE_STARTS_LATER - 1, merged=True)


def test_a_run_under_way_does_without_a_learner_but_not_without_any(supervisor: Supervisor) -> None:
    lives(supervisor, "learner-2")
    assert fails_again(supervisor, "learner-1", 100, merged=True)
    supervisor.processes.children["learner-1"].restart_at = None
    supervisor.processes.kill()
    with pytest.raises(DilocoError, match=r"^learner-2 failed 10 times"):
        fails_again(supervisor, "learner-2", FALSE_STARTS_LATER - 1, merged=True)


def test_an_evaluator_that_cannot_start_ends_nothing(supervisor: Supervisor) -> None:
    assert fails_again(supervisor, "evaluator", 100, merged=False)
    assert fails_again(supervisor, "evaluator", 100, merged=True)


def test_what_keeps_a_process_from_being_started_at_all_is_among_the_last_words(supervisor: Supervisor) -> None:
    lives(supervisor, "broker")
    child = supervisor.processes.children["broker"]
    child.false_starts, child._launch = FALSE_STARTS, lambda: spawn([""], supervisor.folder.stderr("broker"), threads=1)
    supervisor.processes.kill()
    child.process, child.restart_at = None, time.monotonic()
    with pytest.raises(DilocoError, match=r"last line of output: .*(Permission denied|No such file)"):
        supervisor.check_processes(merged=False)
