"""Standard output and standard error that cannot end a program: text that they do not take is dropped and counted as
lost, so that a closed pipe, a full disk or a vanished terminal costs the display and nothing else.

All writers are served alike: prints, log lines, rich's live display, and what Python itself flushes at the end. And no
text controls the terminal, whichever program part or library prints it (warnings, errors that end a thread or come up
in a finalizer, other loggers): only what draws a picture writes to the stream below, `unescaped`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from typing import Any, TextIO, cast

from .printable import printable_lines

STUCK_SECONDS = 5.0
"""How long a descriptor that does not block may take nothing before it counts as lost."""


class Output(io.RawIOBase):
    """One descriptor. Writing never fails; the first failure is kept, and named once in the log file."""

    def __init__(self, descriptor: int, name: str, *, closed: bool = False) -> None:
        """`closed`: the descriptor was, when the program began."""
        self.failure: OSError | None = None
        """Why nothing more is written; None while all that was written arrived."""
        self.expendable = False
        """What is written here is a display, whose loss is no failure of the command."""
        self.name = name
        self._descriptor = descriptor
        self._closed = closed
        self._offered, self._taken = b"", list[int]()
        """The last text, and how much of it was written; empty once the buffer above has been informed of that."""

    def write(self, text: Any) -> int:
        """How much was taken, or is lost: after a failure nothing more is tried.

        A signal handler may raise between any two calls. So the count is kept in the same call that writes, and given
        back without another one: text that went out is never written again.
        """
        offered = bytes(text)
        if self._taken and not offered.startswith(self._offered[: self._taken[0]]):
            self._taken = []
        while not self._taken:
            if self.failure is not None:
                return len(offered)
            self._offered = offered
            try:
                if self._closed:
                    raise OSError(errno.EBADF, os.strerror(errno.EBADF))
                self._taken.extend(map(os.write, (self._descriptor,), (offered,)))
            except BlockingIOError as wrong:  # another program has set the shared descriptor so, as ssh does
                if not select.select([], [self._descriptor], [], STUCK_SECONDS)[1]:
                    self._lose(wrong)
            except OSError as wrong:
                self._lose(wrong)
        count, self._taken = self._taken[0], []
        return count

    def _lose(self, wrong: OSError) -> None:
        self.failure = wrong
        from .log import note_in_file  # noqa: PLC0415 quick commands, which have no log file, need not wait for structlog

        note_in_file("display_lost", stream=self.name, reason=os.strerror(wrong.errno or 0))

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    @property
    def unwanted(self) -> bool:
        """The reader of a pipe has left, as `head` does: it had enough."""
        return self.failure is not None and self.failure.errno == errno.EPIPE


class EscapedText(io.TextIOWrapper):
    """Text of one line or more, in which whatever controls a terminal is spelled out."""

    def write(self, text: str) -> int:
        return super().write(printable_lines(text))


class _Unescaped:
    """The same stream for what draws on a terminal, with its buffer and its order."""

    def __init__(self, stream: EscapedText) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def unescaped(stream: TextIO) -> TextIO:
    """`stream`, for a writer that escapes foreign text by itself and moves the cursor."""
    return cast("TextIO", _Unescaped(stream)) if isinstance(stream, EscapedText) else stream


def protect() -> tuple[Output, Output]:
    """Have `sys.stdout` and `sys.stderr` lose what they cannot write, and escape what they can. To be called before any
    file is opened: a standard descriptor that is closed leads nowhere from now on, or else the next file opened would
    get its number.
    """
    os.environ.setdefault("PYTHON_COLORS", "0")  # Python would colour its tracebacks, and that would be spelled out
    closed = {number for number in (0, 1, 2) if not _is_open(number)}
    for number in sorted(closed):
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
    outputs = []
    for number, name, before in ((1, "stdout", sys.stdout), (2, "stderr", sys.stderr)):
        outputs.append(Output(number, name, closed=number in closed))
        setattr(sys, name, _text_over(outputs[-1], before))
    stdout, stderr = outputs
    return stdout, stderr


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _text_over(output: Output, before: TextIO | None) -> TextIO:
    if before is not None:
        with contextlib.suppress(OSError):
            before.flush()
    encoding = getattr(before, "encoding", None) or "utf-8"
    is_prompt = output.name == "stderr" or output.isatty()
    return EscapedText(
        io.BufferedWriter(output), encoding=encoding, errors="backslashreplace", line_buffering=is_prompt
    )


def _under(stream: object) -> Output | None:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, Output) else None


def stdout_failure() -> OSError | None:
    """Why standard output lost something; None while all that was flushed arrived."""
    output = _under(sys.stdout)
    return None if output is None else output.failure


def make_stdout_expendable() -> None:
    """What this command writes to standard output only shows how it goes: losing it is no failure."""
    output = _under(sys.stdout)
    if output is not None:
        output.expendable = True


def echo(text: str, *, err: bool = False) -> None:
    """Print `text`, of one line or more, with nothing in it that controls a terminal."""
    print(printable_lines(text), file=sys.stderr if err else sys.stdout, flush=True)


def deliver(text: str) -> None:
    """Write `text`, a command's result, to standard output; OSError if that does not take all of it."""
    sys.stdout.write(text)
    sys.stdout.flush()
    failure = stdout_failure()
    if failure is not None:
        raise failure
