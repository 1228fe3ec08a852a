"""The processes of a small run started one by one, as people and containers start them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from run import MODEL, TEXT, Process

SCHEDULE = ["--sync-every", "4", "--fragments", "2", "--overlap", "1"]


def syncer(place: Path, broker: str, *more: str, steps: int = 12, redis: str = "") -> Process:
    """Run `it`, in place/runs/it; its log is place/syncer.jsonl."""
    environment = {"DILOCO_REDIS": redis, "DILOCO_LOG_FILE": str(place / "syncer.jsonl")}
    run = ["--run", "it", "--steps", str(steps), *SCHEDULE, *MODEL, "--data", TEXT]
    return Process(place, "syncer", "--broker", broker, *run, *more, environment=environment)


def learner(place: Path, broker: str, name: str = "a", *more: str) -> Process:
    own = ["--name", name, "--threads", "1", "--data", TEXT]
    return Process(place / name, "learner", "--broker", broker, *own, *more)


def evaluator(place: Path, broker: str, *more: str) -> Process:
    own = ["--dir", str(place / "runs" / "it"), "--data", TEXT, "--eval-every", "0.5"]
    return Process(place / "evaluator", "evaluator", "--broker", broker, *own, *more)


def events(place: Path, *kinds: str) -> list[dict[str, Any]]:
    """What the syncer's log has of these kinds; the line that is just being written is left out."""
    whole = (place / "syncer.jsonl").read_text().rpartition("\n")[0]
    rows = [json.loads(line) for line in whole.splitlines()]
    return [row for row in rows if row["event"] in kinds]
