"""What holding a key means for whoever is about to connect: which run, which names. SettingError before anything is.

Everywhere a key is named by its file, and None is for a broker that takes none.
"""

from __future__ import annotations

from pathlib import Path

from .errors import SettingError
from .keys import ROLES, Key, Role


def held_key(file: Path | None, *roles: Role) -> Key | None:
    """The key in `file`; SettingError if there is none, or it is for none of `roles` (none named: any)."""
    if file is None:
        return None
    key = Key.load(file)
    if key.role not in (roles or ROLES):
        raise SettingError(
            f"the key {file} is for {key.role}s and does not serve here; give one that was made with "
            f"diloco keys new --role {roles[0]} --run {key.run}"
        )
    return key


def run_of(key: Key | None, run: str, file: Path | None) -> str:
    """The key's run, or `run` without a key; SettingError if `run` is named and the key is for another one."""
    if key is None:
        return run
    if run not in ("", key.run):
        raise SettingError(f"--run {run} is not the run that the key {file} is for: {key.run}; leave --run out")
    return key.run


def check_called(key: Key | None, name: str, file: Path | None) -> str:
    """`name` itself if the key's holder may be called so; SettingError otherwise."""
    if key is not None and not key.may_be_called(name):
        raise SettingError(
            f"--name {name} is not for the key {file} to bear, only {key.name} and {key.name}-* are; "
            "choose such a name, or leave --name out"
        )
    return name
