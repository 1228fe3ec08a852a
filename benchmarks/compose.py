"""Containers: time until training starts, size of the broker's image, and rebuild time after a code change.

    python benchmarks/compose.py [--starts 3]

Needs a Docker Engine with Compose v2. Removes the projects, images and volumes that it creates, but not the build
cache. Seconds to the first merge count from `docker compose up`, with images built and nothing else running,
to the first `merged` in the syncer's log; seconds of a stop are those of `docker compose stop` in mid-run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from datetime import datetime
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
PROJECT = "diloco-benchmark"
PORTS = "15550-15553"
BASE = "python:3.11-slim"
LONGEST_SECONDS = 300.0


def compose(*words: str, cwd: Path = ROOT, **variables: str) -> str:
    """Output of a compose command; RuntimeError with its last output if it fails."""
    environment = os.environ | {"DILOCO_PORTS": PORTS} | variables
    done = subprocess.run(
        ["docker", "compose", "-p", PROJECT, "-f", "compose/compose.yaml", *words],
        cwd=cwd, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"docker compose {' '.join(words)}: {done.stderr[-500:]}")
    return done.stdout


def bytes_of(image: str) -> int:
    said = subprocess.run(
        ["docker", "image", "inspect", "--format", "{{.Size}}", image], capture_output=True, text=True, check=True
    )
    return int(said.stdout)


def start() -> dict[str, float]:
    """Seconds of one fresh start of the default run, and of one stop in mid-run."""
    began, clock = time.time(), time.monotonic()
    try:
        compose("up", "-d", "--no-build")
        returned = time.monotonic() - clock
        merged = first_merge(clock)
        clock = time.monotonic()
        compose("stop")
        return {"up_returns": returned, "first_merge": merged - began, "stop": time.monotonic() - clock}
    finally:
        compose("down", "--volumes", "--timeout", "2")


def first_merge(clock: float) -> float:
    """Time of the event in the syncer's log, in unix seconds."""
    while time.monotonic() - clock < LONGEST_SECONDS:
        log = compose("exec", "-T", "syncer", "cat", "/results/run/logs/syncer.jsonl")
        for row in map(json.loads, log.splitlines()):
            if row["event"] == "merged":
                return datetime.fromisoformat(row["ts"]).timestamp()
        time.sleep(0.5)
    raise RuntimeError(f"nothing was merged within {LONGEST_SECONDS:g} s")


def rebuild() -> float:
    """Seconds to rebuild all images after a one-line code change, in a copy of this folder."""
    with tempfile.TemporaryDirectory() as place:
        clone = Path(place) / "clone"
        ignored = shutil.ignore_patterns(".*", "runs", "tests", "__pycache__", "*.egg-info", "build", "dist")
        shutil.copytree(ROOT, clone, ignore=ignored, symlinks=True)
        shutil.copy(ROOT / ".dockerignore", clone)
        compose("build", cwd=clone)
        with (clone / "common" / "log.py").open("a") as file:
            file.write(f"# changed at {time.time()}\n")
        began = time.monotonic()
        compose("build", cwd=clone)
        return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=3, help="how many fresh starts")
    given = parser.parse_args()
    try:
        compose("build")
        beyond = (bytes_of(f"{PROJECT}-broker") - bytes_of(BASE)) / 1e6
        print(f"broker's image beyond {BASE}: {beyond:.1f} MB", flush=True)
        print(f"all images after a change of the code: {rebuild():.1f} s", flush=True)
        rows = []
        for number in range(1, given.starts + 1):
            rows.append(start())
            print(number, {name: round(seconds, 1) for name, seconds in rows[-1].items()}, flush=True)
        for name in rows[0]:
            seconds = sorted(row[name] for row in rows)
            print(f"{name}: {seconds[0]:.1f} to {seconds[-1]:.1f} s, median {median(seconds):.1f} s")
    finally:
        compose("down", "--volumes", "--rmi", "local", "--timeout", "2")


if __name__ == "__main__":
    main()
