"""A running syncer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from syncer_run import SyncerRun, syncer_run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SyncerRun]:
    with syncer_run(tmp_path) as made:
        yield made
