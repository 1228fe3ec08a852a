"""A run on the terminal: a live picture where there is a terminal, one plain line now and then where there is none."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..common.output import stdout_failure
from .console import PlainConsole, styled
from .status import RunStatus, Source

LINE_SECONDS = 10.0
"""Between two plain lines."""
READ_SECONDS = 1.0
OVER = ("finished", "stopped")
NOTES = 3
REJECTED_ROWS = 4
"""Learners whose messages are rejected get so many lines."""
IN_THE_PICTURE = ("run", "learners", "processes", "state", "steps", "steps_total", "trouble", "saved_at", "save_error",
                  "blocked", "rejected")  # fmt: skip
STATES = {"live": "green", "stalled": "yellow", "lost": "red", "left": "dim"}


class Display(Protocol):
    """Shows a run while it goes on."""

    def show(self, now: RunStatus) -> None: ...
    def note(self, sentence: str) -> None: ...
    def close(self) -> None: ...


def open_display(console: Console) -> Display:
    """The live picture on a terminal, plain lines elsewhere."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


class LiveDisplay:
    """A picture that is drawn anew in its place."""

    def __init__(self, console: Console) -> None:
        self._picture: RenderableType = styled("starting")
        self._notes: list[str] = []
        self._live = Live(self._picture, console=console, auto_refresh=False)
        self._live.start()

    def show(self, now: RunStatus) -> None:
        self._picture = picture(now)
        self._draw()

    def note(self, sentence: str) -> None:
        clock = time.strftime("%H:%M:%S")
        self._notes = [*self._notes, f"{clock} {sentence}"][-NOTES:]
        self._draw()

    def _draw(self) -> None:
        self._live.update(Group(self._picture, *(styled(note, "yellow") for note in self._notes)), refresh=True)

    def close(self) -> None:
        self._live.stop()


class PlainDisplay:
    """A line every ten seconds, and at once when the state changes, or the run is blocked or moves again."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told_at = -LINE_SECONDS
        self._state = ("", False)

    def show(self, now: RunStatus) -> None:
        moment = time.monotonic()
        state = now.state, bool(now.blocked)
        if moment - self._told_at >= LINE_SECONDS or state != self._state:
            self._told_at, self._state = moment, state
            self.note(line(now))

    def note(self, sentence: str) -> None:
        self._console.print(sentence, soft_wrap=True)

    def close(self) -> None:
        """Nothing is open."""


def follow(source: Source) -> int:
    """Show a run until it is over, Ctrl-C, or nothing more can be shown; the exit code."""
    display = open_display(PlainConsole())
    try:
        while (now := source.read()).state not in OVER and stdout_failure() is None:  # unseen, there is no more to do
            display.show(now)
            time.sleep(READ_SECONDS)
        display.show(now)
    except KeyboardInterrupt:
        return 0
    finally:
        display.close()
    return 0


def line(now: RunStatus) -> str:
    """The run in one plain line."""
    if not now.steps:
        return f"{now.run} is starting"
    figures = now.figures_so_far
    parts = [
        f"{now.run} {now.state} step {now.t}/{now.steps}",
        f"loss {_number(now.val_loss, '.3f')} nats/byte",
        f"{_number(now.tokens_per_second, ',.0f')} tokens/s",
        f"{len(now.live)} live",
        f"up {size(figures.get('bytes_up'))} down {size(figures.get('bytes_down'))}",
        *([] if now.state in OVER else [f"{duration(now.seconds_left)} left"]),
    ]
    return ", ".join(parts) + "".join(f" ({trouble})" for trouble in now.troubles)


def picture(now: RunStatus) -> RenderableType:
    """The run as a bar, one line of figures, and its learners."""
    if not now.steps:
        return styled(f"{now.run} is starting")
    figures = now.figures_so_far
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        styled(now.run, "bold"),
        ProgressBar(total=max(1, now.steps), completed=now.t, width=20),
        f"step {now.t}/{now.steps}",
        styled(now.state, "cyan"),
        "" if now.state in OVER else f"{duration(now.seconds_left)} left",
    )
    row = Text.assemble(
        "validation loss ", (_number(now.val_loss, ".3f"), "bold green"), " nats/byte",
        "   tokens/s ", (_number(now.tokens_per_second, ",.0f"), "bold"),
        "   merges ", (_number(figures.get("merges"), ","), "bold"), "   faults ", (str(now.faults), "bold"),
    )  # fmt: skip
    warnings = [styled(text, "yellow") for text in _warnings(now)]
    return Group(bar, row, *warnings, *([_learners(now)] if now.learners else []))


def _warnings(now: RunStatus) -> list[str]:
    """What is amiss, the quorum where that alone is known, and whose messages are rejected."""
    below = "met" if now.state in OVER or now.blocked else now.figures_so_far.get("quorum_state", "met")
    quorum = [] if below == "met" else [f"quorum: {below}"]
    rejected = [f"rejected again and again: {name}'s {why}" for name, why in now.rejected.items()]
    return [*now.troubles, *quorum, *rejected[:REJECTED_ROWS]]


def table(now: RunStatus) -> RenderableType:
    """The run with all its figures, as `diloco status` shows it."""
    figures = Table.grid(padding=(0, 2))
    for name, value in now.figures().items():
        if name not in IN_THE_PICTURE and value not in (None, ""):
            figures.add_row(styled(name, "dim"), styled(f"{value:,}" if isinstance(value, int) else str(value)))
    if now.saving and now.saving not in now.troubles:
        figures.add_row(styled("saved", "dim"), now.saving)
    pids = styled(", ".join(f"{name} {pid}" for name, pid in now.processes.items()), "dim")
    return Group(picture(now), figures, *([Text.assemble("processes: ", pids)] if now.processes else []))


def _learners(now: RunStatus) -> Table:
    rows = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    rows.add_column("learner")
    rows.add_column("state")
    for heading in ("steps", "ms/step", "loss", "tokens merged", "up", "down"):
        rows.add_column(heading, justify="right")
    for row in sorted(now.learners, key=lambda row: str(row["name"])):
        rows.add_row(*_learner(row))
    if len(now.learners) > 1:
        figures = now.figures_so_far
        merged, up, down = (figures.get(name) for name in ("tokens_merged", "bytes_up", "bytes_down"))
        rows.add_row("all", "", "", "", "", _number(merged, ","), size(up), size(down), style="dim")
    return rows


def _learner(row: Mapping[str, Any]) -> list[Text | str]:
    state, step = str(row.get("state", "")), row.get("step_seconds")
    return [
        str(row["name"]),
        styled(state, STATES.get(state, "")),
        f"{row.get('local_steps', 0):,}",
        _number(1000 * step if step else None, ".0f"),
        _loss(row.get("loss")),
        f"{row.get('tokens_merged', 0):,}",
        size(row.get("bytes_up")),
        size(row.get("bytes_down")),
    ]


def _loss(value: Any) -> str:
    """Of any size, in few characters."""
    return _number(value, ".3f" if not isinstance(value, int | float) or abs(value) < 1e6 else ".3g")


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "-"


def size(count: float | None) -> str:
    """Bytes as a person reads them.

    >>> size(1_536_000)
    '1.5 MB'
    """
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float | None) -> str:
    """Seconds as a person reads them.

    >>> duration(75)
    '1:15'
    """
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
