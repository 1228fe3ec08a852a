"""Name of a learner or observer, as given, from its key, or from the host name. Does not load torch."""

from __future__ import annotations

import re
import secrets
import socket
from pathlib import Path

from ..common.auth_keys import Key, Role, check_called, held_key, run_of

NAME_CHARACTERS = 40


def default_name(key: Key | None = None) -> str:
    """The host name, made valid, and four random characters, so that replicas of one image get different names.

    With a key, they follow the key's name as far as the length of a name permits.
    """
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")[:32].rstrip("-") or "learner"
    mark = secrets.token_hex(2)
    if key is None:
        return f"{host}-{mark}"
    room = NAME_CHARACTERS - len(key.name) - 1
    if room <= 0:
        return key.name
    host = host[: room - len(mark) - 1].strip("-") if room > len(mark) + 1 else ""
    return f"{key.name}-{f'{host}-{mark}' if host else mark[:room]}"


def resolve_name(run: str, name: str | None, key: Path | None, *roles: Role, otherwise: str = "") -> dict[str, str]:
    """`run` and `name` of a membership: as given, if the key in the file `key` permits them, else as in the key.

    otherwise: the name if neither a name nor a key is given. Raises SettingError, before anything connects.
    """
    held = held_key(key, *roles)
    made = default_name(held) if held is not None or not otherwise else otherwise
    return {"run": run_of(held, run, key), "name": check_called(held, made if name is None else name, key)}
