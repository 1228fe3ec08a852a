"""For all tests: one thread of torch, since several wait for one another on a busy machine; and property tests that try
the same examples each time (searching.py).
"""

from __future__ import annotations

import os

import pytest
import searching  # noqa: F401 its profiles

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _as_urgent_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is run inside the tests' own process must not make all that follows wait for other programs."""
    monkeypatch.setattr(os, "nice", lambda _: 0)
