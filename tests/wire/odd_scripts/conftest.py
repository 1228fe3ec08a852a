"""A broker, and shorter periods."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from decoupled_diloco.learner import core, join_protocol
from scripted_syncer import running_broker


@pytest.fixture(autouse=True)
def _sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_protocol, "HELLO_SECONDS", 0.05)
    monkeypatch.setattr(core, "ALIVE_SECONDS", 0.1)


@pytest.fixture(scope="module")
def broker() -> Iterator[str]:
    with running_broker() as address:
        yield address
