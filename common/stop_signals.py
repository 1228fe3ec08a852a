"""Signals that request a stop. Only the commands handle them; a program that calls join() keeps its own handlers."""

from __future__ import annotations

import signal

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_signals() -> list[signal.Signals]:
    """SIGINT (Ctrl-C), SIGTERM and SIGHUP (closed terminal); not SIGHUP where it is ignored, as under nohup."""
    return [each for each in _STOP if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]
