"""Ctrl-C while a run starts: it ends within seconds and leaves no process."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from run import START_SECONDS, Run, wait_until_ended
from waiting import wait_for

pytestmark = pytest.mark.timeout(400)  # whole runs, on a machine that may be busy with others


@pytest.mark.parametrize("moment", range(4))
def test_an_interrupt_at_any_moment_of_a_start_ends_it_in_time(tmp_path: Path, moment: int) -> None:
    seconds = random.Random(f"moment {moment}").uniform(0, 6)
    with Run(tmp_path, evaluator=True) as run:
        wait_for(run.folder.path.exists, "its folder exists", START_SECONDS)
        begun = time.monotonic()
        wait_for(lambda: time.monotonic() - begun >= seconds, "the moment")
        pids = list(run.folder.run_map().get("processes", {}).values())
        code = run.interrupt()
        assert code == 0, (seconds, run.output)
        wait_until_ended(pids, 3)
    assert "Traceback" not in run.output
    assert run.output
