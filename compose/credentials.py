"""`diloco keys init`: all that the containers of compose.yaml trust one another by, made once and then left alone.

Each folder is a volume of its own, so that a container sees what it needs and nothing else:

    DIR/broker/               what the broker knows of keys, and its own pair
    DIR/ROLE/key              the client's key of each role; learners and observers may be called NAME-* as well
    DIR/redis/                password, redis.conf with it, and `cli`: redis-cli that knows it
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
# redis-cli with this store's password, which neither the command line nor the environment of the container shows.
REDISCLI_AUTH="$(cat /keys/redis/password)" exec redis-cli "$@"
"""


def init(directory: Path, run: str) -> list[str]:
    """Make what is missing for `run` under `directory`; the names of what was made. SettingError if it cannot be."""
    try:
        _forget_grants_of_a_lost_pair(directory / "broker")
        made = [f"{role}/key" for role in ROLES if _client_key(directory, role, run)]
        if _passwords(directory):
            made.append("redis/password")
        password = (directory / "redis" / "password").read_text(encoding="ascii").strip()
        _write(directory / "redis" / "redis.conf", REDIS_CONF.format(password=password), 0o600)
        _write(directory / "redis" / "cli", REDIS_CLI, 0o700)
    except (OSError, UnicodeError) as wrong:
        raise SettingError(f"keys and passwords cannot be kept under {directory}: {wrong}") from None
    return made


def _forget_grants_of_a_lost_pair(ring: Path) -> None:
    """Clients know a broker by its pair: without it, all keys made so far are dead, and so are their names."""
    pair = ring / "broker.key"
    if pair.exists() and not _holds_a_pair(ring):
        pair.unlink()
    if not pair.exists():
        for path in ring.glob("grants/*.json"):
            path.unlink()


def _holds_a_pair(ring: Path) -> bool:
    """Whether the broker's pair is whole; SettingError if nobody can tell."""
    try:
        KeyRing(ring)
    except SettingError as wrong:
        if wrong.__cause__ is not None:
            raise
        return False
    return True


def _client_key(directory: Path, role: Role, run: str) -> bool:
    """Is there a key of `role` now that was not there before? One of another run, or half a one, gives way."""
    ring, path = directory / "broker", directory / role / "key"
    if path.exists() and (ring / "broker.key").exists():
        key, known = _whole(path), KeyRing(ring)
        if (
            key is not None
            and (key.run, key.role, key.broker) == (run, role, known.public)
            and known.grant_of(key.public) == key.grant
        ):
            return False
    if _granted(ring, role, run):
        revoke(ring, role=role, run=run, name=role)  # its file was lost, or the volume was changed for another run's
    key = new_key(ring, role=role, run=run, name=role)
    path.unlink(missing_ok=True)
    key.save(path)
    return True


def _whole(path: Path) -> Key | None:
    """The key in the file; None if what stands there is none. SettingError if it cannot be read."""
    try:
        return Key.load(path)
    except SettingError as wrong:
        if wrong.__cause__ is not None:
            raise
        return None


def _granted(ring: Path, role: Role, run: str) -> bool:
    known = KeyRing(ring).grants if (ring / "broker.key").exists() else []
    return any((grant.run, grant.role, grant.name) == (run, role, role) for grant in known)


def _passwords(directory: Path) -> bool:
    """The store's password and the syncer's copy of it agree after this; True if it had to be made."""
    password, copy = directory / "redis" / "password", directory / "redis-client" / "password"
    made = not password.exists() or not password.read_bytes().strip()
    if made:
        _write(password, secrets.token_urlsafe(32), 0o600)
    if not copy.exists() or copy.read_bytes() != password.read_bytes():
        _write(copy, password.read_text(encoding="ascii"), 0o600)
    return made


def _write(path: Path, text: str, mode: int) -> None:
    """The file `path`: the old one or the new one, never half of one, and never readable by others meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside = path.with_name(f".{path.name}.new")
    aside.unlink(missing_ok=True)
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
