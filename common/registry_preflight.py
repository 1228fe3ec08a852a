"""Preflight check of Redis before a run starts: permissions, kind of server, and eviction policy."""

from __future__ import annotations

from typing import Any

import redis

from .errors import SettingError
from .redis_client import FAILURES, check_connection, connect, explain, is_forbidden, redact_url
from .redis_keys import RedisKeys

EVICTS_ANY_KEY = "allkeys-"
"""Prefix of eviction policies that may evict a run's keys; these have no expiry, so `volatile-` policies spare them."""


def check_redis(url: str, run: str) -> None:
    """Check Redis once, before anything starts. Writes nothing: commands are queued in a transaction that is discarded.

    SettingError if Redis rejects the login, is a cluster or a replica, or its user lacks permissions that `run` needs;
    PeerLost if no Redis answers; DilocoError if it currently accepts no writes.
    """
    check_connection(url)
    client = connect(url, keep_connection=True)
    try:
        client.ping()
        _check_rights(client.connection, url, RedisKeys(run))
    except FAILURES as error:
        raise explain(url, error) from None
    finally:
        client.close()


def _check_rights(connection: Any, url: str, keys: RedisKeys) -> None:
    forbidden: dict[str, str] = {}

    def send(*command: object) -> bool:
        connection.send_command(*command)
        try:
            connection.read_response()
        except redis.ResponseError as error:
            if not is_forbidden(error):
                raise
            forbidden[str(command[0])] = str(error)
            return False
        return True

    several = (keys.run, keys.learners, keys.fragments, keys.events, keys.epoch)
    send("EXISTS", *several)  # a cluster replies that they are not on one node
    if send("MULTI") and send("EXEC"):
        send("MULTI")
        for command in _commands(keys):
            send(*command)
    if forbidden:
        raise SettingError(
            f"the user of {redact_url(url)} may not do what the run's figures need: "
            f"{', '.join(forbidden)} ({next(iter(forbidden.values()))}); give it the rights that docs/redis.md names"
        )


def _commands(keys: RedisKeys) -> list[tuple[object, ...]]:
    """One of each kind of command that the syncer sends, with its keys."""
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


def redis_advice(url: str) -> list[str]:
    """Warnings about a Redis that works, but may lose data; none if its settings cannot be read."""
    try:
        client = connect(url)
        try:
            limit, policy = _eviction(client)
        finally:
            client.close()
    except (*FAILURES, SettingError, KeyError):
        return []
    if not limit or not policy.startswith(EVICTS_ANY_KEY):
        return []
    sentence = (
        f"Redis at {redact_url(url)} evicts keys, including those of the run, once it holds {limit:,} bytes "
        f"(maxmemory-policy {policy}), and then status and watch are incomplete; set the policy noeviction, or give "
        "another Redis"
    )
    return [sentence]


def _eviction(client: Any) -> tuple[int, str]:
    """(maxmemory in bytes, 0 = no limit; the policy)."""
    try:
        settings = client.info("memory")
        return int(settings["maxmemory"]), str(settings["maxmemory_policy"])
    except (redis.ResponseError, KeyError):
        settings = client.config_get("maxmemory*")
        return int(settings["maxmemory"]), str(settings["maxmemory-policy"])
