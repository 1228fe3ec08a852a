"""The syncer's steady clock."""

from __future__ import annotations

import time

import pytest
from decoupled_diloco.syncer.steady_clock import PAUSE_SECONDS, SteadyClock


def test_time_in_which_the_syncer_was_suspended_or_had_no_broker_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    real = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: real[0])
    clock = SteadyClock()
    begun = clock.now()

    def passes(seconds: float, *, connected: bool = True) -> float:
        before = clock.now()
        real[0] += seconds
        clock.turn(connected=connected)
        return clock.now() - before

    assert passes(0.5) == pytest.approx(0.5)
    assert passes(3600.0) <= PAUSE_SECONDS / 2, "suspended"
    assert passes(1.0, connected=False) == 0, "without a broker"
    assert passes(0.5) == pytest.approx(0.5)
    assert clock.now() - begun <= 1.0 + PAUSE_SECONDS / 2
