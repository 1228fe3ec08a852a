"""For all tests: one thread of torch. Several on a busy machine wait for one another and make tiny models very slow."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _as_urgent_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is run inside the tests' own process must not make all that follows wait for other programs."""
    monkeypatch.setattr(os, "nice", lambda _: 0)
