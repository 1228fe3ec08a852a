"""Evaluator process: follows the public model as an observer and evaluates it on held-out text.

It uses one thread, at the learners' leftover CPU time. It writes two files into the run's folder: text.json (facts
about the text, and the losses of models that need no training) and evaluations.jsonl (one line per evaluation).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.config import LearnerConfig, RunSettings, TaskSettings
from ...common.errors import SettingError
from ...common.log import get_logger
from ..discover import discover
from ..observer import Observer
from .startup import StopRequest, task_of
from .text import Corpus, baselines, check_there, generator, load_corpus, windows
from .transformer import Transformer, loss_of

SMALL_TOKENS = 2**13
FULL_TOKENS = 2**15
AT_ONCE_TOKENS = 2**12
"""Tokens of one forward pass: enough to keep a core busy, little enough to stay in its cache."""


@dataclass(frozen=True)
class Windows:
    """A fixed set of windows: a function of the run's seed, the text, and their number."""

    part: str
    """A or B."""
    size: str
    """small or full."""
    inputs: Tensor
    """int64 [windows, sequence_length]"""
    targets: Tensor
    """int64 [windows, sequence_length]"""


def validation_windows(corpus: Corpus, part: str, size: str, *, sequence_length: int, seed: int) -> Windows:
    """The windows of held-out part `part` that every evaluation of this size in this run uses."""
    text = corpus.part(part)
    count = max(1, (SMALL_TOKENS if size == "small" else FULL_TOKENS) // sequence_length)
    starts = generator("validation", seed, part).integers(0, len(text) - sequence_length, size=count)
    return Windows(part, size, *windows(text, starts, sequence_length))


@torch.no_grad()
def evaluate(model: nn.Module, judged: Windows) -> float:
    """Mean nats per byte over all of `judged`; the model is left as it was."""
    device = next(model.parameters()).device
    rows = max(1, AT_ONCE_TOKENS // judged.inputs.shape[1])
    total = 0.0
    for first in range(0, len(judged.inputs), rows):
        inputs, targets = (part[first : first + rows].to(device) for part in (judged.inputs, judged.targets))
        total += float(loss_of(model, inputs, targets)) * len(inputs)
    return total / len(judged.inputs)


log = get_logger("evaluator")

LOOK_SECONDS = 0.2
"""How often is looked whether the run is over."""
CHOOSING, REPORTED = "A", "B"
"""Held-out parts. All that is shown in a run is judged on B; A is judged at the end, to choose settings by."""


def main(
    config: LearnerConfig, data: Path | None, eval_every_seconds: float, then: Callable[[], None] = lambda: None
) -> int:
    """Judge the run at `config.broker` until it is over or a signal asks to leave; the exit code. `then` comes after
    the last evaluation of a run that is over.

    Raises a DilocoError with its own code: no run there, one that trains another text, or no text at all.
    """
    if not eval_every_seconds > 0:
        raise SettingError(f"--eval-every must be greater than 0 seconds, not {eval_every_seconds}")
    check_there(data)
    StopRequest()
    torch.set_num_threads(1)
    try:
        beat = discover(config.broker, config.run, config.join_timeout_seconds, config.key)
        task, seed = task_of(beat), RunSettings.from_map(beat.settings).seed
        corpus = load_corpus(data, task.sequence_length)
        if beat.data_hash not in ("", corpus.sha256):
            raise SettingError(f"run {beat.run} trains another text than {corpus.source}; give the same --data")
        record = Record(config.directory or Path())
        record.write_text_facts(corpus)
        shown = Transformer(task, seed)
        judge = Judge(shown, corpus, task, seed)
        with Observer(
            config.broker, shown, run=beat.run, name=config.name, key=config.key,
            join_timeout_seconds=config.join_timeout_seconds,
        ) as seen:  # fmt: skip
            follow(seen, judge, record, eval_every_seconds)
        then()
    except OSError as wrong:
        raise SettingError(f"cannot write evaluations: {wrong}; check --dir and the disk") from wrong
    except KeyboardInterrupt:
        log.info("evaluator_left", cpu_seconds=round(time.process_time(), 2))
        return 0
    log.info("evaluator_finished", cpu_seconds=round(time.process_time(), 2))
    return 0


def follow(seen: Observer, judge: Judge, record: Record, every_seconds: float) -> None:
    """Judge version 0 in full, then what is newest from time to time, and in full what the run ends with."""
    if not record.has_version_zero:
        if not any(seen.versions):
            seen.load()
        # else merging began before we saw the model: it still holds what the seed makes, which is version 0
        record.add(judge.judge(REPORTED, "full", 0))
    while not seen.finished:
        if _finished_within(seen, every_seconds):
            break
        t = seen.progress.step
        seen.load()
        record.add(judge.judge(REPORTED, "small", t))
    seen.load()
    for part in (CHOOSING, REPORTED):
        record.add(judge.judge(part, "full", seen.progress.step))


def _finished_within(seen: Observer, seconds: float) -> bool:
    due = time.monotonic() + seconds
    while not seen.finished and time.monotonic() < due:
        seen.check()
        time.sleep(LOOK_SECONDS)
    return seen.finished


class Judge:
    """A model and the windows it is judged on."""

    def __init__(self, model: Transformer, corpus: Corpus, task: TaskSettings, seed: int) -> None:
        self.model = model
        self._windows = {
            (part, size): validation_windows(corpus, part, size, sequence_length=task.sequence_length, seed=seed)
            for part in (CHOOSING, REPORTED)
            for size in ("small", "full")
        }

    def judge(self, part: str, size: str, t: int) -> dict[str, Any]:
        """What the model, as it is now at global step `t`, loses on held-out part `part`: a line of the record."""
        before = time.process_time()
        loss = evaluate(self.model, self._windows[part, size])
        return {
            "t": t, "part": part, "size": size, "val_loss": round(loss, 6),
            "cpu_seconds": round(time.process_time() - before, 3),
        }  # fmt: skip


class Record:
    """What the evaluator writes into the run's folder; goes on where an earlier evaluator of the run stopped."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._path = folder / "evaluations.jsonl"
        earlier = self._earlier()
        self.has_version_zero = any(row.get("t") == 0 and row.get("size") == "full" for row in earlier)
        self._clock = clock
        self._start = clock() - max((row.get("seconds", 0.0) for row in earlier), default=0.0)

    def _earlier(self) -> list[dict[str, Any]]:
        """The lines that are there; half a line that a killed evaluator left is cut off."""
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            os.truncate(self._path, len(whole))
        return [row for line in whole.splitlines() if isinstance(row := json.loads(line), dict)]

    def write_text_facts(self, corpus: Corpus) -> None:
        facts = {
            "source": corpus.source,
            "tokens": corpus.tokens,
            "sha256": corpus.sha256,
            "holds_out": corpus.holds_out,
            "baselines": {part: baselines(corpus, part) for part in (CHOOSING, REPORTED)},
        }
        aside = self._folder / "text.json.new"
        aside.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        aside.replace(self._folder / "text.json")
        log.info("text_ready", source=corpus.source, tokens=corpus.tokens, sha256=corpus.sha256[:16],
                 holds_out=corpus.holds_out)  # fmt: skip

    def add(self, row: dict[str, Any]) -> None:
        """Append one evaluation, with the seconds since the run's first evaluator began."""
        row = {"seconds": round(self._clock() - self._start, 3), **row}
        with self._path.open("ab", buffering=0) as file:
            file.write(json.dumps(row).encode() + b"\n")
        part = row.pop("part")  # to the log, this word means the part of the process that speaks
        log.info("evaluated", held_out=part, **row)
