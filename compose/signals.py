"""Stop request: the first SIGINT, SIGTERM or SIGHUP asks for a graceful stop; the second kills the children."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from ..common.stop_signals import stop_signals

_INTERRUPTED = 130
"""Exit code after the second signal, as in shells after Ctrl-C."""


class StopRequest:
    """Handles stop signals inside its `with` block. The second signal calls `on_second` and ends the process."""

    def __init__(self) -> None:
        self.count = 0
        self.on_second: Callable[[], None] = lambda: None
        self.second_message = ""
        """Printed to a terminal after the second signal."""
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self.count > 0

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested and number == signal.SIGHUP:  # a closing terminal may send it twice: no second request
            return
        self.count += 1
        if self.count > 1:
            self.on_second()
            if sys.stderr.isatty():
                shown = f"\x1b[?25h\n{self.second_message}\n"  # the live display has hidden the cursor
                with suppress(OSError):
                    os.write(2, os.fsencode(shown))
            os._exit(_INTERRUPTED)
