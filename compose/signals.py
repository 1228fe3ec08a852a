"""The wish to stop: Ctrl-C, SIGTERM or a closed terminal. Once: in good order. Twice: at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from ..common.signals import stop_signals

AT_ONCE = 130
"""Exit code after the second wish, as shells have it for Ctrl-C."""


class StopRequest:
    """While it is entered, signals only set the wish; the second one calls `at_once` and ends the process."""

    def __init__(self) -> None:
        self.count = 0
        self.at_once: Callable[[], None] = lambda: None
        self.last_words = ""
        """What a person at a terminal reads after the second wish."""
        self._before: dict[int, Any] = {}

    @property
    def stop(self) -> bool:
        return self.count > 0

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._heard) for number in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.stop and number == signal.SIGHUP:  # a terminal that closes may send it twice; it is no second wish
            return
        self.count += 1
        if self.count > 1:
            self.at_once()
            if sys.stderr.isatty():
                shown = f"\x1b[?25h\n{self.last_words}\n"  # the live display had hidden the cursor
                with suppress(OSError):
                    os.write(2, os.fsencode(shown))
            os._exit(AT_ONCE)
