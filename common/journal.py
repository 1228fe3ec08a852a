"""Event tapes: what happened in a run, in the order in which each process saw it, as JSON lines.

A tape is a folder. Each process writes its own file, so that nobody waits for anybody:

    syncer-EPOCH.jsonl          every input of the round machine with its time, and every decision
    NAME-INCARNATION.jsonl      every step boundary of one life of a learner: what it adopted, what it captured

The first line of a file says what it is of. A run and a simulation write the same; `diloco replay` takes both.
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
"""Of a run's folder: where `diloco up --tape` has it written."""
Row = dict[str, Any]
BROKEN = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError)
"""What comes of taking rows for events that are none."""

log = get_logger("tape")


class JournalWriter:
    """One process's file. Lines go to the system at once: what a killed process did stands there, too. A full disk ends
    the tape, and not the run.
    """

    def __init__(self, folder: Path, name: str, **head: Any) -> None:
        """SettingError if the file cannot be made, or is there already: a tape is never written over."""
        path = folder / f"{name}.jsonl"
        if folder.exists() and not folder.is_dir():
            raise SettingError(f"--tape {folder} is no folder; name one, or one that is not there yet")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: TextIO | None = path.open("x", buffering=1)
        except FileExistsError as wrong:
            raise SettingError(
                f"{path} is there already, and a tape is not written over; name another --tape"
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
            with suppress(OSError):  # what could not be written was told already
                file.close()


@dataclass(frozen=True)
class JournalFile:
    """One file of a tape, read."""

    path: Path
    head: Row
    rows: tuple[Row, ...]

    def __getitem__(self, name: str) -> Any:
        """A field of the head; SettingError if it is not there."""
        if name not in self.head:
            raise SettingError(f"{self.path} is no tape of this version: its first line has no {name!r}")
        return self.head[name]


@dataclass(frozen=True)
class RunJournal:
    """A whole tape: of its newest syncer, and of each life of a learner."""

    syncer: JournalFile
    lives: dict[tuple[str, int], JournalFile]


def read_journal(place: Path) -> RunJournal:
    """The tape in folder `place`, or in its subfolder FOLDER: of its newest syncer, or of the one whose file this is.
    SettingError, naming file and line, if it is none.
    """
    folder = place.parent if place.is_file() else place / FOLDER if (place / FOLDER).is_dir() else place
    if not folder.is_dir():
        raise SettingError(f"{place} is no folder with a tape; a run writes one into its folder with --tape")
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
    """One file; None for one whose writer was killed before its first whole line."""
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
            f"{path} is a tape of version {theirs}, and this program reads version {VERSION}"
            if theirs is not None
            else f"{path} is no tape"
        )
    return JournalFile(path, rows[0], tuple(rows[1:]))


def _rows(path: Path, text: str) -> Iterator[Row]:
    whole = text.split("\n")[:-1]  # a writer that was killed leaves half a line behind the last whole one
    for number, line in enumerate(whole, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("what"), str):
            raise SettingError(f"{path}, line {number}: no event of a tape; the file was damaged or is none")
        yield row
