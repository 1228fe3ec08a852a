"""Environment variables of command-line options: DILOCO_ and the field's name in capitals."""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "DILOCO_"


def variable(field: str) -> str:
    """The variable of a field: `sync_every` -> DILOCO_SYNC_EVERY."""
    return PREFIX + field.upper()


def without_options(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without the options, for a child process that gets all of them as arguments."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX)}
