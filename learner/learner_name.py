"""What a learner or observer is called, and which key says so. Loads no torch: it is settled before anything starts."""

from __future__ import annotations

import re
import secrets
import socket
from pathlib import Path

from ..common.auth_keys import Key, Role, check_called, held_key, run_of

NAME_CHARACTERS = 40


def default_name(key: Key | None = None) -> str:
    """The machine's name, made valid, and four random characters: replicas of one image get different ones.

    With a key they follow the key's own name, as far as a name has room for them.
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


def called(run: str, name: str | None, key: Path | None, *roles: Role, otherwise: str = "") -> dict[str, str]:
    """`run` and `name` of a membership: what is given if the key in the file `key` allows it, else what the key says.

    `otherwise`: the name where there is neither a name nor a key. SettingError, before anything connects.
    """
    held = held_key(key, *roles)
    made = default_name(held) if held is not None or not otherwise else otherwise
    return {"run": run_of(held, run, key), "name": check_called(held, made if name is None else name, key)}
