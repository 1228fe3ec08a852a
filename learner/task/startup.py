"""Process startup shared by the built-in learner and the evaluator: stop signals, task settings, device check."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import torch

from ...common.config import TaskSettings
from ...common.errors import SettingError
from ...common.stop_signals import stop_signals
from ...common.wire import Beat


class StopFlag:
    """Flag that SIGTERM, SIGINT or SIGHUP sets.

    While `interrupts` is true, a signal raises KeyboardInterrupt in the main thread; otherwise it only sets
    `requested`. A second signal ends the process, except SIGHUP, which a closing terminal may send twice.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.interrupts = True
        for number in stop_signals():
            signal.signal(number, self)

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.requested.set()
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
        if self.interrupts:
            raise KeyboardInterrupt


def task_of(beat: Beat) -> TaskSettings:
    """Task settings of the run; SettingError if its learners bring their own model."""
    if not beat.task:
        raise SettingError(
            f"run {beat.run} trains a model of its learners' own; join it from your own script with "
            "decoupled_diloco.join()"
        )
    return TaskSettings.from_map(beat.task)


def check_device(device: str) -> torch.device:
    """The torch device `device`; SettingError if this machine or this torch lacks it."""
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise SettingError(f"--device {device} is unknown; choose cpu, cuda, or cuda:N (the N-th from 0 on)") from error
    try:
        torch.empty(1, dtype=torch.float32, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SettingError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}") from error
    return place
