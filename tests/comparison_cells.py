"""Two small cells, and a suite that compares them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from decoupled_diloco.common.config import TaskSettings
from decoupled_diloco.experiments.methods import Cell
from decoupled_diloco.experiments.suites import Contrast, Suite

TASK = TaskSettings(layers=1, width=32, sequence_length=32, batch_sequences=4)


OURS = Cell(name="ours", method="decoupled", steps=24, task=TASK, settings={"sync_every": 6, "fragments": 3})


THEIRS = replace(OURS, name="theirs", method="data-parallel")


PAIR = Suite(
    name="pair", asks="?", cells=(OURS, THEIRS), contrasts=(Contrast(cell="ours", against="theirs", within=0.01),)
)


def row(cell: Cell, seed: int, loss: float) -> dict[str, Any]:
    return {"cell": cell.identity, "name": cell.name, "seed": seed, "val_a": loss, "val_b": loss, "tokens": 1,
            "tokens_merged": 1, "text": "text", "seconds": 1.0, "core_seconds": 1.0}  # fmt: skip
