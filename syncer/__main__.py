"""`diloco syncer`: read the settings, build the parts, run. Exit codes are those of the errors (common.errors)."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

import torch

from ..common.config import SyncerConfig
from ..common.errors import Malformed
from ..common.log import get_logger
from ..common.registry import Registry
from .checkpoint import Checkpoints
from .clock import SteadyClock
from .lines import Lines
from .loop import Syncer
from .parts import Parts
from .telling import Teller
from .writer import CheckpointWriter


def main(config: SyncerConfig) -> None:
    """Serve the run until it is over or SIGTERM/SIGINT asks for a stop. DilocoError says what went wrong."""
    torch.set_num_threads(1)
    log = get_logger("syncer")
    run = config.settings.run
    teller = Teller(Registry(config.redis, run, log), log, run)

    def malformed(topic: bytes, wrong: Malformed) -> None:
        teller.reject(sender_of(topic), wrong.reason, message="?", detail=str(wrong)[:200])

    lines = Lines(config.broker, run, malformed)
    checkpoints = Checkpoints(Path(config.directory))
    syncer = Syncer(Parts(config, lines, checkpoints, CheckpointWriter(checkpoints), teller, SteadyClock()))

    def ask_to_stop(_signal: int, _frame: FrameType | None) -> None:
        syncer.stop()

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop)
    try:
        syncer.run()
    finally:
        teller.registry.close()
        lines.close()


def sender_of(topic: bytes) -> str:
    """The name at the end of a learner's topic, as far as it can be believed; '?' where there is none."""
    parts = topic.decode("ascii", "replace").split("/")
    return parts[-2][:40] if len(parts) > 3 and parts[-2].isprintable() else "?"
