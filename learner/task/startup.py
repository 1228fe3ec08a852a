"""Process startup shared by the built-in learner and the evaluator: stop signals, task settings, device check."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import torch

from ...common.config import TaskSettings
from ...common.errors import SettingError
from ...common.signals import stop_signals
from ...common.wire import Beat


class StopRequest:
    """The wish to stop, as SIGTERM, SIGINT and SIGHUP bring it.

    While `at_once` is true a signal raises KeyboardInterrupt in the main thread; otherwise it only sets `wished`, for
    a loop to see. A second signal ends the process, but for SIGHUP, which a terminal that closes may send twice.
    """

    def __init__(self) -> None:
        self.wished = threading.Event()
        self.at_once = True
        for number in stop_signals():
            signal.signal(number, self)

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.wished.set()
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
        if self.at_once:
            raise KeyboardInterrupt


def task_of(beat: Beat) -> TaskSettings:
    """What the run trains; SettingError where its learners bring a model of their own."""
    if not beat.task:
        raise SettingError(
            f"run {beat.run} trains a model that its learners bring; join it from your own script with "
            "decoupled_diloco.join()"
        )
    return TaskSettings.from_map(beat.task)


def check_device(device: str) -> torch.device:
    """The device called `device`; SettingError if this machine or this torch does not have it."""
    try:
        place = torch.device(device)
    except RuntimeError as wrong:
        raise SettingError(f"--device {device} is unknown; choose cpu, cuda, or cuda:N (the N-th from 0 on)") from wrong
    try:
        torch.empty(1, dtype=torch.float32, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as wrong:
        raise SettingError(f"--device {device} cannot be used here: {str(wrong).splitlines()[0]}") from wrong
    return place
