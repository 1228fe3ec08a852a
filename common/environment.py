"""Names of the environment variables that stand for options: DILOCO_ and the field's name in capitals."""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "DILOCO_"


def variable(field: str) -> str:
    """`sync_every` -> DILOCO_SYNC_EVERY."""
    return PREFIX + field.upper()


def without_options(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a child that is told everything in its arguments."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX)}
