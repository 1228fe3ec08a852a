"""Console for tables and live displays: a rich console that prints text literally."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from ..common.output import unescaped
from ..common.printable import printable, printable_lines


class PlainConsole(Console):
    """Strings are one line without markup or emoji codes; control characters in them are escaped."""

    def __init__(self, *, stderr: bool = False, **more: Any) -> None:
        more.setdefault("file", unescaped(sys.stderr if stderr else sys.stdout))
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False, **more)

    def render_str(self, text: str, **style: Any) -> Text:
        return super().render_str(printable(text), **style)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text):
            plain = printable_lines(renderable.plain)
            if plain != renderable.plain:
                renderable = renderable.copy()
                renderable.plain = plain
        return super().render(renderable, options)


def styled(line: str, style: str = "") -> Text:
    """One line of text with a style."""
    return Text(printable(line), style)
