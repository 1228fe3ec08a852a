"""Ctrl-C: once it is a wish that is granted within seconds, and nothing is lost; twice it is the end."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from run import START_SECONDS, Process, Run, check_books, wait_until_gone
from waiting import wait_for

pytestmark = pytest.mark.timeout(400)  # whole runs, on a machine that may be busy with others

STOP_SECONDS = 10.0
"""What a stop may take."""


def interrupt(run: Process) -> int:
    """Ctrl-C once; its exit code."""
    run.signal(signal.SIGINT)
    return run.wait(STOP_SECONDS)


def test_a_run_that_is_stopped_goes_on_later_with_the_same_versions_and_counts(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        pids = run.wait_until_it_runs().pids()
        assert interrupt(run) == 0, run.said
        wait_until_gone(pids)
        first = run.check_figures()
    assert "continue with: diloco up --resume runs/it" in run.said
    assert run.folder.summary()["state"] == "stopped"
    assert not run.events("up", "processes_killed"), "all could end by themselves"
    versions: dict[int, int] = {}
    for row in run.events("syncer", "merged"):
        versions[row["fragment"]] = row["version"]
    with Run(tmp_path, resumes=True) as again:
        wait_for(lambda: again.figure("merges") > 0, "it is resumed", START_SECONDS)
        shown = again.row("dd:it:run")
        assert all(now > versions[p] for p, now in enumerate(again.versions()))
        for name in ("tokens_reported", "tokens_merged", "merges"):
            assert int(shown[name]) >= first[name], name
        again.wait_for_versions(1, "the resumed run merges")
        wait_for(lambda: again.learner("learner-1").get("state") == "live", "learner-1 is back")
        check_books({name: int(v) for name, v in again.row("dd:it:run").items() if name.startswith("tokens_")})
        pids = again.pids()
        os.kill(again.pid_of("syncer"), signal.SIGSTOP)  # it cannot end in order now
        again.signal(signal.SIGINT)
        again.wait_until_it_says("stopping")
        again.signal(signal.SIGINT)
        assert again.wait(3) == 130
        wait_until_gone(pids, 3)
    with Run(tmp_path, resumes=True) as third:
        wait_for(
            lambda: third.figure("merges") >= first["merges"], "it can be resumed after that as well", START_SECONDS
        )
        assert interrupt(third) == 0, third.said
        last = third.check_figures()
    assert last["tokens_merged"] >= first["tokens_merged"]
    assert last["steps"] >= first["steps"]


@pytest.mark.parametrize("moment", range(4))
def test_an_interrupt_at_any_moment_of_a_start_ends_it_in_time_and_leaves_nobody(tmp_path: Path, moment: int) -> None:
    seconds = random.Random(f"moment {moment}").uniform(0, 6)
    with Run(tmp_path, evaluator=True) as run:
        wait_for(run.folder.path.exists, "it has begun", START_SECONDS)
        begun = time.monotonic()
        wait_for(lambda: time.monotonic() - begun >= seconds, "the moment has come")
        pids = list(run.folder.run_map().get("processes", {}).values())
        code = interrupt(run)
        assert code == 0, (seconds, run.said)
        wait_until_gone(pids, 3)
    assert "Traceback" not in run.said
    assert run.said
