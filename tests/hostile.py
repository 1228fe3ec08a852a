"""Texts that a peer, a file, a key or a command line may bring along, and what must come of them on a terminal."""

from __future__ import annotations

import re

HOSTILE = [
    "\x1b]0;owned\x07",  # an OSC sequence: the window's title
    "\x1b]8;;http://x\x1b\\here\x1b]8;;\x1b\\",  # a link
    "\x1b[2J\x1b[1;31m",  # CSI: the screen is cleared, what follows is red
    "\x9b31m",  # CSI in one character
    "\r12:00:00 syncer merged",
    "\n12:00:00 syncer merged fragment=1",
    "\u2028next\u2029line\x85and\x0b\x0c",
    "\ud800",  # what no encoding has
    "\udcff",  # a byte of a file name that is no text
    "\u202etxt.exe\u2066\u200f",  # the writing turns round
    "\u200b\ufeff",  # nothing is seen
    "\x00\x08\x7f",
    "[bold red]loud[/bold red] [/] [link=http://x]here[/link]",  # rich's markup
    ":skull: :smiley:",  # rich's emoji codes
]
ALL_AT_ONCE = "".join(HOSTILE)
_STYLES = re.compile(r"\x1b\[[0-9;]*m")
_LIVE = re.compile(r"\x1b\[(?:\?25[lh]|[0-9]*[AK]|[0-9]*G)|\r")


def check_shown(output: str, *, live: bool = False) -> None:
    """AssertionError if there is more in `output` than text, rich's own colours and, for a live picture, its cursor."""
    rest = _STYLES.sub("", output)
    if live:
        rest = _LIVE.sub("", rest)
    odd = {c for c in rest if not (c.isprintable() or c in "\n\t")}
    assert not odd, f"{odd} in {rest!r}"
    rest.encode("utf-8")
