"""Structured event log of a process: one JSON line per event in a file, one short line on the terminal.

    log = get_logger("syncer")
    log.info("delta_taken", fragment=3, learner="a", slot=41, seconds=0.018)

    {"ts":"2026-01-31T12:00:01.018Z","level":"info","process":"syncer","event":"delta_taken","fragment":3,...}
    12:00:01 syncer delta_taken fragment=3 learner=a slot=41 seconds=0.018

The terminal is rate-limited: of frequent events it shows a few, the file has all of them. One event is always one
line, whatever its names and values: control characters are escaped, and the JSON is pure ASCII that every parser
accepts (lone surrogates are escaped, nan and infinity become text). structlog's global configuration is not changed,
because `join()` runs inside a user's program.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import structlog
from structlog.typing import FilteringBoundLogger

from .errors import SettingError
from .printable import encodable, json_value, printable

_THROTTLE_SECONDS, _THROTTLE_LINES = 10.0, 3
"""Time window, and most lines in it on the terminal, per event name and learner. Warnings are never suppressed."""
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_OWN_FIELDS = ("ts", "level", "process", "event")


def configure(process: str, *, json_file: Path | None = None, level: str = "info", terminal: bool = True) -> None:
    """Set the name of the process and the outputs; before, events go to the terminal under the logger's own name.

    It also affects existing loggers, and a second call replaces the outputs. `terminal` is stderr. SettingError if the
    level is unknown or the file cannot be opened for appending (its folder is created).
    """
    if level not in LEVELS:
        raise SettingError(f"--log-level must be one of {', '.join(LEVELS)}, not {level!r}")
    file = None if json_file is None else _LineFile(json_file)
    old, _outputs.file = _outputs.file, file
    _outputs.process, _outputs.threshold, _outputs.terminal = process, LEVELS[level], terminal
    _outputs.throttle = _Throttle()
    if old is not None:
        old.close()


def get_logger(name: str) -> FilteringBoundLogger:
    """Logger of one part of a process; `name` becomes the field `part` if it is not the name of the process."""
    wrapped = structlog.wrap_logger(
        _outputs,
        processors=[_drop_below_level, structlog.processors.format_exc_info, _complete],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        cache_logger_on_first_use=True,
        part=name,
    )
    return cast("FilteringBoundLogger", wrapped)


class _LineFile:
    """Append-only file of complete lines, unbuffered, so that a killed process loses none."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise SettingError(f"cannot write the log file {path}: {error.strerror}") from error
        self._ends_mid_line = False
        self._is_failing = False

    def write(self, line: str) -> None:
        """Append the line. A full disk loses lines but never stops the process; stderr gets one message per failure."""
        rest = (("\n" if self._ends_mid_line else "") + line + "\n").encode("ascii", "backslashreplace")
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            self._ends_mid_line = True
            if not self._is_failing:
                _to_terminal(f"the log file cannot be written: {error.strerror}; events are lost until it can be")
            self._is_failing = True
        else:
            self._ends_mid_line = self._is_failing = False

    def close(self) -> None:
        os.close(self._descriptor)


class _Throttle:
    """Rate limit of the terminal, per event name and learner."""

    def __init__(self) -> None:
        self._windows: dict[tuple[str, str], tuple[float, int]] = {}
        """Start of the current time window, and number of events in it."""

    def suppressed(self, event: Mapping[str, Any]) -> int | None:
        """Number of similar events suppressed before this one; None if this one is to be suppressed."""
        key, now = (event["event"], str(event.get("learner", ""))), time.monotonic()
        since, count = self._windows.get(key, (now, 0))
        if now - since < _THROTTLE_SECONDS:
            self._windows[key] = (since, count + 1)
            return 0 if count < _THROTTLE_LINES else None
        if len(self._windows) > 1000:  # learners come and go
            self._windows.clear()
        self._windows[key] = (now, 1)
        return max(0, count - _THROTTLE_LINES)


class _Outputs:
    """Outputs of complete events. All loggers share one instance, so that `configure` also affects existing ones."""

    def __init__(self) -> None:
        self.process = ""
        self.threshold = LEVELS["info"]
        self.terminal = True
        self.file: _LineFile | None = None
        self.throttle = _Throttle()
        self.renew_lock()

    def renew_lock(self) -> None:
        """Replace the lock, which after a fork may be held by a thread that does not exist in the child."""
        self._lock = threading.RLock()  # reentrant: a write to the terminal that fails logs an event to the file

    def msg(self, **event: Any) -> None:
        with self._lock:
            self.write_to_file(event)
            if self.terminal:
                self._show(event)

    def write_to_file(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            if self.file is not None:
                self.file.write(json.dumps(event, separators=(",", ":"), allow_nan=False))

    def _show(self, event: Mapping[str, Any]) -> None:
        is_throttled = event["level"] == "info" and self.threshold == LEVELS["info"]
        suppressed = self.throttle.suppressed(event) if is_throttled else 0
        if suppressed is not None:
            _to_terminal(_human_line(event) + (f" (and {suppressed} like it)" if suppressed else ""))

    debug = info = warning = error = critical = msg


_outputs = _Outputs()
os.register_at_fork(after_in_child=_outputs.renew_lock)


def _drop_below_level(_: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if LEVELS.get(method, LEVELS["error"]) < _outputs.threshold:
        raise structlog.DropEvent
    return event


def _complete(_: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the standard fields, in front; a caller's field of the same name gets a trailing underscore."""
    part = event.pop("part", "")
    process = encodable(_outputs.process or part)
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    complete: dict[str, Any] = {
        "ts": now,
        "level": method if method in LEVELS else "error",
        "process": process,
        "event": encodable(str(event.pop("event", ""))),
    }
    if part and part != process:
        complete["part"] = part
    for key, value in event.items():
        complete[f"{key}_" if key in _OWN_FIELDS or key == "part" else encodable(key)] = json_value(value)
    return complete


def _human_line(event: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in event.items() if key not in (*_OWN_FIELDS, "part")}
    traceback = rest.pop("exception", None)
    words = [datetime.now().astimezone().strftime("%H:%M:%S"), printable(event["process"])]
    if LEVELS[event["level"]] > LEVELS["info"]:
        words.append(event["level"].upper())
    words.append(printable(event["event"]))
    words += [f"{printable(key)}={_human_value(value)}" for key, value in rest.items()]
    line = " ".join(words)
    if isinstance(traceback, str):
        line += "".join(f"\n    {printable(row)}" for row in traceback.splitlines())
    return line


def _human_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        bare = value and not any(c in ' "=\\' for c in value)
        return printable(value) if bare else '"' + printable(value).replace('"', r"\"") + '"'
    return printable(json.dumps(value, ensure_ascii=False))


def warn_in_file(event: str, **fields: Any) -> None:
    """Log a warning to the log file only, if there is one, because the terminal cannot be written."""
    if _outputs.file is not None and _outputs.threshold <= LEVELS["warning"]:
        _outputs.write_to_file(_complete(None, "warning", {"event": event, **fields}))


def _to_terminal(line: str) -> None:
    stream = sys.stderr
    is_original = stream is sys.__stderr__
    encoding = getattr(stream, "encoding", None) or "ascii"
    try:
        text = line.encode(encoding, "backslashreplace") + b"\n"
        if not is_original:
            stream.write(text.decode(encoding))
        stream.flush()
        # Bypass the interpreter's buffer: text left in it would fail again at exit, and turn the exit code of a user's
        # program into 120.
        while is_original and text:
            text = text[os.write(stream.fileno(), text) :]
    except (OSError, ValueError, AttributeError, RuntimeError):
        # The terminal was closed or its reader has exited: the file still has the line, and training continues.
        return
