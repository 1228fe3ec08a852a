"""Comparison runner: trains every cell of a suite with every seed and stores each result.

Results are appended to DIR/SUITE.jsonl, one per line, so an interrupted suite resumes where it stopped. Tables and
plots (analysis.py) are made from that file alone.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import json
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..common.errors import DilocoError, SettingError
from ..common.log import configure
from ..common.output import protect
from ..learner.task.text import load_corpus
from .analysis import differences, draw, markdown
from .methods import Cell, train
from .suites import Suite

COLUMNS = {"cell", "name", "seed", "val_a", "val_b", "tokens", "tokens_merged", "core_seconds", "text"}
_POLL_SECONDS = 0.1


class ResultsFile:
    """Results file of one suite."""

    def __init__(self, folder: Path, suite: Suite, text: str) -> None:
        """text: sha256 of the training text. SettingError if the folder cannot be used or holds other data."""
        self.path, self.suite, self._text = folder / f"{suite.name}.jsonl", suite, text
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.rows = self._read()
            """Results of this suite and text; results of other settings are ignored."""
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"{self.path} cannot be used: {_reason(error)}; name another --out") from error

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Lock the file for writing. SettingError if another process holds it, or it cannot be written."""
        try:
            file = self.path.open("ab")
        except OSError as error:
            raise SettingError(f"{self.path} cannot be used: {_reason(error)}; name another --out") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise SettingError(
                    f"{self.path} is being written by another comparison; wait for it, or name another --out"
                ) from error
            self.rows = self._read()
            whole = self.path.read_bytes().rfind(b"\n") + 1
            os.truncate(self.path, whole)
            yield

    def missing(self, seeds: int) -> Iterator[tuple[Cell, int]]:
        """Cells and seeds still to be trained, seed by seed."""
        done = {(row["cell"], row["seed"]) for row in self.rows}
        for seed in self._seeds(seeds):
            for cell in self.suite.cells:
                if (cell.identity, seed) not in done:
                    yield cell, seed

    def remaining(self, seeds: int) -> str:
        """Number of trainings that are missing, and their total."""
        return f"{sum(1 for _ in self.missing(seeds))} of {len(self.suite.cells) * seeds} left"

    def add(self, row: dict[str, Any]) -> None:
        """Append a result. DilocoError if it cannot be written; then it is not added to the rows."""
        row = {**row, "text": self._text}
        line = (json.dumps(row) + "\n").encode()
        try:
            with self.path.open("ab", buffering=0) as file:
                if file.write(line) != len(line):  # the next start would cut off a partial line
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise DilocoError(f"{self.path} cannot be written: {_reason(error)}") from error
        self.rows.append(row)

    def _seeds(self, count: int) -> range:
        return range(self.suite.first_seed, self.suite.first_seed + count)

    def _read(self) -> list[dict[str, Any]]:
        known, first = {cell.identity for cell in self.suite.cells}, self.suite.first_seed
        rows = self._parsed(self._whole_lines())
        found: dict[tuple[str, int], dict[str, Any]] = {}
        for row in rows:
            if row["cell"] in known and row["text"] == self._text and row["seed"] >= first:
                found.setdefault((row["cell"], row["seed"]), row)  # one each, in case files were concatenated
        return list(found.values())

    def _whole_lines(self) -> list[str]:
        """Complete lines of the file, without a partial last line that a killed process left."""
        if not self.path.exists():
            return []
        if not self.path.is_file():
            raise SettingError(f"{self.path} is no file; name another --out")
        content = self.path.read_bytes()
        rest = content[content.rfind(b"\n") + 1 :]
        if rest and not rest.startswith(b"{"):
            raise SettingError(f"{self.path} ends with what is no result of a comparison; name another --out")
        return content[: len(content) - len(rest)].decode().splitlines()

    def _parsed(self, lines: Sequence[str]) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise self._invalid_line(number) from error
            if not isinstance(row, dict) or not row.keys() >= COLUMNS or not _is_valid(row):
                raise self._invalid_line(number)
            yield row

    def _invalid_line(self, line: int) -> SettingError:
        return SettingError(f"{self.path}, line {line}: no result of a comparison; name another --out")


def _is_valid(row: dict[str, Any]) -> bool:
    """Whether its columns have valid values: text, whole numbers, and positive finite losses."""
    texts = all(isinstance(row[name], str) for name in ("cell", "name", "text"))
    whole = all(type(row[name]) is int and row[name] >= 0 for name in ("seed", "tokens", "tokens_merged"))
    real = all(
        type(row[name]) in (int, float) and math.isfinite(row[name]) for name in ("val_a", "val_b", "core_seconds")
    )
    return texts and whole and real and row["tokens"] > 0 and min(row["val_a"], row["val_b"]) > 0


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "it is no text"


def run(
    suite: Suite,
    folder: Path,
    *,
    data: Path | None,
    seeds: int,
    jobs: int,
    minutes: float,
    report: Callable[[str], None],
) -> tuple[ResultsFile, list[str]]:
    """Train the missing cells of the suite, `jobs` at a time, starting none after `minutes`. Running trainings finish,
    also after a first Ctrl-C. Returns the results, and the cells that could not be trained.
    """
    ends_at = time.monotonic() + 60 * minutes
    corpus = load_corpus(data, max(cell.task.sequence_length for cell in suite.cells))
    if not corpus.holds_out:
        raise SettingError(f"{corpus.source} is too small to hold anything out for judging; give --data more text")
    results, failed = ResultsFile(folder, suite, corpus.sha256), list[str]()
    running: dict[Future[dict[str, Any]], tuple[Cell, int]] = {}

    def collect(done: Future[dict[str, Any]]) -> None:
        cell, seed = running.pop(done)
        what = f"{cell.name}, seed {seed}"
        try:
            row = done.result()
        except BrokenProcessPool as error:
            raise DilocoError(f"a process that trained {cell.name} was killed; is there memory for it?") from error
        except DilocoError as error:  # other cells may still succeed
            report(f"{what}: {error}")
            failed.append(what)
            return
        results.add(row)
        report(f"{what}: {row[f'val_{suite.part.lower()}']:.4f} nats per byte ({results.remaining(seeds)})")

    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_init_worker)
    with results.exclusive(), pool, _first_interrupt() as interrupted:
        pending, is_reported = list(results.missing(seeds)), False
        try:
            while True:
                while pending and len(running) < jobs and time.monotonic() < ends_at and not interrupted.is_set():
                    cell, seed = pending.pop(0)
                    running[pool.submit(_train_one, cell, seed, data)] = (cell, seed)
                if interrupted.is_set() and not is_reported:
                    report("what is being trained is finished and kept; Ctrl-C once more drops it")
                    is_reported = True
                if not running:
                    break
                for done in wait(running, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED).done:
                    collect(done)
        except BaseException:
            _terminate(pool)  # a second Ctrl-C, or results that cannot be stored
            raise
        if interrupted.is_set():
            raise KeyboardInterrupt
    return results, failed


@contextmanager
def _first_interrupt() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second raises KeyboardInterrupt. An exception at the first one could hit
    the executor while it queues a cell, which it then would wait for without end.
    """
    event = threading.Event()

    def on_interrupt(_number: int, _frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def _terminate(pool: ProcessPoolExecutor) -> None:
    for process in pool._processes.values():  # noqa: SLF001 no public method terminates them
        process.terminate()


def _init_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    protect()
    configure("compare", level="warning")


def _end_with_parent() -> None:
    """Exit with the parent: otherwise a worker of a killed parent would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _train_one(cell: Cell, seed: int, data: Path | None) -> dict[str, Any]:
    began, cpu = time.perf_counter(), time.process_time()
    result = train(cell, seed, load_corpus(data, cell.task.sequence_length))
    return {
        **result.figures, "cell": cell.identity, "name": cell.name, "seed": seed,
        "val_a": result.val_a, "val_b": result.val_b, "tokens": result.tokens, "tokens_merged": result.tokens_merged,
        "seconds": round(time.perf_counter() - began, 3), "core_seconds": round(time.process_time() - cpu, 3),
    }  # fmt: skip


# --- output files ---------------------------------------------------------------------------------------------
def write(results: ResultsFile, folder: Path) -> list[Path]:
    """Write SUITE.csv, SUITE.md and SUITE.png; a suite without contrasts has no plot."""
    name = results.suite.name
    table, page, picture = (folder / f"{name}.{kind}" for kind in ("csv", "md", "png"))
    cells = {cell.identity: cell for cell in results.suite.cells}
    records = [{**_cell_columns(cells[row["cell"]]), **row} for row in results.rows]
    columns = list(dict.fromkeys(key for row in records for key in row))
    try:
        with table.open("w", newline="") as file:
            rows = csv.DictWriter(file, columns)
            rows.writeheader()
            rows.writerows(sorted(records, key=lambda r: (r["name"], r["seed"])))
        page.write_text(markdown(results.suite, results.rows))
        if not differences(results.suite, results.rows):
            picture.unlink(missing_ok=True)  # from earlier results
            return [table, page]
        draw(results.suite, results.rows, picture)
    except OSError as error:
        raise DilocoError(f"{folder} cannot be written: {_reason(error)}") from error
    return [table, page, picture]


def _cell_columns(cell: Cell) -> dict[str, Any]:
    settings = cell.run_settings(0)
    return {
        "name": cell.name, "method": cell.method, "M": cell.learners, "T": cell.steps, "H": settings.sync_every,
        "inner_lr": cell.task.inner_lr, "outer_lr": settings.outer_lr, "outer_momentum": settings.outer_momentum,
    }  # fmt: skip
