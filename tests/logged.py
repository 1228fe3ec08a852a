"""The log of what runs inside the tests' own process, read back as events."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from decoupled_diloco.common.log import configure

Events = Callable[[str], list[dict[str, Any]]]


@contextlib.contextmanager
def logged(place: Path) -> Iterator[Events]:
    """While it is entered, events go into a file under `place`; what it gives returns those of one name."""
    file = place / "log.jsonl"
    configure("test", json_file=file, level="debug", terminal=False)

    def events(name: str) -> list[dict[str, Any]]:
        return [row for row in map(json.loads, file.read_text().splitlines()) if row["event"] == name]

    try:
        yield events
    finally:
        configure("", json_file=None, level="info", terminal=True)
