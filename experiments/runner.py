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
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
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


class Results:
    """The file of one suite's results."""

    def __init__(self, folder: Path, suite: Suite, text: str) -> None:
        """text: sha256 of what is trained on. SettingError if the folder cannot be used, or holds something else."""
        self.path, self.suite, self._text = folder / f"{suite.name}.jsonl", suite, text
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.rows = self._read()
            """Of this suite and text as they are now; what was trained with other settings does not count."""
        except (OSError, UnicodeDecodeError) as wrong:
            raise SettingError(f"{self.path} cannot be used: {_why(wrong)}; name another --out") from wrong

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While nobody else writes to the file. SettingError if somebody does, or it cannot be written."""
        try:
            file = self.path.open("ab")
        except OSError as wrong:
            raise SettingError(f"{self.path} cannot be used: {_why(wrong)}; name another --out") from wrong
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as wrong:
                raise SettingError(
                    f"{self.path} is being written by another comparison; wait for it, or name another --out"
                ) from wrong
            self.rows = self._read()
            whole = self.path.read_bytes().rfind(b"\n") + 1
            os.truncate(self.path, whole)
            yield

    def missing(self, seeds: int) -> Iterator[tuple[Cell, int]]:
        """What is to be trained still, seed by seed."""
        done = {(row["cell"], row["seed"]) for row in self.rows}
        for seed in self._seeds(seeds):
            for cell in self.suite.cells:
                if (cell.identity, seed) not in done:
                    yield cell, seed

    def left(self, seeds: int) -> str:
        """How many trainings are missing, and of how many."""
        return f"{sum(1 for _ in self.missing(seeds))} of {len(self.suite.cells) * seeds} left"

    def add(self, row: dict[str, Any]) -> None:
        """Keep a result. DilocoError if it cannot be written; then it is not among the rows, either."""
        row = {**row, "text": self._text}
        line = (json.dumps(row) + "\n").encode()
        try:
            with self.path.open("ab", buffering=0) as file:
                if file.write(line) != len(line):  # half of it would be taken away at the next start
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as wrong:
            raise DilocoError(f"{self.path} cannot be written: {_why(wrong)}") from wrong
        self.rows.append(row)

    def _seeds(self, count: int) -> range:
        return range(self.suite.first_seed, self.suite.first_seed + count)

    def _read(self) -> list[dict[str, Any]]:
        known, first = {cell.identity for cell in self.suite.cells}, self.suite.first_seed
        rows = self._parsed(self._whole_lines())
        found: dict[tuple[str, int], dict[str, Any]] = {}
        for row in rows:
            if row["cell"] in known and row["text"] == self._text and row["seed"] >= first:
                found.setdefault((row["cell"], row["seed"]), row)  # one each, if files were joined
        return list(found.values())

    def _whole_lines(self) -> list[str]:
        """What stands in the file, but for half a line, which one who was killed left at the end."""
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
            except (ValueError, RecursionError) as wrong:
                raise self._foreign(number) from wrong
            if not isinstance(row, dict) or not row.keys() >= COLUMNS or not _sound(row):
                raise self._foreign(number)
            yield row

    def _foreign(self, line: int) -> SettingError:
        return SettingError(f"{self.path}, line {line}: no result of a comparison; name another --out")


def _sound(row: dict[str, Any]) -> bool:
    """Its columns are what a comparison writes: text, whole numbers, and positive finite losses."""
    texts = all(isinstance(row[name], str) for name in ("cell", "name", "text"))
    whole = all(type(row[name]) is int and row[name] >= 0 for name in ("seed", "tokens", "tokens_merged"))
    real = all(
        type(row[name]) in (int, float) and math.isfinite(row[name]) for name in ("val_a", "val_b", "core_seconds")
    )
    return texts and whole and real and row["tokens"] > 0 and min(row["val_a"], row["val_b"]) > 0


def _why(wrong: OSError | UnicodeDecodeError) -> str:
    return wrong.strerror or str(wrong) if isinstance(wrong, OSError) else "it is no text"


def run(
    suite: Suite,
    folder: Path,
    *,
    data: Path | None,
    seeds: int,
    jobs: int,
    minutes: float,
    said: Callable[[str], None],
) -> tuple[Results, list[str]]:
    """Train what is missing of the suite, `jobs` at a time, for `minutes` at most; what is begun is finished, also
    after a first Ctrl-C. Gives the results, and which cells could not be trained.
    """
    ends_at = time.monotonic() + 60 * minutes
    corpus = load_corpus(data, max(cell.task.sequence_length for cell in suite.cells))
    if not corpus.holds_out:
        raise SettingError(f"{corpus.source} is too small to hold anything out for judging; give --data more text")
    results, failed = Results(folder, suite, corpus.sha256), list[str]()
    running: dict[Future[dict[str, Any]], tuple[Cell, int]] = {}

    def collect() -> None:
        done = next(as_completed(running))
        cell, seed = running.pop(done)
        what = f"{cell.name}, seed {seed}"
        try:
            row = done.result()
        except BrokenProcessPool as wrong:
            raise DilocoError(f"a process that trained {cell.name} was killed; is there memory for it?") from wrong
        except DilocoError as wrong:  # another cell may well be trained
            said(f"{what}: {wrong}")
            failed.append(what)
            return
        results.add(row)
        said(f"{what}: {row[f'val_{suite.part.lower()}']:.4f} nats per byte ({results.left(seeds)})")

    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_own_threads)
    with results.alone(), pool:
        waits = list(results.missing(seeds))
        try:
            while waits or running:
                while waits and len(running) < jobs and time.monotonic() < ends_at:
                    cell, seed = waits.pop(0)
                    running[pool.submit(_one, cell, seed, data)] = (cell, seed)
                if not running:
                    break
                collect()
        except KeyboardInterrupt:
            said("what is being trained is finished and kept; Ctrl-C once more drops it")
            try:
                while running:
                    collect()
            except KeyboardInterrupt:
                _drop(pool)
            raise
        except BaseException:
            _drop(pool)  # what cannot be kept need not be finished
            raise
    return results, failed


def _drop(pool: ProcessPoolExecutor) -> None:
    for process in pool._processes.values():  # noqa: SLF001 nothing public ends them
        process.terminate()


def _own_threads() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who broke off speaks to the parent
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    protect()
    configure("compare", level="warning")


def _end_with_parent() -> None:
    """A pool's process waits for work for ever, also from a parent that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _one(cell: Cell, seed: int, data: Path | None) -> dict[str, Any]:
    began, cpu = time.perf_counter(), time.process_time()
    result = train(cell, seed, load_corpus(data, cell.task.sequence_length))
    return {
        **result.figures, "cell": cell.identity, "name": cell.name, "seed": seed,
        "val_a": result.val_a, "val_b": result.val_b, "tokens": result.tokens, "tokens_merged": result.tokens_merged,
        "seconds": round(time.perf_counter() - began, 3), "core_seconds": round(time.process_time() - cpu, 3),
    }  # fmt: skip


# --- what is left behind ---------------------------------------------------------------------------------------------
def write(results: Results, folder: Path) -> list[Path]:
    """SUITE.csv, SUITE.md and SUITE.png; a suite without contrasts has no picture."""
    name = results.suite.name
    table, page, picture = (folder / f"{name}.{kind}" for kind in ("csv", "md", "png"))
    cells = {cell.identity: cell for cell in results.suite.cells}
    told = [{**_told_cell(cells[row["cell"]]), **row} for row in results.rows]
    columns = list(dict.fromkeys(key for row in told for key in row))
    try:
        with table.open("w", newline="") as file:
            rows = csv.DictWriter(file, columns)
            rows.writeheader()
            rows.writerows(sorted(told, key=lambda r: (r["name"], r["seed"])))
        page.write_text(markdown(results.suite, results.rows))
        if not differences(results.suite, results.rows):
            picture.unlink(missing_ok=True)  # of other results
            return [table, page]
        draw(results.suite, results.rows, picture)
    except OSError as wrong:
        raise DilocoError(f"{folder} cannot be written: {_why(wrong)}") from wrong
    return [table, page, picture]


def _told_cell(cell: Cell) -> dict[str, Any]:
    settings = cell.run_settings(0)
    return {
        "name": cell.name, "method": cell.method, "M": cell.learners, "T": cell.steps, "H": settings.sync_every,
        "inner_lr": cell.task.inner_lr, "outer_lr": settings.outer_lr, "outer_momentum": settings.outer_momentum,
    }  # fmt: skip
