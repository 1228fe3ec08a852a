"""Where tables, pictures and their notes go: a rich console that shows text as it is."""

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
    """Nothing in a string is markup or an emoji code, and it is one line; no text colours, moves or erases anything."""

    def __init__(self, *, stderr: bool = False, **more: Any) -> None:
        more.setdefault("file", unescaped(sys.stderr if stderr else sys.stdout))
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False, **more)

    def render_str(self, text: str, **style: Any) -> Text:
        return super().render_str(printable(text), **style)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text):
            shown = printable_lines(renderable.plain)
            if shown != renderable.plain:
                renderable = renderable.copy()
                renderable.plain = shown
        return super().render(renderable, options)


def styled(line: str, style: str = "") -> Text:
    """One line of text in a style."""
    return Text(printable(line), style)
