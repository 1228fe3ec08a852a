"""Signals that ask a process of ours to stop. Only commands handle them: a program that calls join() has its own."""

from __future__ import annotations

import signal

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_signals() -> list[signal.Signals]:
    """Ctrl-C, SIGTERM and the end of the terminal. The last one not where it is ignored, as nohup has it."""
    return [n for n in _STOP if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
