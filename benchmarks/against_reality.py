"""Goodput and participation of the simulator against those of a real run whose learners are killed at random.

    python benchmarks/against_reality.py [--learners 2] [--steps 400] [--mean-life 25] [--seeds 3]

A real `diloco up --tape` runs, and each of its learners is killed (kill -9) after times drawn from a seed; `up`
restarts it. From the tape the virtual cluster gets only when each incarnation began, its step time, and when it ended.
Prints the figures of both side by side; differences are in percentage points.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from decoupled_diloco.common.config import RunSettings
from decoupled_diloco.common.journal import read_journal
from decoupled_diloco.common.run_folder import RunFolder
from decoupled_diloco.simulator.availability import members_of_tape
from decoupled_diloco.simulator.cost_only import CostOnlyModel
from decoupled_diloco.simulator.network_path import NetworkPath
from decoupled_diloco.simulator.virtual_cluster import RunOutcome, VirtualCluster

LATENCY_SECONDS = 0.005
"""One-way latency of loopback, the broker and both loops."""
FIGURES = ("goodput", "merge_participation", "uptime", "useful_share")


def real_run(place: Path, learners: int, steps: int, mean_life_seconds: float, seed: int) -> dict[str, Any]:
    """One real run with its kills; returns its figures."""
    command = [
        sys.executable, "-P", "-m", "decoupled_diloco.cli", "up", "--run", "it", "--tape", "--json", "--no-evaluator",
        "--learners", str(learners), "--threads", "1", "--steps", str(steps),
    ]  # fmt: skip
    out = place / "out.txt"
    with (place / "err.txt").open("w") as err, out.open("w") as said:
        up = subprocess.Popen(command, cwd=place, stdout=said, stderr=err)
    folder, draw = RunFolder(place / "runs" / "it"), random.Random(seed)
    dies_at = {f"learner-{n}": time.monotonic() + 10 + draw.expovariate(1 / mean_life_seconds)
               for n in range(1, learners + 1)}  # fmt: skip
    while up.poll() is None:
        time.sleep(0.1)
        processes = folder.run_map().get("processes", {})
        for name, when in dies_at.items():
            if time.monotonic() >= when and processes.get(name):
                try:
                    os.kill(processes[name], signal.SIGKILL)
                except ProcessLookupError:
                    continue
                dies_at[name] = time.monotonic() + 5 + draw.expovariate(1 / mean_life_seconds)
    told: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    return told


def virtual_run(place: Path) -> RunOutcome:
    """The virtual cluster with the same incarnations."""
    tape = read_journal(place / "runs" / "it")
    settings = RunSettings.from_map(tape.syncer["settings"])
    parameters = sum(tape.syncer["parameters"])
    backend = CostOnlyModel(
        settings, parameters=parameters, tokens_a_step=128, fragments=len(tape.syncer["parameters"])
    )
    return VirtualCluster(settings, backend, members_of_tape(tape), NetworkPath(latency_seconds=LATENCY_SECONDS)).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--mean-life", type=float, default=25.0, help="seconds between two deaths of a learner")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    worst = dict.fromkeys(FIGURES, 0.0)
    for seed in range(given.seeds):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            real = real_run(place, given.learners, given.steps, given.mean_life, seed)
            virtual = virtual_run(place)
        ours = {**virtual.figures, "goodput": virtual.goodput}
        row: dict[str, Any] = {"seed": seed, "faults": real["faults"], "seconds": [real["seconds"],
                               round(virtual.virtual_seconds, 1)]}  # fmt: skip
        for name in FIGURES:
            row[name] = [real[name], ours[name]]
            difference = 100 * abs(real[name] - ours[name]) if real[name] is not None else math.nan
            worst[name] = max(worst[name], difference)
        print(json.dumps(row), flush=True)
    print("largest differences in points: " + ", ".join(f"{name} {points:.1f}" for name, points in worst.items()))


if __name__ == "__main__":
    main()
