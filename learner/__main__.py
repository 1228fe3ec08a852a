"""The built-in learner as a process: hears of a run at the broker's address, joins it, trains until it is over."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import torch

from ..common.config import LearnerConfig, RunSettings, TaskSettings
from ..common.errors import SettingError
from ..common.log import get_logger
from ..common.wire import Beat
from .loop import make_optimizer, train
from .observer import discover
from .session import join
from .text import batches, load_corpus
from .transformer import Transformer

log = get_logger("learner")


def main(config: LearnerConfig, *, data: Path | None = None, device: str = "cpu", threads: int = 1) -> int:
    """Train until the run is over or a signal asks to leave; the exit code. Raises a DilocoError with its own code.

    The text is read before the run hears of this learner, so that one without data never counts as a member.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    place = check_device(device)
    torch.set_num_threads(threads)
    beat = discover(config.broker, config.run, config.join_timeout_seconds)
    settings, task = RunSettings.from_map(beat.settings), task_of(beat)
    corpus = load_corpus(data, task.sequence_length)
    log.info("text_ready", source=corpus.source, tokens=corpus.tokens, sha256=corpus.sha256)
    model = Transformer(task, settings.seed).to(place)
    optimizer = make_optimizer(model)
    with join(config.broker, model, optimizer, name=config.name, run=beat.run, data_hash=corpus.sha256) as session:
        stream = batches(
            corpus.train, task.batch_sequences, task.sequence_length,
            seed=settings.seed, name=config.name, incarnation=session.incarnation,
        )  # fmt: skip
        train(session, model, optimizer, stream, inner_lr=task.inner_lr, stop=stop)
    log.info("learner_stopped", finished=session.finished)
    return 0


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
