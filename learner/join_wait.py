"""Waiting for a join: the one time that a training thread waits for anybody."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..common.auth_keys import Role
from ..common.config import LearnerConfig
from ..common.errors import PeerLost
from ..common.log import get_logger
from .core import HURRY_SECONDS
from .discover import SAY_SECONDS, discover
from .learner_name import called
from .link import Link
from .mailbox import Joined, Mailbox

log = get_logger("learner")

LOOK_UP_SECONDS = 0.2
"""How often a waiting join looks up, so that Ctrl-C is heard."""


def member(
    address: str, run: str, name: str | None, key: Path | str | None, roles: tuple[Role, ...], **more: Any
) -> LearnerConfig:
    """The settings of one membership: run and name are the key's where they are not given, else the only run at
    `address` and a name made from the machine's. SettingError, PeerLost.
    """
    file = None if key is None else Path(key)
    own = called(run, name, file, *roles)
    config = LearnerConfig(broker=address, key=file, name=own["name"], run=own["run"], **more)
    return config if config.run else replace(config, run=discover(address, "", config.join_timeout_seconds).run)


def await_joined(link: Link) -> Joined:
    """Start the link and wait until the public model is here. PeerLost if nothing moves for the join's time-out."""
    config, mailbox = link.config, link.mailbox
    link.start()
    start = said_at = time.monotonic()
    try:
        while True:
            joined = mailbox.wait_joined(LOOK_UP_SECONDS)
            now = time.monotonic()
            if joined is not None:
                log.info("joined", run=config.run, learner=config.name, fragments=joined.plan.P, t=joined.t,
                         seconds=round(now - start, 3))  # fmt: skip
                return joined
            if now - mailbox.progress_at > config.join_timeout_seconds:
                raise _lost(config, mailbox)
            if now - said_at >= SAY_SECONDS:
                said_at = now
                log.info(
                    "waiting",
                    waits_for=mailbox.refusal or mailbox.waits_for,
                    address=config.broker,
                    seconds=round(now - start),
                )
    except BaseException:
        link.leave("left")
        if not link.join_thread(HURRY_SECONDS):
            link.abandon()
        raise


def _lost(config: LearnerConfig, mailbox: Mailbox) -> PeerLost:
    if mailbox.refusal:
        return PeerLost(f"{mailbox.refusal}; {config.name} waited {config.join_timeout_seconds:g} s")
    return PeerLost(
        f"{config.name} waited {config.join_timeout_seconds:g} s for {mailbox.waits_for} at {config.broker} "
        f"(run {config.run}); are the broker and the syncer running?"
    )
