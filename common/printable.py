"""Escaping of untrusted text (from files, messages, Redis, arguments) for terminals, logs and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

_BYTES = range(0xDC80, 0xDD00)
"""Python's surrogate escapes: undecodable bytes of file names and arguments, as U+DC80 + (byte - 0x80)."""


def printable(text: str) -> str:
    r"""`text` on one line, with control characters, bidirectional marks and surrogates escaped as in Python: `\x1b`."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def printable_lines(text: str) -> str:
    """The same for text of several lines: line ends and tabs are kept."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\n\t" else _escape(c) for c in text)


def encodable(text: str) -> str:
    r"""`text` with lone surrogates escaped, since many JSON parsers reject the escape `\ud800`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join(_escape(c) if "\ud800" <= c <= "\udfff" else c for c in text)
    return text


_PLAIN_TYPES = frozenset({int, bool, type(None)})


def json_value(value: Any) -> Any:
    """`value` as JSON types. Other types, nan and infinity, which JSON lacks, become text."""
    if type(value) in _PLAIN_TYPES:  # the common case, because the checks against abstract classes are slow
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
    """`value` as one line of ASCII JSON that every parser accepts."""
    return json.dumps(json_value(value), allow_nan=False)


def _escape(character: str) -> str:
    if ord(character) in _BYTES:
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")
