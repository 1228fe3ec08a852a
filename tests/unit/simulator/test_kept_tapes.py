"""Tapes of earlier code, replayed: this code's round machine takes the same decisions."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from decoupled_diloco.common.journal import read_journal
from decoupled_diloco.simulator.replay import replay_decisions

TAPES = Path(__file__).parents[2] / "tapes"
EXPECTED = {
    "cost-absent": (187, 84),
    "cost-failures": (241, 120),
    "cost-straggler": (169, 84),
    "real-int8": (169, 84),
    "real-kills": (514, 244),
    "real-plain": (217, 96),
    "real-resumed": (147, 73),
    "virtual-absent": (165, 60),
    "virtual-late": (137, 68),
    "virtual-mix": (103, 51),
}
"""Decisions and merges of each run."""


def unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(TAPES / f"{name}.tar.gz") as kept:
        kept.extractall(folder, filter="data")
    return folder


def test_every_tape_is_replayed() -> None:
    assert {path.name.removesuffix(".tar.gz") for path in TAPES.glob("*.tar.gz")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_same_decisions_are_taken(name: str, tmp_path: Path) -> None:
    verdict = replay_decisions(read_journal(unpacked(name, tmp_path)))
    assert (verdict.decisions, verdict.merges) == EXPECTED[name]
    assert verdict.complete


def test_both_parts_of_a_resumed_run_are_replayed(tmp_path: Path) -> None:
    verdict = replay_decisions(read_journal(unpacked("real-resumed", tmp_path) / "syncer-1.jsonl"))
    assert (verdict.decisions > 0, verdict.merges, verdict.complete) == (True, 47, False)
