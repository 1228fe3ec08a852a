"""What the syncer takes in one turn, whatever is thrown at it."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

import pytest
from decoupled_diloco.common.wire import Fetch, Goodbye
from decoupled_diloco.syncer.transport import Transport

FLOOD = Fetch(run="run", name="a", incarnation=1, epoch=1, what="update", fragment=0, version=1, chunks=())
OTHER = Goodbye(run="run", name="b", incarnation=1, reason="left", local_steps=0, tokens=0)


def test_a_flood_of_control_messages_ends_a_turn_so_that_bulk_rounds_and_beats_have_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines, most = Transport("tcp://127.0.0.1:1", "run", lambda *_: None), 10_000_000
    try:
        lines._ready = {lines._control.socket, lines._bulk.socket}
        monkeypatch.setattr(lines._control, "receive", lambda: FLOOD)
        bulk = [OTHER]
        monkeypatch.setattr(lines._bulk, "receive", lambda: bulk.pop() if bulk else None)
        last: deque[tuple[int, Any]] = deque(enumerate(islice(lines.receive(), most)), maxlen=1)
        taken, message = last.pop()
        assert taken < most - 1
        assert message is OTHER
    finally:
        lines.close()
