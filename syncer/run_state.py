"""What the syncer's doors share: the parts it owns, and what is true of the run right now."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from ..common.config import RunSettings, SyncerConfig
from ..common.wire import Update
from .checkpoint import Checkpoints
from .checkpoint_writer import CheckpointWriter
from .clock import SteadyClock
from .deltas import DeltaAssembler, NormFilter
from .epoch_discovery import EpochDiscovery
from .final_buffers import FinalBuffers
from .final_confirmations import Confirmations
from .global_model import GlobalModel
from .metrics import RunMetrics
from .rejections import Rejections
from .rounds import Rounds
from .stall_diagnosis import StallMonitor
from .telemetry import Telemetry
from .transport import Transport

Phase = Literal["waiting", "seeding", "running", "draining", "finished", "stopping"]
DIGESTS_KEPT = 4


@dataclass(frozen=True)
class Components:
    """What a syncer owns for its whole life."""

    config: SyncerConfig
    lines: Transport
    listening: EpochDiscovery
    checkpoints: Checkpoints
    writer: CheckpointWriter
    teller: Telemetry
    clock: SteadyClock


def assemble(config: SyncerConfig, lines: Transport, listening: EpochDiscovery, teller: Telemetry) -> Components:
    """The parts of a syncer whose directory is `config.directory`."""
    torch.set_num_threads(1)
    checkpoints = Checkpoints(Path(config.directory))
    return Components(config, lines, listening, checkpoints, CheckpointWriter(checkpoints), teller, SteadyClock())


@dataclass
class Served:
    """What exists once version 0 is there: the model, and the machines that decide on it."""

    state: GlobalModel
    rounds: Rounds
    figures: RunMetrics
    screen: NormFilter = field(init=False)
    intake: DeltaAssembler = field(init=False)
    digests: list[dict[int, str]] = field(init=False)
    """Per fragment: version -> digest of the last few, to compare with what learners say they hold."""
    updates: dict[int, Update] = field(default_factory=dict)
    """Per fragment: the last Update as it went out (its first chunk), to be sent again."""

    def __post_init__(self) -> None:
        P = self.state.plan.P
        self.screen = NormFilter(P, most_steps=2 * self.state.settings.sync_every)
        self.intake = DeltaAssembler(self.rounds, self.state, self.screen)
        self.digests = [{self.state.versions[p]: self.state.keyframe(p)[2]} for p in range(P)]

    def remember(self, update: Update) -> None:
        known = self.digests[update.fragment]
        known[update.version] = update.digest
        while len(known) > DIGESTS_KEPT:
            del known[min(known)]
        self.updates[update.fragment] = update

    def bookkeeping(self, run: RunState) -> dict[str, Any]:
        """What a checkpoint keeps beside the model."""
        return {
            "phase": run.phase,
            "epoch": run.epoch,
            "rounds": self.rounds.to_json(),
            "figures": self.figures.to_json(),
        }


@dataclass
class RunState:
    """What is true of the run now."""

    settings: RunSettings
    epoch: int = 0
    phase: Phase = "waiting"
    model_hash: str = ""
    """Set when finished."""
    served: Served | None = None
    rejections: Rejections = field(default_factory=Rejections)
    block: StallMonitor = field(default_factory=StallMonitor)
    number: int = field(default_factory=lambda: secrets.randbits(53))
    """Of this syncer process."""
    confirmations: Confirmations = field(default_factory=Confirmations)
    buffers: FinalBuffers = field(default_factory=FinalBuffers)
