"""Benefit of more learners: final loss of 1, 2 and 4 learners with the same steps, paired by seed.

    python benchmarks/more_learners.py [--seeds 3] [--learners 1 2 4] [--out FILE.jsonl] [-- options of diloco up]

One learner is `diloco up --learners 1`: outer rate 1 without momentum and f32 both ways, so that the global model IS
the learner's own. Results are appended to --out, and runs that it already has are not repeated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from measured import table, up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ...; default 3")
    parser.add_argument("--learners", type=int, nargs="+", default=[1, 2, 4], help="default 1 2 4")
    parser.add_argument("--out", type=Path, default=Path("runs/more_learners.jsonl"), help="results, one line each")
    parser.add_argument("options", nargs="*", help="options of diloco up")
    asked = parser.parse_args()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    done = {(row["seed"], row["learners"]): row for row in known}
    for seed in range(asked.seeds):
        for learners in asked.learners:
            if (seed, learners) in done:
                continue
            alone = ["--codec-up", "f32", "--codec-down", "f32"] if learners == 1 else []
            options = ["--seed", str(seed), "--learners", str(learners), "--threads", "1", *alone, *asked.options]
            told = up(*options).figures
            row = {"seed": seed, "learners": learners, "val_loss": told["val_loss_last"], "steps": told["steps"],
                   "goodput": told["goodput"], "participation": told["merge_participation"]}  # fmt: skip
            done[seed, learners] = row
            with asked.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
    print(
        table(
            [
                {"seed": seed} | {f"{n} learners": done[seed, n]["val_loss"] for n in asked.learners}
                for seed in range(asked.seeds)
            ]
        )
    )


if __name__ == "__main__":
    main()
