"""Cost of int4's block size: held-out loss and bytes per parameter, for blocks of 32 to 512 values that share a scale.

    python benchmarks/block_size.py [--seeds 3] [--jobs 2] [--out docs/results/block-size.jsonl]

The block size is a constant of the wire format (ALIGN in common/fragments.py), so each size runs in its own processes,
in which that constant is changed before anything else is loaded. M = 4, int4 both ways, T = 480, the model
of the suites of `diloco compare`. About two minutes on two cores. `--out` stores a row for each training;
docs/results.md quotes their differences.
"""

# ruff: noqa: PLC0415 what is imported must find the constant changed

from __future__ import annotations

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean

from decoupled_diloco.common import fragments
from rich.console import Console
from rich.table import Table

SIZES = (32, 64, 128, 256, 512)


def one(block: int, seed: int) -> tuple[int, int, float, float, float]:
    """(block, seed, loss on part A, on part B, payload bytes a parameter) of one training run."""
    fragments.ALIGN = block
    from decoupled_diloco.common.codec import encoded_bytes
    from decoupled_diloco.common.log import configure
    from decoupled_diloco.experiments.methods import train
    from decoupled_diloco.experiments.suites import SMALL, T, methods
    from decoupled_diloco.learner.task.text import load_corpus

    configure("benchmark", level="warning")
    result = train(methods(SMALL, 4, T)["Decoupled"], seed, load_corpus(None, SMALL.sequence_length))
    length = 512 * 1024
    return block, seed, result.val_a, result.val_b, encoded_bytes("int4", length) / length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="also write the results into this file, one JSON line each")
    given = parser.parse_args()
    jobs = [(block, seed) for seed in range(given.seeds) for block in SIZES]
    with ProcessPoolExecutor(
        given.jobs, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        found = list(pool.map(one, *zip(*jobs, strict=True)))
    table = Table("block", "part A", "part B", "against 128 (part A)", "bytes a parameter")
    usual = {seed: a for block, seed, a, _, _ in found if block == 128}
    for size in SIZES:
        rows = [row for row in found if row[0] == size]
        against = mean(a / usual[seed] - 1 for _, seed, a, _, _ in rows)
        table.add_row(
            str(size), f"{mean(r[2] for r in rows):.4f}", f"{mean(r[3] for r in rows):.4f}", f"{against:+.2%}",
            f"{rows[0][4]:.4f}",
        )  # fmt: skip
    Console().print(table)
    if given.out:
        keys = ("name", "seed", "val_a", "val_b", "bytes_a_parameter")
        rows = (dict(zip(keys, (str(block), *rest), strict=True)) for block, *rest in found)
        given.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
