"""Fixtures of the tests of the link: a broker, a scripted syncer with a seeded run, and a joined learner."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from decoupled_diloco.learner import core, join_protocol, public_model
from link_trainer import Trainer, syncer_at, trainer
from scripted_syncer import ScriptedSyncer, running_broker


@pytest.fixture(autouse=True)
def _sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens each second in a real run happens ten times as often."""
    monkeypatch.setattr(join_protocol, "HELLO_SECONDS", 0.05)
    monkeypatch.setattr(core, "ALIVE_SECONDS", 0.1)
    monkeypatch.setattr(public_model, "GAP_SECONDS", 0.3)


@pytest.fixture(scope="module")
def broker() -> Iterator[str]:
    with running_broker() as address:
        yield address


@pytest.fixture
def syncer(broker: str) -> Iterator[ScriptedSyncer]:
    with syncer_at(broker) as running:
        yield running


@pytest.fixture
def me(broker: str, syncer: ScriptedSyncer) -> Iterator[Trainer]:
    joined = trainer(broker)
    yield joined
    joined.session.close("stopped")
