"""Credentials of the containers of compose.yaml (`diloco keys init`): keys and the Redis password, created once.

Each folder is a separate volume, so that a container sees only what it needs:

    DIR/broker/               the broker's key pair and the grants of its clients
    DIR/ROLE/key              one client key per role; its holder may be called ROLE or ROLE-*
    DIR/redis/                password, redis.conf with it, and `cli`: redis-cli with the password
    DIR/redis-client/         password, for the syncer
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from ..common.auth_keys import ROLES, Key, KeyRing, Role, new_key, revoke
from ..common.errors import SettingError

REDIS_CONF = """\
# Written by `diloco keys init` at each start.
bind * -::*
port 6379
requirepass {password}
dir /data
appendonly yes
appendfsync everysec
save 60 1
"""
REDIS_CLI = """\
#!/bin/sh
# redis-cli with the server's password, which is neither in its arguments nor in the container's environment.
REDISCLI_AUTH="$(cat /keys/redis/password)" exec redis-cli "$@"
"""


def init(directory: Path, run: str) -> list[str]:
    """Create what is missing for `run` under `directory` and return its names. SettingError if that fails."""
    try:
        _remove_grants_of_lost_pair(directory / "broker")
        created = [f"{role}/key" for role in ROLES if _ensure_client_key(directory, role, run)]
        if _ensure_password(directory):
            created.append("redis/password")
        password = (directory / "redis" / "password").read_text(encoding="ascii").strip()
        _write(directory / "redis" / "redis.conf", REDIS_CONF.format(password=password), 0o600)
        _write(directory / "redis" / "cli", REDIS_CLI, 0o700)
    except (OSError, UnicodeError) as error:
        raise SettingError(f"keys and passwords cannot be stored under {directory}: {error}") from None
    return created


def _remove_grants_of_lost_pair(ring: Path) -> None:
    """Without the broker's key pair all client keys are useless, since each names its public key; remove the grants."""
    pair = ring / "broker.key"
    if pair.exists() and not _has_valid_pair(ring):
        pair.unlink()
    if not pair.exists():
        for path in ring.glob("grants/*.json"):
            path.unlink()


def _has_valid_pair(ring: Path) -> bool:
    """Whether the broker's key pair is complete; SettingError if it cannot be read."""
    try:
        KeyRing(ring)
    except SettingError as error:
        if error.__cause__ is not None:
            raise
        return False
    return True


def _ensure_client_key(directory: Path, role: Role, run: str) -> bool:
    """Create the key of `role` if it is missing, incomplete or another run's; whether it was created."""
    ring, path = directory / "broker", directory / role / "key"
    if path.exists() and (ring / "broker.key").exists():
        key, known = _load_key(path), KeyRing(ring)
        if (
            key is not None
            and (key.run, key.role, key.broker) == (run, role, known.public)
            and known.grant_of(key.public) == key.grant
        ):
            return False
    if _has_grant(ring, role, run):
        revoke(ring, role=role, run=run, name=role)  # its file is lost, or the volume held another run's keys meanwhile
    key = new_key(ring, role=role, run=run, name=role)
    path.unlink(missing_ok=True)
    key.save(path)
    return True


def _load_key(path: Path) -> Key | None:
    """The key in the file; None if it holds no valid key. SettingError if it cannot be read."""
    try:
        return Key.load(path)
    except SettingError as error:
        if error.__cause__ is not None:
            raise
        return None


def _has_grant(ring: Path, role: Role, run: str) -> bool:
    grants = KeyRing(ring).grants if (ring / "broker.key").exists() else []
    return any((grant.run, grant.role, grant.name) == (run, role, role) for grant in grants)


def _ensure_password(directory: Path) -> bool:
    """Create the Redis password if it is missing, and copy it for the syncer; whether it was created."""
    password, copy = directory / "redis" / "password", directory / "redis-client" / "password"
    is_missing = not password.exists() or not password.read_bytes().strip()
    if is_missing:
        _write(password, secrets.token_urlsafe(32), 0o600)
    if not copy.exists() or copy.read_bytes() != password.read_bytes():
        _write(copy, password.read_text(encoding="ascii"), 0o600)
    return is_missing


def _write(path: Path, text: str, mode: int) -> None:
    """Replace the file atomically; its content is never readable by other users."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
