"""Text that others wrote (in a file, a message, Redis, a command line), made fit for a terminal, a log or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

_BYTES = range(0xDC80, 0xDD00)
"""How Python spells bytes of a file name or an argument that are no text: U+DC80 + (byte - 0x80)."""


def printable(text: str) -> str:
    r"""`text` without anything that moves the cursor, ends the line or turns the writing's direction, and without what
    no encoding has: those characters are spelled as Python spells them, `\x1b`.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else _spelled(c) for c in text)


def printable_lines(text: str) -> str:
    """The same for text of several lines: line ends and tabs stay."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\n\t" else _spelled(c) for c in text)


def encodable(text: str) -> str:
    r"""`text` with each surrogate that has no partner spelled: many readers of JSON refuse its escape, `\ud800`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join(_spelled(c) if "\ud800" <= c <= "\udfff" else c for c in text)
    return text


_PLAIN_TYPES = frozenset({int, bool, type(None)})


def json_value(value: Any) -> Any:
    """`value` in terms of JSON; anything else as its text, and so are nan and infinity, which JSON does not have."""
    if type(value) in _PLAIN_TYPES:  # by far the most, and asking an abstract class is dear
        return value
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {encodable(str(key)): json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_value(inner) for inner in value]
    return encodable(str(value))


def json_line(value: Any) -> str:
    """`value` as one line of JSON that every reader takes, in ASCII."""
    return json.dumps(json_value(value), allow_nan=False)


def _spelled(character: str) -> str:
    if ord(character) in _BYTES:
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")
