"""Figures of the default run, measured from outside, for the README's table.

    python benchmarks/default_run.py [--runs 3] [--steps N] [-- options of diloco up]

Prints medians over the runs: final loss, goodput, stall share, participation, uptime, bytes relative to the plan,
CPU time of broker and syncer as a share of the wall time, and seconds from `diloco up` to the first merge.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

from measured import Measured, table, up

KEYFRAME_BYTES, BLOCK, SCALE_BYTES = 4, 128, 2


def planned_bytes(run: Measured) -> float:
    """Planned bytes of one learner with int4 both ways: half a byte per parameter and its share of scales,
    up and down, in each merge; the whole model in f32 when it joins and when the run ends.
    """
    merges = run.figures["merges"]
    state = json.loads(next(run.folder.glob("global/version-0/state.json")).read_text())
    parameters = sum(_numel(row[1]) for row in state["layout"] if row[3] == "trainable")
    share = parameters / state["P"] * (0.5 + SCALE_BYTES / BLOCK)
    return merges * 2 * share + 2 * KEYFRAME_BYTES * parameters


def _numel(shape: list[int]) -> int:
    product = 1
    for n in shape:
        product *= n
    return product


def figures(run: Measured) -> dict[str, Any]:
    told = run.figures
    summary = json.loads((run.folder / "summary.json").read_text())
    seeder = max(row["bytes_up"] for row in summary["learners"])
    learner = min(summary["learners"], key=lambda row: row["bytes_up"])
    moved = learner["bytes_up"] + learner["bytes_down"]
    return {
        "val_loss": told["val_loss_last"],
        "goodput": told["goodput"],
        "stall_share": told["stall_share"],
        "participation": told["merge_participation"],
        "uptime": told["uptime"],
        "useful_share": told["useful_share"],
        "bytes_of_plan": round(moved / planned_bytes(run), 3),
        "MB_a_learner": round(moved / 1e6, 2),
        "MB_f32_allreduce_a_learner": round(told["bytes_f32_allreduce"] / len(summary["learners"]) / 1e6, 1),
        "seeder_extra_MB": round((seeder - learner["bytes_up"]) / 1e6, 2),
        "broker_syncer_cpu_share": round((run.cpu_seconds("broker") + run.cpu_seconds("syncer")) / run.wall_seconds, 4),
        "first_merge_seconds": round(run.seconds_to_first_merge or -1, 2),
        "training_seconds": told["seconds"],
        "wall_seconds": round(run.wall_seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="how many runs (seeds 0, 1, ...); default 3")
    parser.add_argument("options", nargs="*", help="options of diloco up")
    asked = parser.parse_args()
    rows = []
    for seed in range(asked.runs):
        rows.append(figures(up("--seed", str(seed), *asked.options)))
        print(json.dumps(rows[-1]), flush=True)
    print(table([{"figure": name, "median": median(r[name] for r in rows), "min": min(r[name] for r in rows),
                  "max": max(r[name] for r in rows)} for name in rows[0]]))  # fmt: skip


if __name__ == "__main__":
    main()
