"""A real broker and a real syncer in threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decoupled_diloco.broker.broker import Broker
from decoupled_diloco.common.config import BrokerConfig, RunSettings, SyncerConfig
from decoupled_diloco.common.fragments import Layout, Plan, balanced_plan
from decoupled_diloco.common.log import get_logger
from decoupled_diloco.common.registry import Registry
from decoupled_diloco.syncer.checkpoint import Checkpoints
from decoupled_diloco.syncer.checkpoint_writer import CheckpointWriter
from decoupled_diloco.syncer.epoch_discovery import EpochDiscovery
from decoupled_diloco.syncer.loop import Syncer
from decoupled_diloco.syncer.run_state import Components
from decoupled_diloco.syncer.steady_clock import SteadyClock
from decoupled_diloco.syncer.telemetry import Telemetry
from decoupled_diloco.syncer.transport import Transport
from scripted_learner import LAYOUT, ScriptedLearner
from transport import free_ports


def settings(**changes: Any) -> RunSettings:
    defaults: dict[str, Any] = {
        "steps": 10_000, "sync_every": 3, "fragments": 3, "overlap": 2, "quorum": 1, "grace_seconds": 0.3,
        "checkpoint_every": 1, "codec_up": "int4", "codec_down": "int4",
    }  # fmt: skip
    return RunSettings(**(defaults | changes))


@dataclass
class SyncerRun:
    """One broker and one syncer. `learner()` makes a scripted learner; all end with it."""

    directory: Path
    port: int
    settings: RunSettings
    redis: str | None = None
    layout: Layout = LAYOUT
    syncer: Syncer = field(init=False)
    broker: Broker = field(init=False)
    failure: list[BaseException] = field(default_factory=list)
    _learners: list[ScriptedLearner] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def plan(self) -> Plan:
        return balanced_plan(self.layout, self.settings.fragments)

    def start_broker(self) -> None:
        self.broker = Broker(BrokerConfig(port=self.port))
        self.broker.start()

    def start(self, **more: Any) -> None:
        fields: dict[str, Any] = {
            "settings": self.settings, "task": None, "broker": self.address, "directory": self.directory / "global",
            "redis": self.redis, "drain_seconds": 5.0, "listen_seconds": 0.2, "stop_seconds": 0.1,
        }  # fmt: skip
        config = SyncerConfig(**(fields | more))
        log = get_logger("syncer")
        teller = Telemetry(Registry(self.redis, self.settings.run, log), log, self.settings.run)
        lines = Transport(self.address, self.settings.run, lambda _, wrong: teller.reject("?", wrong.reason))
        checkpoints = Checkpoints(config.directory)
        listening = EpochDiscovery(lines, config.listen_seconds, lambda _: None)
        parts = Components(config, lines, listening, checkpoints, CheckpointWriter(checkpoints), teller, SteadyClock())
        self.syncer = Syncer(parts)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        parts = self.syncer.components
        try:
            self.syncer.run()
        except BaseException as failure:  # noqa: BLE001 handed to the test
            self.failure.append(failure)
        finally:
            parts.writer.close(5)
            parts.discovery.close()
            parts.telemetry.registry.close()
            parts.transport.close()
            parts.checkpoints.unlock()

    def stop(self) -> None:
        self.syncer.stop()
        self._thread.join(30)
        assert not self._thread.is_alive(), "the syncer did not stop"

    def crash(self) -> None:
        """End without the last save, as near to a kill as a thread can come."""
        self.syncer._end = lambda: None  # type: ignore[method-assign]
        self.syncer._over = lambda: True  # type: ignore[method-assign]
        self._thread.join(30)

    def learner(self, name: str, incarnation: int = 1) -> ScriptedLearner:
        made = ScriptedLearner(self, name, incarnation)
        self._learners.append(made)
        return made

    def close(self) -> None:
        for learner in self._learners:
            learner.close()
        if self._thread.is_alive():
            self.stop()

    @property
    def rejected(self) -> Counter[str]:
        """Rejections by reason."""
        total: Counter[str] = Counter()
        for (_, reason), times in self.syncer.components.telemetry.rejected.items():
            total[reason] += times
        return total


@contextmanager
def syncer_run(
    directory: Path, redis: str | None = None, layout: Layout = LAYOUT, **changes: Any
) -> Iterator[SyncerRun]:
    """A running broker and syncer; everything is stopped at the end, and a failure of the syncer is raised."""
    run = SyncerRun(directory, free_ports(), settings(**changes), redis, layout)
    run.start_broker()
    run.start()
    try:
        yield run
    finally:
        run.close()
        run.broker.stop()
        run.broker.join()
        if run.failure:  # also where the test has failed: then because of it
            raise run.failure[0]
