"""A Redis server, a registry that writes to it, and the lines that it logged."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import redis
import structlog
from decoupled_diloco.common.redis_keys import RedisKeys
from decoupled_diloco.common.registry import Registry
from decoupled_diloco.compose.embedded_redis import EmbeddedRedis

KEYS = RedisKeys("run")


class RegistryAndRedis:
    """A store, a registry that writes to it, and the lines that it logged."""

    def __init__(self, directory: Path) -> None:
        self.store = EmbeddedRedis(directory)
        self.store.start()
        self.client: Any = redis.Redis.from_url(self.store.url, decode_responses=True)
        self.lines: list[dict[str, Any]] = []
        self.registry = Registry(self.store.url, "run", logger_into(self.lines))

    def close(self) -> None:
        self.thaw()
        self.registry.close()
        self.client.close()
        self.store.stop()

    def freeze(self) -> None:
        os.kill(self.store.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        if self.store.running:
            os.kill(self.store.pid, signal.SIGCONT)

    def publish_everything(self) -> None:
        self.registry.publish_run(state="running", step=41, steps_total=600, tokens_merged=10**12)
        for name in ("a", "b"):
            self.registry.publish_learner(name, 1_700_000_000.5, tokens_reported=2**40, host="house", loss=1.25)
        for fragment in range(3):
            self.registry.publish_fragment(
                fragment, merged_at=50.5 - fragment, version=fragment + 7, contributors=("a", "b"), delta_norm=0.5
            )
        self.registry.event("joined", learner="a", incarnation=3)
        self.registry.write_epoch(5)

    def seen(self) -> dict[str, Any]:
        """All that the store holds, without what says when it was written or that it was lost."""
        seen: dict[str, Any] = {
            "epoch": self.client.get(KEYS.epoch),
            "learners": self.client.zrange(KEYS.learners, 0, -1),
            "fragments": self.client.zrange(KEYS.fragments, 0, -1, withscores=True),
        }
        for key in (KEYS.run, KEYS.learner("a"), KEYS.learner("b"), *map(KEYS.fragment, range(3))):
            seen[key] = self.client.hgetall(key)
            seen[key].pop("updated_at", None)
        seen["events"] = [kind for kind in self.kinds() if not kind.startswith("registry_")]
        return seen

    def kinds(self) -> list[str]:
        return [row["kind"] for _, row in self.client.xrange(KEYS.events)]

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]


def logger_into(lines: list[dict[str, Any]]) -> Any:
    def keep(_: Any, method: str, event: Any) -> Any:
        lines.append({**event, "level": method})
        raise structlog.DropEvent

    return structlog.wrap_logger(None, processors=[keep], wrapper_class=structlog.make_filtering_bound_logger(0))
