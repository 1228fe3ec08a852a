"""Limits of the operating system on open files and threads. They are checked before ZeroMQ opens sockets, since libzmq
aborts the whole process when the system refuses it a file or a thread.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]

from .errors import LimitReached

SPARE_FILES = 8
"""For other needs than sockets: a log file, a tape, a host name's resolution, a module imported late."""
NO_THREAD = "can't start new thread"
"""Python's text for it, in a RuntimeError."""


def check_room(who: str, *, files: int, threads: int) -> None:
    """Raises LimitReached, naming the limit, unless this process can open `files` more files and start `threads` more
    threads.
    """
    files += SPARE_FILES
    opened: list[int] = []
    try:
        while len(opened) < files:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as wrong:
        raise LimitReached(f"{who} needs {files} more open files: {_files_sentence()}") from wrong
    finally:
        for descriptor in opened:
            os.close(descriptor)
    end = threading.Event()
    waiting = [threading.Thread(target=end.wait, daemon=True) for _ in range(threads)]
    try:
        for thread in waiting:
            thread.start()
    except RuntimeError as wrong:
        raise LimitReached(f"{who} needs {threads} more threads: {_threads_sentence()}") from wrong
    finally:
        end.set()
        for thread in waiting:
            if thread.ident is not None:
                thread.join()


def limit_of(wrong: BaseException) -> str:
    """A sentence that names the limit behind the error `wrong`; "" if no limit caused it."""
    number = getattr(wrong, "errno", None)  # ZeroMQ's errors have it, too
    if number in (errno.EMFILE, errno.ENFILE):
        return _files_sentence()
    no_process = isinstance(wrong, BlockingIOError) and wrong.filename is None
    if no_process or (isinstance(wrong, RuntimeError) and NO_THREAD in str(wrong)):
        return _threads_sentence()
    return ""


def raise_file_limit() -> None:
    """Raise this process's limit of open files to the hard limit. For processes that serve many connections."""
    if resource is not None:
        with suppress(OSError, ValueError):
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _files_sentence() -> str:
    return f"this process may have {_limit('RLIMIT_NOFILE')} files open at a time (ulimit -n); raise that limit"


def _threads_sentence() -> str:
    return (
        f"its user may have {_limit('RLIMIT_NPROC')} processes and threads at a time (ulimit -u), and a container has "
        "its own limit; raise the one that is reached"
    )


def _limit(name: str) -> str:
    number = getattr(resource, name, None)
    soft = -1 if number is None else resource.getrlimit(number)[0]
    return "any number of" if soft < 0 else str(soft)
