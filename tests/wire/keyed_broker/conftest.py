"""A broker with keys, with a key for each role."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from keyed_broker import KeyedBroker
from transport import context


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[KeyedBroker]:
    with context() as made:
        built = KeyedBroker(tmp_path / "keys", made)
        try:
            yield built
        finally:
            built.broker.stop()
        assert built.broker.failure is None
