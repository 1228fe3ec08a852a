"""First round of fresh starts: whether it closes with the first delta of every learner, and how soon.

    python benchmarks/first_deltas.py [--starts 20] [-- options of diloco up]

The quorum is all learners, so that the first round cannot close without each learner's first delta; an answer that
the syncer did not list within a second would be sent again (`resent`). Seconds count from the start of
`diloco up`, including everything that a first start does, to the first merge.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from measured import Measured, up

LEARNERS = 2


def events(folder: Path, process: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logs" / f"{process}.jsonl").read_text().splitlines()]


def first_round(run: Measured) -> dict[str, Any]:
    """Result of the round of slot 0."""
    merged = [row for row in events(run.folder, "syncer") if row["event"] == "merged" and row["slot"] == 0]
    names = [row["name"] for row in run.figures["learners"]]
    resent = [row for name in names for row in events(run.folder, name) if row["event"] == "delta_resent"]
    return {
        "closed": bool(merged) and merged[0]["contributors"] == LEARNERS,
        "attempts": merged[0]["attempt"] if merged else 0,
        "resent": len(resent),
        "gaps": sum(row["gaps"] for row in json.loads((run.folder / "summary.json").read_text())["learners"]),
        "seconds": run.seconds_to_first_merge or float("inf"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=20, help="how many runs")
    parser.add_argument("options", nargs="*", help="for diloco up")
    given = parser.parse_args()
    fixed = ["--learners", str(LEARNERS), "--quorum", str(LEARNERS), "--steps", "24", "--no-evaluator"]
    rows = []
    for number in range(1, given.starts + 1):
        rows.append(first_round(up(*fixed, *given.options, every_seconds=0.2)))
        print(number, rows[-1], flush=True)
    seconds = sorted(row["seconds"] for row in rows)
    print(f"first rounds that closed: {sum(row['closed'] for row in rows)} of {len(rows)}")
    print(f"at the first attempt: {sum(row['attempts'] == 1 for row in rows)}")
    print(f"answers sent again: {sum(row['resent'] for row in rows)}; gaps: {sum(row['gaps'] for row in rows)}")
    print(f"seconds to the first merge: {seconds[0]:.1f} to {seconds[-1]:.1f}, median {median(seconds):.1f}")


if __name__ == "__main__":
    main()
