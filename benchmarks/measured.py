"""Runs `diloco up` as a user would and measures its processes from outside: CPU seconds, memory, milestones.

Used by the other benchmarks. Linux only: it reads /proc.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

DILOCO = [sys.executable, "-P", "-m", "decoupled_diloco.cli"]
TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Sample:
    """One sample of one process."""

    at: float
    cpu_seconds: float
    rss_bytes: int


@dataclass
class Measured:
    """Reported figures of one run, and samples of its processes."""

    figures: dict[str, Any]
    folder: Path
    wall_seconds: float
    seconds_to_first_merge: float | None
    """Seconds from starting `diloco up` to the first merge, by Redis or the log."""
    processes: dict[str, list[Sample]] = field(default_factory=dict)

    def cpu_seconds(self, name: str) -> float:
        rows = self.processes.get(name, [])
        return rows[-1].cpu_seconds if rows else 0.0


def up(*options: str, directory: Path | None = None, every_seconds: float = 0.5) -> Measured:
    """`diloco up OPTIONS --json`, sampled until it ends. RuntimeError with its last output if it fails."""
    home = directory or Path(tempfile.mkdtemp(prefix="diloco-bench-"))
    folder = home / "run"
    began, wall = time.time(), time.monotonic()
    with (home / "stderr").open("w") as errors:
        child = subprocess.Popen(
            [*DILOCO, "up", "--dir", str(folder), "--json", *options], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        seen: dict[str, list[Sample]] = {}
        while child.poll() is None:
            _sample(folder, seen)
            time.sleep(every_seconds)
    out = child.stdout.read() if child.stdout else ""
    if child.returncode:
        raise RuntimeError(f"diloco up ended with {child.returncode}: {(home / 'stderr').read_text()[-500:]}")
    return Measured(
        figures=json.loads(out.strip().splitlines()[-1]),
        folder=folder,
        wall_seconds=time.monotonic() - wall,
        seconds_to_first_merge=_first_merge(folder, began),
        processes=seen,
    )


def _sample(folder: Path, seen: dict[str, list[Sample]]) -> None:
    try:
        processes = json.loads((folder / "run.json").read_text()).get("processes", {})
    except (OSError, ValueError):
        return
    for name, told in processes.items():
        pid = told["pid"] if isinstance(told, dict) else told
        sample = read_process(pid) if pid else None
        if sample is not None:
            seen.setdefault(name, []).append(sample)


def read_process(pid: int) -> Sample | None:
    """CPU seconds and resident bytes of a process; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return Sample(time.monotonic(), (int(fields[11]) + int(fields[12])) / TICK, int(fields[21]) * PAGE)


def _first_merge(folder: Path, began: float) -> float | None:
    with (folder / "logs" / "syncer.jsonl").open() as lines:
        for line in lines:
            row = json.loads(line)
            if row["event"] == "merged":
                return datetime.fromisoformat(row["ts"]).timestamp() - began
    return None


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys as a Markdown table."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines)
