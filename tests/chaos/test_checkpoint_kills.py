"""A process that checkpoints as fast as it can is killed -9 at random moments; the next one always goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import checkpointing_child
import pytest
from checkpointing_child import SETTINGS, marks
from decoupled_diloco.syncer.checkpoint import Checkpoints, Restored
from states import fresh

KILLS = 30


@pytest.fixture
def nursery() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, checkpointing_child.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def said(nursery: subprocess.Popen[str]) -> list[str]:
    assert nursery.stdout is not None
    words = nursery.stdout.readline().split()
    assert words, f"the nursery died with {nursery.poll()}"
    return words


def run_and_kill(nursery: subprocess.Popen[str], directory: Path, saves: int, seconds: float) -> tuple[bool, int]:
    """Kill a child so many seconds after its birth and `saves` checkpoints.

    Returns whether it said that it had seeded, and the last round that it called saved.
    """
    assert nursery.stdin is not None
    nursery.stdin.write(f"{directory}\n")
    nursery.stdin.flush()
    seeded, rounds, pid = False, [0], 0
    while (words := said(nursery)) != ["gone"]:
        assert words[0] in ("pid", "seeded", "saved"), words
        seeded = seeded or words == ["seeded"]
        if words[0] == "pid":
            pid = int(words[1])
        elif words[0] == "saved":
            rounds.append(int(words[1]))
        if pid and len(rounds) > saves:
            time.sleep(seconds)  # the moment of the kill: this is the fault, nothing waits for it
            os.kill(pid, signal.SIGKILL)
            pid = 0
    return seeded, rounds[-1]


def restored_in_one_piece(directory: Path) -> Restored | None:
    """What the next process finds, after checking that all its parts are of the same moment."""
    store = Checkpoints(directory)
    store.lock()
    restored = store.restore(SETTINGS)
    names = {place.name for place in directory.iterdir() if place.name.startswith((".", "damaged"))}
    store.unlock()
    assert not names, "leftovers are cleaned, and a kill damages nothing"
    if restored is None:
        return None
    assert restored.warnings == ()
    snapshot = restored.state.snapshot()
    if restored.bookkeeping is None:
        assert restored.state.model_hash() == fresh().model_hash()
        assert snapshot.versions == (0, 0, 0)
    else:
        assert marks(snapshot) == restored.bookkeeping["marks"]
        assert set(snapshot.versions) == {restored.bookkeeping["round"]}
    return restored


def test_whenever_it_is_killed_the_newest_complete_checkpoint_is_found(
    nursery: subprocess.Popen[str], tmp_path: Path
) -> None:
    moments = random.Random(30)
    directory, before = tmp_path, 0
    for kill in range(KILLS):
        early = kill % 5 == 0  # in a new directory: also version 0 is complete or not there
        if early:
            directory, before = tmp_path / f"run {kill}", 0
        saves, seconds = (0, moments.uniform(0, 0.02)) if early else (moments.randint(1, 3), moments.uniform(0, 0.03))
        seeded, saved = run_and_kill(nursery, directory, saves, seconds)
        restored = restored_in_one_piece(directory) if directory.exists() else None
        assert restored is not None or not seeded
        found = 0 if restored is None or restored.bookkeeping is None else restored.bookkeeping["round"]
        assert found >= max(saved, before), f"kill {kill}, {seconds:.3f} s after {saves} checkpoints"
        assert early or found > before
        before = found
