"""Brokers whose host name leads nowhere, at the start or later: named as that by everybody who looks for them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from decoupled_diloco.common import host_lookup
from decoupled_diloco.common.errors import PeerLost
from decoupled_diloco.common.sockets import Address, PublishSocket, SubscribeSocket, unresolved_of
from decoupled_diloco.learner.discover import discover
from decoupled_diloco.learner.observer import Observer
from decoupled_diloco.monitor.ping import ping
from decoupled_diloco.syncer.transport import Transport
from logged import logged
from torch import nn
from transport import HWM, BrokerChild, context
from waiting import wait_for

NOWHERE = "tcp://nowhere.invalid:5550"
SENTENCE = r"host name nowhere\.invalid cannot be resolved \(.*\); is it spelled right\?"


def test_a_process_that_looks_for_a_broker_whose_name_leads_nowhere_reports_it(tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match=SENTENCE):
        ping(NOWHERE, timeout_seconds=0.3)
    with pytest.raises(PeerLost, match=SENTENCE):
        discover(NOWHERE, timeout_seconds=0.3)
    with logged(tmp_path) as events:
        with pytest.raises(PeerLost, match=SENTENCE):
            Observer(NOWHERE, nn.Linear(2, 2), run="r", join_timeout_seconds=1.0)
        assert len(events("host_unresolved")) == 1
    lines = Transport(NOWHERE, "r", lambda *_: None)
    try:

        def unresolved() -> str:
            lines.wait(0.05)
            return lines.unresolved

        wait_for(unresolved, "the syncer knows it")
        assert lines.refusal == ""
    finally:
        lines.close()


def test_a_name_that_leads_nowhere_any_more_is_named_and_forgotten_once_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, resolve = [True], socket.getaddrinfo

    def resolver(*arguments: Any) -> Any:
        if not known[0]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(*arguments)

    monkeypatch.setattr(host_lookup, "AGAIN_SECONDS", 0.05)
    lookup = host_lookup.Lookup("localhost", resolver)
    monkeypatch.setattr(host_lookup.HostWatch.__init__, "__defaults__", (lambda _: lookup,))
    with BrokerChild() as broker, context() as made:
        address = Address("localhost", broker.address.port)
        lines = [
            PublishSocket(made, address.control_in, hwm_messages=HWM),
            SubscribeSocket(made, address.control_out, hwm_messages=HWM),
        ]  # fmt: skip

        def looked() -> bool:
            for line in lines:
                line.socket.poll(5)
                line.look()
            return all(line._monitor.connected for line in lines)

        wait_for(looked, "both are connected")
        known[0] = False
        assert unresolved_of(lines) == "", "what is connected needs no name"
        broker.kill()
        wait_for(lambda: not looked() and unresolved_of(lines), "the name is named")
        assert unresolved_of(lines).startswith("host name localhost cannot be resolved (Name or service not known)")
        known[0] = True
        broker.start()
        wait_for(looked, "both are connected again")
        assert unresolved_of(lines) == ""
