"""Built-in learner process: discovers a run at the broker's address, joins it, and trains until it ends."""

from __future__ import annotations

from pathlib import Path

import torch

from ...common.config import LearnerConfig, RunSettings, TaskSettings
from ...common.log import get_logger
from ..discover import discover
from ..session import Session, join
from .loop import make_optimizer, train
from .startup import StopFlag, check_device, task_of
from .text import Batches, Corpus, batches, check_exists, load_corpus
from .transformer import Transformer

log = get_logger("learner")


def main(config: LearnerConfig, *, data: Path | None = None, device: str = "cpu", threads: int = 1) -> int:
    """Train until the run is over or a stop signal arrives; returns the exit code. Raises a DilocoError with its own
    code.

    The text is read before joining, so that a learner without data never counts as a member.
    """
    check_exists(data)
    stop_flag = StopFlag()
    torch_device = check_device(device)
    torch.set_num_threads(threads)
    # The first optimizer loads further torch modules, which takes a second: do it before joining.
    torch.optim.SGD([torch.zeros(1, dtype=torch.float32, device="cpu")])
    try:
        beat = discover(config.broker, config.run, config.join_timeout_seconds, config.key)
        task, seed = task_of(beat), RunSettings.from_map(beat.settings).seed
        corpus = load_corpus(data, task.sequence_length)
        log.info("text_ready", source=corpus.source, tokens=corpus.tokens, sha256=corpus.sha256[:16])
        if beat.data_hash not in ("", corpus.sha256):
            log.warning("text_differs", run=beat.run, sentence="the run began with another text; it now trains on both")
        model = Transformer(task, seed).to(torch_device)
        optimizer = make_optimizer(model)
        session = join(
            config.broker, model, optimizer, name=config.name, run=beat.run, data_hash=corpus.sha256, key=config.key,
            join_timeout_seconds=config.join_timeout_seconds, orphan_timeout_seconds=config.orphan_timeout_seconds,
            directory=config.directory, tape=config.tape,
        )  # fmt: skip
        stop_flag.interrupts = False
    except KeyboardInterrupt:
        log.info("left_before_joining", learner=config.name)
        return 0
    with session:
        stream = _stream_of(session, corpus, task, seed)
        train(session, model, optimizer, stream, inner_lr=task.inner_lr, stop=stop_flag.requested)
    log.info("learner_stopped", learner=config.name, finished=session.finished, local_steps=session.local_steps)
    return 0


def _stream_of(session: Session, corpus: Corpus, task: TaskSettings, seed: int) -> Batches:
    """This learner's batches: each incarnation has a different stream."""
    return batches(
        corpus.train, task.batch_sequences, task.sequence_length,
        seed=seed, name=session.name, incarnation=session.incarnation,
    )  # fmt: skip
