"""A broker in this process with its clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from broker_clients import BrokerClients
from transport import (
    broker_here,
    context,
)


@pytest.fixture
def clients() -> Iterator[BrokerClients]:
    with broker_here() as (broker, address), context() as made:
        built = BrokerClients(broker, address, made)
        yield built
