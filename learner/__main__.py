"""The built-in learner as a process: hears of a run at the broker's address, joins it, trains until it is over."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType

import torch

from ..common.config import LearnerConfig, RunSettings, TaskSettings
from ..common.errors import SettingError
from ..common.log import get_logger
from ..common.wire import Beat
from .discover import discover
from .loop import make_optimizer, train
from .session import Session, join
from .text import Batches, Corpus, batches, load_corpus
from .transformer import Transformer

log = get_logger("learner")


class Leave:
    """The wish to stop, as SIGTERM and SIGINT bring it: at once while nothing has begun, else at a step boundary."""

    def __init__(self) -> None:
        self.wished = threading.Event()
        self.at_once = True
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self)

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.wished.set()
        signal.signal(number, signal.SIG_DFL)  # the second one does not ask
        if self.at_once:
            raise KeyboardInterrupt


def main(config: LearnerConfig, *, data: Path | None = None, device: str = "cpu", threads: int = 1) -> int:
    """Train until the run is over or a signal asks to leave; the exit code. Raises a DilocoError with its own code.

    The text is read before the run hears of this learner, so that one without data never counts as a member.
    """
    leave = Leave()
    place = check_device(device)
    torch.set_num_threads(threads)
    try:
        beat = discover(config.broker, config.run, config.join_timeout_seconds)
        task, seed = task_of(beat), RunSettings.from_map(beat.settings).seed
        corpus = load_corpus(data, task.sequence_length)
        log.info("text_ready", source=corpus.source, tokens=corpus.tokens, sha256=corpus.sha256)
        model = Transformer(task, seed).to(place)
        optimizer = make_optimizer(model)
        session = join(
            config.broker, model, optimizer, name=config.name, run=beat.run, data_hash=corpus.sha256,
            join_timeout_seconds=config.join_timeout_seconds, orphan_timeout_seconds=config.orphan_timeout_seconds,
            directory=config.directory,
        )  # fmt: skip
        leave.at_once = False
    except KeyboardInterrupt:
        log.info("left_before_joining", learner=config.name)
        return 0
    with session:
        stream = stream_of(session, corpus, task, seed)
        train(session, model, optimizer, stream, inner_lr=task.inner_lr, stop=leave.wished)
    log.info("learner_stopped", learner=config.name, finished=session.finished, local_steps=session.local_steps)
    return 0


def stream_of(session: Session, corpus: Corpus, task: TaskSettings, seed: int) -> Batches:
    """This learner's own batches: another stream in each of its lives."""
    return batches(
        corpus.train, task.batch_sequences, task.sequence_length,
        seed=seed, name=session.name, incarnation=session.incarnation,
    )  # fmt: skip


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
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as wrong:
        raise SettingError(f"--device {device} cannot be used here: {str(wrong).splitlines()[0]}") from wrong
    return place
