"""What `diloco up` is told about this machine, beside the run's own settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..common.config import PresetName, RunSettings
from ..common.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """One `diloco up`: how many learners, with what, and where everything listens."""

    preset: PresetName = "decoupled"
    """Settings that belong together; what is given beside it counts. streaming: waits for all learners and blends.
    diloco: waits for all, and merges the whole model at once."""
    learners: int = 2
    """Learner processes on this machine. More may join from elsewhere."""
    device: str = "cpu"
    """Where learners compute: cpu, cuda, or cuda:N."""
    threads: int = 0
    """Threads of each learner. 0 = the cores shared out among the learners."""
    eval_every: float = 15.0
    """Seconds between two small evaluations of the global model."""
    evaluator: bool = True
    """Run the evaluator: an observer that judges the global model on held-out text."""
    data: Path | None = None
    """A text file or a folder of them to train on. Without it: Python's own standard library."""
    directory: Path | None = None
    """The run's folder. Without it: runs/NAME."""
    resume: Path | None = None
    """Go on with this run (its folder or name), with its settings; --steps may be raised."""
    redis: str | None = None
    """URL of a Redis or Valkey to use, like redis://HOST:6379/0. Without it a store of its own is started."""
    redis_port: int = 0
    """Port of the store that is started. 0 = a free one."""
    broker_port: int = 0
    """First of the broker's four consecutive ports. 0 = 5550, or the next four that are free."""
    tape: bool = False
    """Write an event tape into the run's folder, for `diloco replay`: every decision, and every step boundary."""
    as_json: bool = False
    """End standard output with one line of JSON: the run's figures. Progress goes to standard error."""

    def __post_init__(self) -> None:
        if self.learners < 1:
            raise SettingError(f"--learners must be at least 1, not {self.learners}")
        if self.threads < 0:
            raise SettingError(f"--threads must be 0 or more, not {self.threads}")
        if not self.eval_every > 0:
            raise SettingError(f"--eval-every must be greater than 0 seconds, not {self.eval_every}")
        for name, port, last in (("redis", self.redis_port, 65_535), ("broker", self.broker_port, 65_532)):
            if not 0 <= port <= last:
                raise SettingError(f"--{name}-port must lie between 0 and {last}, not {port}")
        if self.redis is not None and self.redis_port:
            raise SettingError("--redis uses a store that is there and --redis-port starts one: give only one of them")
        if self.resume is not None and self.preset != "decoupled":
            raise SettingError("--resume goes on with the run's own settings; leave --preset out")
        if self.resume is not None and self.directory is not None:
            raise SettingError("--resume names the run's folder already; leave --dir out")

    def check(self, settings: RunSettings) -> None:
        """SettingError where these and the run's settings do not go together."""
        if settings.quorum > self.learners:
            raise SettingError(
                f"--quorum {settings.quorum} is more than --learners {self.learners}: nothing would ever be merged; "
                "lower --quorum or raise --learners"
            )

    def remembered(self) -> dict[str, Any]:
        """What settings.json keeps, so that --resume goes on alike: plain values."""
        kept = ("learners", "device", "threads", "eval_every", "evaluator", "data", "tape")
        rows = {name: value for name, value in asdict(self).items() if name in kept}
        return rows | {"data": None if self.data is None else str(self.data.absolute())}
