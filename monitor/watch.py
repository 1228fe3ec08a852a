"""Terminal display of a run: a live dashboard on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
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
from .status import RunSource, RunStatus

LINE_SECONDS = 10.0
"""Interval between two plain lines."""
READ_SECONDS = 1.0
OVER = ("finished", "stopped")
NOTES = 3
REJECTED_ROWS = 4
"""Most lines on learners whose messages are rejected."""
IN_DASHBOARD = ("run", "learners", "processes", "state", "steps", "steps_total", "trouble", "saved_at", "save_error",
                  "blocked", "rejected")  # fmt: skip
STATES = {"live": "green", "stalled": "yellow", "lost": "red", "left": "dim"}


class Display(Protocol):
    """Shows a running run."""

    def show(self, status: RunStatus) -> None: ...
    def note(self, sentence: str) -> None: ...
    def close(self) -> None: ...


def open_display(console: Console) -> Display:
    """A live dashboard on a terminal, plain lines elsewhere."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


class LiveDisplay:
    """A dashboard that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._dashboard: RenderableType = styled("starting")
        self._notes: list[str] = []
        self._live = Live(self._dashboard, console=console, auto_refresh=False)
        self._live.start()

    def show(self, status: RunStatus) -> None:
        self._dashboard = dashboard(status)
        self._draw()

    def note(self, sentence: str) -> None:
        clock = time.strftime("%H:%M:%S")
        self._notes = [*self._notes, f"{clock} {sentence}"][-NOTES:]
        self._draw()

    def _draw(self) -> None:
        self._live.update(Group(self._dashboard, *(styled(note, "yellow") for note in self._notes)), refresh=True)

    def close(self) -> None:
        self._live.stop()


class PlainDisplay:
    """A line every ten seconds, and at once when the state changes or the run becomes blocked or unblocked."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown_at = -LINE_SECONDS
        self._state = ("", False)

    def show(self, status: RunStatus) -> None:
        now = time.monotonic()
        state = status.state, bool(status.blocked)
        if now - self._shown_at >= LINE_SECONDS or state != self._state:
            self._shown_at, self._state = now, state
            self.note(line(status))

    def note(self, sentence: str) -> None:
        self._console.print(sentence, soft_wrap=True)

    def close(self) -> None:
        """Nothing to close."""


def follow(source: RunSource) -> int:
    """Show a run until it is over, Ctrl-C, or standard output is closed; returns the exit code."""
    display = open_display(PlainConsole())
    try:
        while (status := source.read()).state not in OVER and stdout_failure() is None:  # None: it has a reader
            display.show(status)
            time.sleep(READ_SECONDS)
        display.show(status)
    except KeyboardInterrupt:
        return 0
    finally:
        display.close()
    return 0


def line(status: RunStatus) -> str:
    """The run as one plain line."""
    if not status.steps:
        return f"{status.run} is starting"
    figures = status.summary
    parts = [
        f"{status.run} {status.state} step {status.t}/{status.steps}",
        f"loss {_number(status.val_loss, '.3f')} nats/byte",
        f"{_number(status.tokens_per_second, ',.0f')} tokens/s",
        f"{len(status.live)} live",
        f"up {size(figures.get('bytes_up'))} down {size(figures.get('bytes_down'))}",
        *([] if status.state in OVER else [f"{duration(status.seconds_left)} left"]),
    ]
    return ", ".join(parts) + "".join(f" ({trouble})" for trouble in status.troubles)


def dashboard(status: RunStatus) -> RenderableType:
    """The run as a progress bar, one line of figures, and a table of its learners."""
    if not status.steps:
        return styled(f"{status.run} is starting")
    figures = status.summary
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        styled(status.run, "bold"),
        ProgressBar(total=max(1, status.steps), completed=status.t, width=20),
        f"step {status.t}/{status.steps}",
        styled(status.state, "cyan"),
        "" if status.state in OVER else f"{duration(status.seconds_left)} left",
    )
    row = Text.assemble(
        "validation loss ", (_number(status.val_loss, ".3f"), "bold green"), " nats/byte",
        "   tokens/s ", (_number(status.tokens_per_second, ",.0f"), "bold"),
        "   merges ", (_number(figures.get("merges"), ","), "bold"), "   faults ", (str(status.faults), "bold"),
    )  # fmt: skip
    warnings = [styled(text, "yellow") for text in _warnings(status)]
    return Group(bar, row, *warnings, *([_learners(status)] if status.learners else []))


def _warnings(status: RunStatus) -> list[str]:
    """Problems, a missing quorum if it is not among them, and learners whose messages are rejected."""
    below = "met" if status.state in OVER or status.blocked else status.summary.get("quorum_state", "met")
    quorum = [] if below == "met" else [f"quorum: {below}"]
    rejected = [f"repeatedly rejected: {name}'s {why}" for name, why in status.rejected.items()]
    return [*status.troubles, *quorum, *rejected[:REJECTED_ROWS]]


def table(status: RunStatus) -> RenderableType:
    """The run with all its figures, as shown by `diloco status`."""
    figures = Table.grid(padding=(0, 2))
    for name, value in status.figures().items():
        if name not in IN_DASHBOARD and value not in (None, ""):
            figures.add_row(styled(name, "dim"), styled(f"{value:,}" if isinstance(value, int) else str(value)))
    if status.saving and status.saving not in status.troubles:
        figures.add_row(styled("saved", "dim"), status.saving)
    pids = styled(", ".join(f"{name} {pid}" for name, pid in status.processes.items()), "dim")
    return Group(dashboard(status), figures, *([Text.assemble("processes: ", pids)] if status.processes else []))


def _learners(status: RunStatus) -> Table:
    rows = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    rows.add_column("learner")
    rows.add_column("state")
    for heading in ("steps", "ms/step", "loss", "tokens merged", "up", "down"):
        rows.add_column(heading, justify="right")
    for row in sorted(status.learners, key=lambda row: str(row["name"])):
        rows.add_row(*_learner(row))
    if len(status.learners) > 1:
        figures = status.summary
        merged, up, down = (figures.get(name) for name in ("tokens_merged", "bytes_up", "bytes_down"))
        rows.add_row("all", "", "", "", "", _number(merged, ","), size(up), size(down), style="dim")
    return rows


def _learner(row: Mapping[str, Any]) -> list[Text | str]:
    state, step = str(row.get("state", "")), row.get("step_seconds")
    return [
        str(row["name"]),
        styled(state, STATES.get(state, "")),
        _number(row.get("local_steps") or 0, ","),
        _number(1000 * step if step else None, ".0f"),
        _loss(row.get("loss")),
        _number(row.get("tokens_merged") or 0, ","),
        size(row.get("bytes_up")),
        size(row.get("bytes_down")),
    ]


def _loss(value: Any) -> str:
    """A loss of any magnitude in few characters."""
    return _number(value, ".3f" if not isinstance(value, int | float) or abs(value) < 1e6 else ".3g")


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "-"


def size(count: float | None) -> str:
    """Bytes in human-readable form.

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
    """Seconds in human-readable form.

    >>> duration(75)
    '1:15'
    """
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
