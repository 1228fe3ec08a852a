"""Whether a store can show a run, found out before the run starts: what would fail later, and what might get lost."""

from __future__ import annotations

from typing import Any

import redis

from .errors import SettingError
from .redis_client import FAILURES, check_connection, connect, explain, is_forbidden, redact_url
from .redis_keys import RedisKeys

FORGETFUL = "allkeys-"
"""Eviction policies that may throw away a run's keys. Those have no expiry, so that `volatile-` ones spare them."""


def check_store(url: str, run: str) -> None:
    """Once, before anything starts. Writes nothing: commands are queued in a transaction that is given up.

    SettingError if the store rejects the login, is a cluster or a replica, or its user may not write what `run` needs;
    PeerLost if no store answers; DilocoError if it takes nothing just now.
    """
    check_connection(url)
    client = connect(url, keep_connection=True)
    try:
        client.ping()
        _check_rights(client.connection, url, RedisKeys(run))
    except FAILURES as wrong:
        raise explain(url, wrong) from None
    finally:
        client.close()


def _check_rights(connection: Any, url: str, keys: RedisKeys) -> None:
    refused: dict[str, str] = {}

    def ask(*command: object) -> bool:
        connection.send_command(*command)
        try:
            connection.read_response()
        except redis.ResponseError as wrong:
            if not is_forbidden(wrong):
                raise
            refused[str(command[0])] = str(wrong)
            return False
        return True

    several = (keys.run, keys.learners, keys.fragments, keys.events, keys.epoch)
    ask("EXISTS", *several)  # a cluster answers that they are not all at one node
    if ask("MULTI") and ask("EXEC"):
        ask("MULTI")
        for command in _commands(keys):
            ask(*command)
    if refused:
        raise SettingError(
            f"the user of {redact_url(url)} may not do what the run's figures need: "
            f"{', '.join(refused)} ({next(iter(refused.values()))}); give it the rights that docs/redis.md names"
        )


def _commands(keys: RedisKeys) -> list[tuple[object, ...]]:
    """One of each kind that the syncer sends, with the keys it sends them for."""
    learner, fragment = keys.learner("a"), keys.fragment(0)
    return [
        ("GET", keys.epoch),
        ("SETNX", keys.epoch, 0),
        ("SET", keys.epoch, 0),
        *(("HSET", key, "state", "") for key in (keys.run, learner, fragment)),
        ("HGETALL", fragment),
        *(("ZADD", key, 0, "a") for key in (keys.learners, keys.fragments)),
        ("ZREM", keys.learners, "a"),
        ("DEL", learner),
        ("XADD", keys.events, "MAXLEN", "~", 1, "*", "kind", ""),
        ("XREVRANGE", keys.events, "+", "-", "COUNT", 1),
    ]


def store_advice(url: str) -> list[str]:
    """Sentences on a store that works, but may lose what is written; none where it does not let us see its settings."""
    try:
        client = connect(url)
        try:
            limit, policy = _eviction(client)
        finally:
            client.close()
    except (*FAILURES, SettingError, KeyError):
        return []
    if not limit or not policy.startswith(FORGETFUL):
        return []
    sentence = (
        f"Redis at {redact_url(url)} throws keys away once it holds {limit:,} bytes (maxmemory-policy {policy}), those "
        "of the run too, and then status and watch have holes; set the policy noeviction, or give another store"
    )
    return [sentence]


def _eviction(client: Any) -> tuple[int, str]:
    """(maxmemory in bytes, 0 = no limit; the policy)."""
    try:
        seen = client.info("memory")
        return int(seen["maxmemory"]), str(seen["maxmemory_policy"])
    except (redis.ResponseError, KeyError):
        seen = client.config_get("maxmemory*")
        return int(seen["maxmemory"]), str(seen["maxmemory-policy"])
