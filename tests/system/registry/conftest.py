"""A Redis server with a registry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from registry_and_redis import RegistryAndRedis
from waiting import wait_for


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[RegistryAndRedis]:
    pair = RegistryAndRedis(tmp_path / "store")
    yield pair
    pair.close()


@pytest.fixture
def full_pair(pair: RegistryAndRedis) -> RegistryAndRedis:
    pair.publish_everything()
    wait_for(lambda: len(pair.seen()["events"]) == 1, "everything is written")
    return pair
