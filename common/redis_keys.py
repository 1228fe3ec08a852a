"""Redis key space of a run: the only place that defines key names. docs/redis.md lists their fields."""

from __future__ import annotations

from dataclasses import dataclass

from .config import check_name


@dataclass(frozen=True)
class RedisKeys:
    """Names of all keys of one run. Run and learner names are checked, so that no name can address another key."""

    name: str

    def __post_init__(self) -> None:
        check_name("--run", self.name)

    @property
    def run(self) -> str:
        """HASH: the run's state and totals."""
        return f"dd:{self.name}:run"

    @property
    def learners(self) -> str:
        """ZSET: learner -> last seen, in unix seconds by the syncer's clock."""
        return f"dd:{self.name}:learners"

    @property
    def fragments(self) -> str:
        """ZSET: fragment -> last merge, in unix seconds by the syncer's clock; 0 = not since the syncer's start."""
        return f"dd:{self.name}:fragments"

    @property
    def events(self) -> str:
        """STREAM, capped: what happened."""
        return f"dd:{self.name}:events"

    @property
    def epoch(self) -> str:
        """STRING: the epoch of the syncer that serves the run."""
        return f"dd:{self.name}:epoch"

    def learner(self, name: str) -> str:
        """HASH: one learner."""
        return f"dd:{self.name}:learner:{check_name('learner', name)}"

    def fragment(self, fragment: int) -> str:
        """HASH: one fragment."""
        return f"dd:{self.name}:fragment:{int(fragment)}"
