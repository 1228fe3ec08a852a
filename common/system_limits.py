"""Limits of the operating system: open files and threads. They are tried before ZeroMQ opens a socket, since libzmq
aborts the whole process where the system refuses it one of them.
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
"""Beside sockets: a log file, a tape, a host name's look-up, a module that is loaded late."""
NO_THREAD = "can't start new thread"
"""What Python says of it, in a RuntimeError."""


def check_room(who: str, *, files: int, threads: int) -> None:
    """LimitReached, naming the limit, unless this process may open so many more files and start so many threads."""
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
    """A sentence about the limit that `wrong` comes from; "" if it comes from none."""
    number = getattr(wrong, "errno", None)  # ZeroMQ's errors have one, too
    if number in (errno.EMFILE, errno.ENFILE):
        return _files_sentence()
    no_process = isinstance(wrong, BlockingIOError) and wrong.filename is None
    if no_process or (isinstance(wrong, RuntimeError) and NO_THREAD in str(wrong)):
        return _threads_sentence()
    return ""


def raise_file_limit() -> None:
    """Let this process open as many files as its user may have: for one that serves any number of connections."""
    if resource is not None:
        with suppress(OSError, ValueError):
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _files_sentence() -> str:
    return f"this process may have {_limit('RLIMIT_NOFILE')} files open at a time (ulimit -n); raise that limit"


def _threads_sentence() -> str:
    return (
        f"its user may have {_limit('RLIMIT_NPROC')} processes and threads at a time (ulimit -u), and a container has "
        "a limit of its own; raise the one that is reached"
    )


def _limit(name: str) -> str:
    number = getattr(resource, name, None)
    soft = -1 if number is None else resource.getrlimit(number)[0]
    return "any number of" if soft < 0 else str(soft)
