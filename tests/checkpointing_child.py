"""Forks children that merge and checkpoint as fast as they can, so that a test can kill -9 one after the other.

Reads one directory a line; answers `pid N`, whatever the child says, and `gone` when the child was reaped. It forks
from a process that has loaded torch and run nothing, so that a child is at work within milliseconds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from decoupled_diloco.common.codec import model_hash
from decoupled_diloco.syncer.checkpoint import Checkpoints
from decoupled_diloco.syncer.checkpoint_writer import CheckpointWriter
from decoupled_diloco.syncer.global_model import Snapshot
from states import LAYOUT, PLAN, STATIC, advance, settings, vectors

SETTINGS = settings(outer_momentum=0.9, outer_lr=0.7)


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # one system call, so that a kill leaves whole lines


def marks(snapshot: Snapshot) -> list[str]:
    """What tells whether the parts of a checkpoint are of one moment."""
    return [model_hash(group) for group in (snapshot.public, snapshot.residual, snapshot.momentum or ())]


def work(directory: Path) -> None:
    """Seed if need be, go on from the newest checkpoint, say `saved ROUND` for each one that is durable."""
    store = Checkpoints(directory)
    store.lock()
    if not store.is_seeded():
        store.write_version_zero(LAYOUT, PLAN, SETTINGS, vectors(), STATIC)
    say("seeded")
    restored = store.restore(SETTINGS)
    assert restored is not None
    state, round_ = restored.state, (restored.bookkeeping or {"round": 0})["round"]
    writer = CheckpointWriter(store)
    while True:
        round_ += 1
        advance(state, seed=round_)
        snapshot = state.snapshot()
        writer.submit(snapshot, {"round": round_, "marks": marks(snapshot)}, t=round_)
        for outcome in writer.outcomes():
            say(f"failed {outcome.error}" if outcome.error else f"saved {outcome.t}")


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            work(Path(line.rstrip("\n")))
        say(f"pid {pid}")
        os.waitpid(pid, 0)
        say("gone")


if __name__ == "__main__":
    main()
