"""State of a syncer: its components, which it owns for its lifetime, and the present state of the run."""

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
from .deltas import DeltaAssembler, NormFilter
from .epoch_discovery import EpochDiscovery
from .final_buffers import FinalBuffers
from .final_confirmations import Confirmations
from .global_model import GlobalModel
from .rejections import Rejections
from .rounds import Rounds
from .run_metrics import RunMetrics
from .stall_diagnosis import StallMonitor
from .steady_clock import SteadyClock
from .telemetry import Telemetry
from .transport import Transport

Phase = Literal["waiting", "seeding", "running", "draining", "finished", "stopping"]
DIGESTS_KEPT = 4


@dataclass(frozen=True)
class Components:
    """What a syncer owns for its lifetime."""

    config: SyncerConfig
    transport: Transport
    discovery: EpochDiscovery
    checkpoints: Checkpoints
    writer: CheckpointWriter
    telemetry: Telemetry
    clock: SteadyClock


def assemble(config: SyncerConfig, transport: Transport, discovery: EpochDiscovery, telemetry: Telemetry) -> Components:
    """The components of a syncer whose directory is `config.directory`."""
    torch.set_num_threads(1)
    checkpoints = Checkpoints(Path(config.directory))
    writer = CheckpointWriter(checkpoints)
    return Components(config, transport, discovery, checkpoints, writer, telemetry, SteadyClock())


@dataclass
class TrainingState:
    """State that exists from version 0 on: the global model and the objects that decide about it."""

    model: GlobalModel
    rounds: Rounds
    metrics: RunMetrics
    norm_filter: NormFilter = field(init=False)
    delta_assembler: DeltaAssembler = field(init=False)
    digests: list[dict[int, str]] = field(init=False)
    """For each fragment: version -> digest of the last few versions, to compare with the learners' digests."""
    updates: dict[int, Update] = field(default_factory=dict)
    """For each fragment: the first chunk of its last Update, for retransmission."""

    def __post_init__(self) -> None:
        P = self.model.plan.P
        self.norm_filter = NormFilter(P, most_steps=2 * self.model.settings.sync_every)
        self.delta_assembler = DeltaAssembler(self.rounds, self.model, self.norm_filter)
        self.digests = [{self.model.versions[p]: self.model.keyframe(p)[2]} for p in range(P)]

    def remember(self, update: Update) -> None:
        known = self.digests[update.fragment]
        known[update.version] = update.digest
        while len(known) > DIGESTS_KEPT:
            del known[min(known)]
        self.updates[update.fragment] = update

    def bookkeeping(self, run: RunState) -> dict[str, Any]:
        """The state that a checkpoint holds beside the model."""
        return {
            "phase": run.phase,
            "epoch": run.epoch,
            "rounds": self.rounds.to_json(),
            "figures": self.metrics.to_json(),
        }


@dataclass
class RunState:
    """The present state of the run."""

    settings: RunSettings
    epoch: int = 0
    phase: Phase = "waiting"
    model_hash: str = ""
    """Set when the run is finished."""
    training: TrainingState | None = None
    rejections: Rejections = field(default_factory=Rejections)
    stall_monitor: StallMonitor = field(default_factory=StallMonitor)
    number: int = field(default_factory=lambda: secrets.randbits(53))
    """Random number of this syncer process, published in its beats."""
    confirmations: Confirmations = field(default_factory=Confirmations)
    buffers: FinalBuffers = field(default_factory=FinalBuffers)
