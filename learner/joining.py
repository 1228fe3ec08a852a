"""Waiting for a join: the one time that a training thread waits for anybody."""

from __future__ import annotations

import time

from ..common.errors import PeerLost
from ..common.log import get_logger
from .conversation import HURRY_SECONDS
from .desk import Joined
from .discover import SAY_SECONDS
from .link import Link

log = get_logger("learner")

LOOK_UP_SECONDS = 0.2
"""How often a waiting join looks up, so that Ctrl-C is heard."""


def await_joined(link: Link) -> Joined:
    """Start the link and wait until the public model is here. PeerLost if nothing moves for the join's time-out."""
    config, desk = link.config, link.desk
    link.start()
    start = said_at = time.monotonic()
    try:
        while True:
            joined = desk.wait_joined(LOOK_UP_SECONDS)
            now = time.monotonic()
            if joined is not None:
                log.info("joined", run=config.run, learner=config.name, fragments=joined.plan.P, t=joined.t,
                         seconds=round(now - start, 3))  # fmt: skip
                return joined
            if now - desk.progress_at > config.join_timeout_seconds:
                raise PeerLost(
                    f"{config.name} waited {config.join_timeout_seconds:g} s for {desk.waits_for} at {config.broker} "
                    f"(run {config.run}); are the broker and the syncer running?"
                )
            if now - said_at >= SAY_SECONDS:
                said_at = now
                log.info("waiting", waits_for=desk.waits_for, address=config.broker, seconds=round(now - start))
    except BaseException:
        link.leave("left")
        if not link.join_thread(HURRY_SECONDS):
            link.abandon()
        raise
