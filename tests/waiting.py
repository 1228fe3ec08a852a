"""Waiting for a state instead of sleeping: what tests of threads, sockets and processes use."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PAUSE_SECONDS = 0.01


def wait_for(predicate: Callable[[], T], what: str, seconds: float = 30) -> T:
    """What `predicate` returns, as soon as that is true; AssertionError with the sentence `what` after so many seconds.

    An exception of the predicate is not caught: a state that cannot come should fail at once.
    """
    deadline = time.monotonic() + seconds
    while True:
        last = predicate()
        if last:
            return last
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what}: not so within {seconds:g} s (last: {last!r})")
        time.sleep(PAUSE_SECONDS)
