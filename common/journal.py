"""Event journals ("tapes"): the events of a run as JSON lines, in the order in which each process saw them.

A tape is a folder. Each process writes its own file, so that no process waits for another:

    syncer-EPOCH.jsonl          every input of the round machine with its time, and every decision
    NAME-INCARNATION.jsonl      every step boundary of one life of a learner: what it adopted, what it captured

The first line of a file names its writer. Runs and simulations write the same format, and `diloco replay` reads both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from .errors import SettingError
from .log import get_logger

VERSION = 1
FOLDER = "tape"
"""The tape's folder inside a run's folder, with `diloco up --tape`."""
Row = dict[str, Any]
BROKEN = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError)
"""Errors that invalid rows cause when they are used as events."""

log = get_logger("tape")


class JournalWriter:
    """Writer of one process's file. Each line is handed to the system at once, so that a killed process loses none. A
    full disk ends the tape, not the run.
    """

    def __init__(self, folder: Path, name: str, **head: Any) -> None:
        """SettingError if the file cannot be created, or exists: a tape is never overwritten."""
        path = folder / f"{name}.jsonl"
        if folder.exists() and not folder.is_dir():
            raise SettingError(f"--tape {folder} is not a folder; give a folder, or one that does not exist yet")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: TextIO | None = path.open("x", buffering=1)
        except FileExistsError as wrong:
            raise SettingError(
                f"{path} exists already, and a tape is never overwritten; give another --tape"
            ) from wrong
        except OSError as wrong:
            raise SettingError(f"the tape {path} cannot be written: {wrong.strerror or wrong}") from wrong
        self.write("tape", version=VERSION, **head)

    def write(self, what: str, **row: Any) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"what": what, **row}, separators=(",", ":")) + "\n")
        except OSError as wrong:
            log.warning("tape_ends", file=self._file.name, error=str(wrong))
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # the failed write was logged already
                file.close()


@dataclass(frozen=True)
class JournalFile:
    """The content of one file of a tape."""

    path: Path
    head: Row
    rows: tuple[Row, ...]

    def __getitem__(self, name: str) -> Any:
        """A field of the first line; SettingError if it is missing."""
        if name not in self.head:
            raise SettingError(f"{self.path} is not a tape of this version: its first line has no {name!r}")
        return self.head[name]


@dataclass(frozen=True)
class RunJournal:
    """A whole tape: the file of one syncer, and one file for each incarnation of a learner."""

    syncer: JournalFile
    learners: dict[tuple[str, int], JournalFile]
    """By (name, incarnation)."""


def read_journal(place: Path) -> RunJournal:
    """The tape in folder `place`, or in its subfolder FOLDER, of its newest syncer; of that syncer if
    `place` is a syncer's file. SettingError, naming file and line, if it is not a tape.
    """
    folder = place.parent if place.is_file() else place / FOLDER if (place / FOLDER).is_dir() else place
    if not folder.is_dir():
        raise SettingError(f"{place} is not a folder with a tape; a run writes one into its folder with --tape")
    files = [file for path in sorted(folder.glob("*.jsonl")) if path.is_file() and (file := _read(path)) is not None]
    try:
        syncers = sorted((f for f in files if f["of"] == "syncer"), key=lambda f: int(f["epoch"]))
        chosen = [f for f in syncers if f.path == place] if place.is_file() else syncers
        if not chosen:
            raise SettingError(f"{place} holds no syncer's tape (syncer-*.jsonl)")
        syncer = chosen[-1]
        own = [f for f in files if f["of"] == "learner" and (f["epoch"], f["run"]) == (syncer["epoch"], syncer["run"])]
        return RunJournal(syncer, {(str(f["learner"]), int(f["incarnation"])): f for f in own})
    except BROKEN as wrong:
        raise SettingError(f"{folder} holds no tape of version {VERSION}: {wrong}") from wrong


def _read(path: Path) -> JournalFile | None:
    """The content of one file; None if its writer was killed before it wrote a complete line."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as wrong:
        raise SettingError(f"the tape {path} cannot be read: {wrong}") from wrong
    rows = list(_rows(path, text))
    if not rows and not text.strip():
        return None
    if not rows or rows[0]["what"] != "tape" or rows[0].get("version") != VERSION:
        theirs = rows[0].get("version") if rows else None
        raise SettingError(
            f"{path} is a tape of version {theirs}, but this program reads version {VERSION}"
            if theirs is not None
            else f"{path} is not a tape"
        )
    return JournalFile(path, rows[0], tuple(rows[1:]))


def _rows(path: Path, text: str) -> Iterator[Row]:
    whole = text.split("\n")[:-1]  # a killed writer may leave an incomplete last line
    for number, line in enumerate(whole, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("what"), str):
            raise SettingError(f"{path}, line {number}: not an event of a tape; the file is damaged or not a tape")
        yield row
