"""Memory growth over a long run: resident memory of every process, with a small model and thousands of merges.

    python benchmarks/long_run.py [--merges 5000]

Prints for each process MiB after a tenth of the run, halfway and at the end, and the growth over the last half.
"""

from __future__ import annotations

import argparse
from statistics import median

from measured import Sample, table, up


def around(rows: list[Sample], share: float) -> float:
    """Median MiB of the samples near this share of the run."""
    middle, width = int(share * len(rows)), max(1, len(rows) // 20)
    part = rows[max(0, middle - width) : middle + width] or rows[-1:]
    return median(s.rss_bytes for s in part) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--merges", type=int, default=5000, help="default 5000")
    asked = parser.parse_args()
    run = up(
        "--steps", str(asked.merges), "--layers", "1", "--width", "32", "--sequence-length", "16",
        "--batch-sequences", "1", "--sync-every", "8", "--fragments", "8", "--checkpoint-every", "500",
        "--eval-every", "10",
    )  # fmt: skip
    rows = []
    for name, samples in sorted(run.processes.items()):
        early, middle, end = (around(samples, share) for share in (0.1, 0.5, 1.0))
        rows.append({"process": name, "MiB at 10 %": round(early, 1), "at 50 %": round(middle, 1),
                     "at the end": round(end, 1), "growth in the last half": f"{100 * (end / middle - 1):.1f} %",
                     "CPU seconds": round(run.cpu_seconds(name), 1)})  # fmt: skip
    told = run.figures
    print(f"{told['merges']} merges in {told['seconds']} s, faults {told['faults']}, "
          f"participation {told['merge_participation']}")  # fmt: skip
    print(table(rows))


if __name__ == "__main__":
    main()
