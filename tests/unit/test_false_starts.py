"""When `diloco up` stops to start a process again: real children, a run folder, and nothing else of a run."""

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
def house(tmp_path: Path) -> Iterator[Supervisor]:
    """A run with two learners, of which nothing is started yet."""
    folder = RunFolder(tmp_path / "runs" / "a")
    (folder.path / "logs").mkdir(parents=True)
    config = SimpleNamespace(learners=2, broker_port=1, threads=1)
    setup = SimpleNamespace(settings=SimpleNamespace(run="a"))
    house = Supervisor(cast("Any", SimpleNamespace(folder=folder, config=config, setup=setup)))
    yield house
    house.family.kill()


def fails_again(house: Supervisor, name: str, times: int, *, merged: bool) -> list[str]:
    """`name` fails once more, after it did so often before."""
    command = [sys.executable, "-S", "-c", FAILS]
    child = house.family.add(name, lambda: spawn(command, house.folder.stderr(name), threads=1))
    child.false_starts = times
    return wait_for(lambda: house.look(merged=merged), f"{name} has failed again")


def lives(house: Supervisor, name: str) -> None:
    command = [sys.executable, "-S", "-c", LIVES]
    house.family.add(name, lambda: spawn(command, house.folder.stderr(name), threads=1))


@pytest.mark.parametrize("name", ["broker", "syncer", "learner-1"])
def test_before_anything_was_merged_a_process_that_cannot_start_ends_the_run_with_its_last_words(
    house: Supervisor, name: str
) -> None:
    assert fails_again(house, name, FALSE_STARTS - 2, merged=False)
    with pytest.raises(DilocoError, match=rf"^{name} ended 5 times .*exit code 1.*last words: Too many open files"):
        fails_again(house, name, FALSE_STARTS - 1, merged=False)


@pytest.mark.parametrize("name", ["store", "broker", "syncer"])
def test_a_run_under_way_ends_too_once_what_it_needs_cannot_start_for_minutes(house: Supervisor, name: str) -> None:
    lives(house, "learner-1")
    assert fails_again(house, name, FALSE_STARTS_LATER - 2, merged=True)
    with pytest.raises(DilocoError, match=rf"^{name} ended 10 times .*diloco up --resume .*runs/a` once"):
        fails_again(house, name, FALSE_STARTS_LATER - 1, merged=True)


def test_a_run_under_way_does_without_a_learner_but_not_without_any(house: Supervisor) -> None:
    lives(house, "learner-2")
    assert fails_again(house, "learner-1", 100, merged=True)
    house.family.children["learner-1"].due_at = None
    house.family.kill()
    with pytest.raises(DilocoError, match=r"^learner-2 ended 10 times"):
        fails_again(house, "learner-2", FALSE_STARTS_LATER - 1, merged=True)


def test_an_evaluator_that_cannot_start_ends_nothing(house: Supervisor) -> None:
    assert fails_again(house, "evaluator", 100, merged=False)
    assert fails_again(house, "evaluator", 100, merged=True)


def test_what_keeps_a_process_from_being_started_at_all_is_among_the_last_words(house: Supervisor) -> None:
    lives(house, "broker")
    child = house.family.children["broker"]
    child.false_starts, child._launch = FALSE_STARTS, lambda: spawn([""], house.folder.stderr("broker"), threads=1)
    house.family.kill()
    child.process, child.due_at = None, time.monotonic()
    with pytest.raises(DilocoError, match=r"last words: .*(Permission denied|No such file)"):
        house.look(merged=False)
