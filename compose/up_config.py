"""Options of `diloco up` for this machine, beside the settings of the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..common.config import PresetName, RunSettings
from ..common.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """Configuration of one `diloco up`: learners, hardware, text, ports and output."""

    preset: PresetName = "decoupled"
    """Set of settings; explicitly given options take precedence. decoupled: the defaults. streaming: a merge waits for
    all learners. diloco: it waits for all learners, and merges the whole model at once."""
    learners: int = 2
    """Number of learner processes. Further ones may join at any time with diloco learner."""
    device: str = "cpu"
    """Device on which learners compute: cpu, cuda, or cuda:N."""
    threads: int = 0
    """CPU threads per learner. 0 = the cores, divided among the learners."""
    eval_every: float = 15.0
    """Seconds between two evaluations of the global model on a part of the validation text."""
    evaluator: bool = True
    """Run an evaluator, which computes the loss of the global model on validation text."""
    data: Path | None = None
    """Text file, or folder of text files, to train on. Without it: the source of Python's standard library."""
    directory: Path | None = None
    """Folder of the run. Without it: runs/NAME."""
    resume: Path | None = None
    """Continue this run, given by folder or name, with its own settings; only --steps may be raised."""
    redis: str | None = None
    """URL of a running Redis or Valkey, such as redis://HOST:6379/0. Without it: one is started for this run."""
    redis_port: int = 0
    """TCP port of the Redis that is started. 0 = a free one."""
    broker_port: int = 0
    """First of the broker's four consecutive TCP ports. 0 = 5550, or the next four free ones."""
    tape: bool = False
    """Write an event tape (every decision and step boundary) to the run's folder, for `diloco replay`."""
    as_json: bool = False
    """Print only the run's figures, as one line of JSON, to standard output; progress goes to standard error."""

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
            raise SettingError("--redis uses a running server and --redis-port starts one: give only one of them")
        if self.resume is not None and self.preset != "decoupled":
            raise SettingError("--resume continues with the run's own settings; leave --preset out")
        if self.resume is not None and self.directory is not None:
            raise SettingError("--resume already names the run's folder; leave --dir out")

    def check(self, settings: RunSettings) -> None:
        """SettingError if this configuration and the run's settings contradict each other."""
        if settings.quorum > self.learners:
            raise SettingError(
                f"--quorum {settings.quorum} is more than --learners {self.learners}: nothing would ever be merged; "
                "lower --quorum or raise --learners"
            )

    def remembered(self) -> dict[str, Any]:
        """Plain values for settings.json, with which --resume continues."""
        stored = ("learners", "device", "threads", "eval_every", "evaluator", "data", "tape")
        rows = {name: value for name, value in asdict(self).items() if name in stored}
        return rows | {"data": None if self.data is None else str(self.data.absolute())}
