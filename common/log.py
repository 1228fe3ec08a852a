"""Events of one process: one JSON line each into a file, one short line each on the terminal.

    log = get_logger("syncer")
    log.info("delta_taken", fragment=3, learner="a", slot=41, seconds=0.018)

    {"ts":"2026-01-31T12:00:01.018Z","level":"info","process":"syncer","event":"delta_taken","fragment":3,...}
    12:00:01 syncer delta_taken fragment=3 learner=a slot=41 seconds=0.018

The terminal is spared: what happens many times a second has a few lines there, and all of them only in the file.
Whatever stands in a name or a value, one event is one line: control characters are escaped, the JSON is pure ASCII,
and every reader takes it: a surrogate without its partner is spelled out, nan and infinity are text.
structlog's global settings are left alone, since `join()` runs inside somebody else's program.
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

CALM_SECONDS, CALM_LINES = 10.0, 3
"""In so many seconds the terminal gets so many lines of one kind of event about one learner. Warnings all pass."""
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_OWN_FIELDS = ("ts", "level", "process", "event")


def configure(process: str, *, json_file: Path | None = None, level: str = "info", terminal: bool = True) -> None:
    """Say who we are and where events go; until then they go to the terminal under the logger's own name.

    Loggers made earlier follow. A second call replaces the first one's outputs. `terminal` is stderr. SettingError if
    the level is unknown or the file cannot be opened for appending (its folder is made).
    """
    if level not in LEVELS:
        raise SettingError(f"--log-level must be one of {', '.join(LEVELS)}, not {level!r}")
    file = None if json_file is None else _LineFile(json_file)
    old, _outputs.file = _outputs.file, file
    _outputs.process, _outputs.threshold, _outputs.terminal = process, LEVELS[level], terminal
    _outputs.calm = _Throttle()
    if old is not None:
        old.close()


def get_logger(name: str) -> FilteringBoundLogger:
    """The logger of one part of a process; `name` appears as field `part` where it is not the process's own name."""
    wrapped = structlog.wrap_logger(
        _outputs,
        processors=[_drop_below_level, structlog.processors.format_exc_info, _complete],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        cache_logger_on_first_use=True,
        part=name,
    )
    return cast("FilteringBoundLogger", wrapped)


class _LineFile:
    """A file of whole lines: each is handed to the system at once, so that a killed process loses none."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as wrong:
            raise SettingError(f"cannot write the log file {path}: {wrong.strerror}") from wrong
        self._torn = False
        self._failing = False

    def write(self, line: str) -> None:
        """Append the line. A full disk costs lines, never the process; it is told on stderr once, until it works."""
        rest = (("\n" if self._torn else "") + line + "\n").encode("ascii", "backslashreplace")
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as wrong:
            self._torn = True
            if not self._failing:
                _to_terminal(f"the log file cannot be written: {wrong.strerror}; events are lost until it can")
            self._failing = True
        else:
            self._torn = self._failing = False

    def close(self) -> None:
        os.close(self._descriptor)


class _Throttle:
    """How often the terminal heard of what lately."""

    def __init__(self) -> None:
        self._heard: dict[tuple[str, str], tuple[float, int]] = {}

    def left_out(self, event: Mapping[str, Any]) -> int | None:
        """How many events like this one were left out before it; None if it is to be left out as well."""
        key, now = (event["event"], str(event.get("learner", ""))), time.monotonic()
        since, times = self._heard.get(key, (now, 0))
        if now - since < CALM_SECONDS:
            self._heard[key] = (since, times + 1)
            return 0 if times < CALM_LINES else None
        if len(self._heard) > 1000:  # learners come and go
            self._heard.clear()
        self._heard[key] = (now, 1)
        return max(0, times - CALM_LINES)


class _Outputs:
    """Where finished events go. Loggers share the one instance, so that `configure` reaches those made before it."""

    def __init__(self) -> None:
        self.process = ""
        self.threshold = LEVELS["info"]
        self.terminal = True
        self.file: _LineFile | None = None
        self.calm = _Throttle()
        self.renew_lock()

    def renew_lock(self) -> None:
        """In a process that was forked while another thread held the lock, no thread is left to release it."""
        self._lock = threading.RLock()  # the terminal that is lost while it is written to is noted in the file

    def msg(self, **event: Any) -> None:
        with self._lock:
            self.into_file(event)
            if self.terminal:
                self._show(event)

    def into_file(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            if self.file is not None:
                self.file.write(json.dumps(event, separators=(",", ":"), allow_nan=False))

    def _show(self, event: Mapping[str, Any]) -> None:
        spared = event["level"] == "info" and self.threshold == LEVELS["info"]
        left_out = self.calm.left_out(event) if spared else 0
        if left_out is not None:
            _to_terminal(_human_line(event) + (f" (and {left_out} like it)" if left_out else ""))

    debug = info = warning = error = critical = msg


_outputs = _Outputs()
os.register_at_fork(after_in_child=_outputs.renew_lock)


def _drop_below_level(_: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if LEVELS.get(method, LEVELS["error"]) < _outputs.threshold:
        raise structlog.DropEvent
    return event


def _complete(_: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """The event's own fields first and in order; a caller's field of the same name gets a trailing underscore."""
    part = event.pop("part", "")
    process = encodable(_outputs.process or part)
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    whole: dict[str, Any] = {
        "ts": now,
        "level": method if method in LEVELS else "error",
        "process": process,
        "event": encodable(str(event.pop("event", ""))),
    }
    if part and part != process:
        whole["part"] = part
    for key, value in event.items():
        whole[f"{key}_" if key in _OWN_FIELDS or key == "part" else encodable(key)] = json_value(value)
    return whole


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


def note_in_file(event: str, **fields: Any) -> None:
    """A warning for the log file alone, where there is one: about a terminal that no longer takes lines."""
    if _outputs.file is not None and _outputs.threshold <= LEVELS["warning"]:
        _outputs.into_file(_complete(None, "warning", {"event": event, **fields}))


def _to_terminal(line: str) -> None:
    stream = sys.stderr
    own = stream is sys.__stderr__
    encoding = getattr(stream, "encoding", None) or "ascii"
    try:
        text = line.encode(encoding, "backslashreplace") + b"\n"
        if not own:
            stream.write(text.decode(encoding))
        stream.flush()
        # Past the interpreter's own buffer: what stayed in there would fail once more at its end, and turn the exit
        # code of a program that only joined a run into 120.
        while own and text:
            text = text[os.write(stream.fileno(), text) :]
    except (OSError, ValueError, AttributeError, RuntimeError):
        # The terminal is gone (closed, or its reader has left): the file still has the line, and training goes on.
        return
