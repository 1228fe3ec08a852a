"""Text that others wrote (in a file, a message, Redis, a command line), made fit for a terminal or a log."""

from __future__ import annotations

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


def _spelled(character: str) -> str:
    if ord(character) in _BYTES:
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")
