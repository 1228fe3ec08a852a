"""Standard output and error that never fail: after a closed pipe, a full disk or a closed terminal text is dropped.

This holds for all writers: prints, log lines, rich's live display, and what Python flushes at exit. Nor does any text
control the terminal, even if a library prints it (warnings, tracebacks of threads and finalizers, other loggers); only
the live display writes to the `unescaped` stream.
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

_STUCK_SECONDS = 5.0
"""Time after which a non-blocking descriptor that accepts no data counts as failed."""


class Output(io.RawIOBase):
    """A file descriptor to which writing never fails; the first failure is stored and logged once to the log file."""

    def __init__(self, descriptor: int, name: str, *, closed: bool = False) -> None:
        """`closed`: the descriptor was closed when the program started."""
        self.failure: OSError | None = None
        """Why nothing more is written; None while all writes have succeeded."""
        self.expendable = False
        """The output is only a display, whose loss is not an error of the command."""
        self.name = name
        self._descriptor = descriptor
        self._closed = closed
        self._offered, self._taken = b"", list[int]()
        """The last text, and the number of its bytes that were written; empty once `write` has returned that number."""

    def write(self, text: Any) -> int:
        """Number of bytes written, or dropped: after the first failure no further write is tried.

        A signal handler may raise between any two calls. Therefore the call that writes also stores the count,
        and no call lies between that and its return: no text is ever written twice.
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
            except BlockingIOError as error:  # another program made the shared descriptor non-blocking, as ssh does
                if not select.select([], [self._descriptor], [], _STUCK_SECONDS)[1]:
                    self._fail(error)
            except OSError as error:
                self._fail(error)
        count, self._taken = self._taken[0], []
        return count

    def _fail(self, error: OSError) -> None:
        self.failure = error
        from .log import warn_in_file  # noqa: PLC0415 quick commands without a log need not load structlog

        warn_in_file("display_lost", stream=self.name, reason=os.strerror(error.errno or 0))

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    @property
    def unwanted(self) -> bool:
        """The reader of a pipe has closed it, as `head` does: not an error."""
        return self.failure is not None and self.failure.errno == errno.EPIPE


class _EscapedText(io.TextIOWrapper):
    """Text stream that escapes control characters, except line ends and tabs."""

    def write(self, text: str) -> int:
        return super().write(printable_lines(text))


class _Unescaped:
    """The same stream without escaping, with the same buffer and order."""

    def __init__(self, stream: _EscapedText) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def unescaped(stream: TextIO) -> TextIO:
    """`stream` without escaping, for a writer that moves the cursor and escapes untrusted text itself."""
    return cast("TextIO", _Unescaped(stream)) if isinstance(stream, _EscapedText) else stream


def protect() -> tuple[Output, Output]:
    """Replace `sys.stdout` and `sys.stderr` by streams that never fail and escape control characters.

    Call it before any file is opened: closed standard descriptors are opened on the null device, since otherwise the
    next opened file would get their number.
    """
    os.environ.setdefault("PYTHON_COLORS", "0")  # colours in Python's tracebacks would be escaped
    closed = {number for number in (0, 1, 2) if not _is_open(number)}
    for number in sorted(closed):
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
    outputs = []
    for number, name, before in ((1, "stdout", sys.stdout), (2, "stderr", sys.stderr)):
        outputs.append(Output(number, name, closed=number in closed))
        setattr(sys, name, _text_stream(outputs[-1], before))
    stdout, stderr = outputs
    return stdout, stderr


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _text_stream(output: Output, before: TextIO | None) -> TextIO:
    if before is not None:
        with contextlib.suppress(OSError):
            before.flush()
    encoding = getattr(before, "encoding", None) or "utf-8"
    is_line_buffered = output.name == "stderr" or output.isatty()
    return _EscapedText(
        io.BufferedWriter(output), encoding=encoding, errors="backslashreplace", line_buffering=is_line_buffered
    )


def _output_of(stream: object) -> Output | None:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, Output) else None


def stdout_failure() -> OSError | None:
    """Why standard output failed; None while all flushed text has been written."""
    output = _output_of(sys.stdout)
    return None if output is None else output.failure


def make_stdout_expendable() -> None:
    """Declare that standard output only shows progress, so that losing it is not an error."""
    output = _output_of(sys.stdout)
    if output is not None:
        output.expendable = True


def echo(text: str, *, err: bool = False) -> None:
    """Print `text`, of one or more lines, with control characters escaped."""
    print(printable_lines(text), file=sys.stderr if err else sys.stdout, flush=True)


def deliver(text: str) -> None:
    """Write `text`, the result of a command, to standard output; OSError if it cannot be written completely."""
    sys.stdout.write(text)
    sys.stdout.flush()
    failure = stdout_failure()
    if failure is not None:
        raise failure
