"""The wish to stop: Ctrl-C, SIGTERM or a closed terminal. Once: in good order. Twice: at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Self

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AT_ONCE = 130
"""Exit code after the second wish, as shells have it for Ctrl-C."""


def is_ignored(number: int) -> bool:
    """A closed terminal is no wish of a program that was started by nohup."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


class Wish:
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
        heard = [number for number in NUMBERS if not is_ignored(number)]
        self._before = {number: signal.signal(number, self._heard) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.count += 1
        if self.count > 1:
            self.at_once()
            if sys.stderr.isatty():
                shown = f"\x1b[?25h\n{self.last_words}\n"  # the live display had hidden the cursor
                with suppress(OSError):
                    os.write(2, os.fsencode(shown))
            os._exit(AT_ONCE)
