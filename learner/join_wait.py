"""Waiting for a join: the only time that a training thread blocks on the network."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..common.auth_keys import Role
from ..common.config import LearnerConfig
from ..common.errors import PeerLost
from ..common.log import get_logger
from .departure import HURRY_SECONDS
from .discover import SAY_SECONDS, discover
from .learner_name import resolve_name
from .link import Link
from .mailbox import Joined, Mailbox

log = get_logger("learner")

LOOK_UP_SECONDS = 0.2
"""How often a waiting join wakes up, so that Ctrl-C takes effect."""


def member(
    address: str, run: str, name: str | None, key: Path | str | None, roles: tuple[Role, ...], **more: Any
) -> LearnerConfig:
    """The configuration of one membership. Without `run` or `name` it uses the key's; without a key, the only run at
    `address` and a name made from the host name. Raises SettingError, PeerLost.
    """
    file = None if key is None else Path(key)
    own = resolve_name(run, name, file, *roles)
    config = LearnerConfig(broker=address, key=file, name=own["name"], run=own["run"], **more)
    return config if config.run else replace(config, run=discover(address, "", config.join_timeout_seconds).run)


def await_joined(link: Link) -> Joined:
    """Start the link and wait for the public model. Raises PeerLost if nothing progresses for the join timeout."""
    config, mailbox = link.config, link.mailbox
    link.start()
    start = logged_at = time.monotonic()
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
            if now - logged_at >= SAY_SECONDS:
                logged_at = now
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
