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
from .startup import StopFlag, task_of
from .text import Corpus, baselines, check_exists, generator, load_corpus, windows
from .transformer import Transformer, loss_of

SMALL_TOKENS = 2**13
FULL_TOKENS = 2**15
BATCH_TOKENS = 2**12
"""Tokens of one forward pass: enough to keep a core busy, little enough to stay in its cache."""


@dataclass(frozen=True)
class Windows:
    """Fixed set of windows: a function of the run's seed, the text, and their number."""

    part: str
    """A or B."""
    size: str
    """small or full."""
    inputs: Tensor
    """int64 [windows, sequence_length]"""
    targets: Tensor
    """int64 [windows, sequence_length]"""


def validation_windows(corpus: Corpus, part: str, size: str, *, sequence_length: int, seed: int) -> Windows:
    """Windows of held-out part `part`; the same for every evaluation of this size in the run."""
    text = corpus.part(part)
    count = max(1, (SMALL_TOKENS if size == "small" else FULL_TOKENS) // sequence_length)
    starts = generator("validation", seed, part).integers(0, len(text) - sequence_length, size=count)
    return Windows(part, size, *windows(text, starts, sequence_length))


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Windows) -> float:
    """Mean nats per byte over all of `held_out`; the model is not changed."""
    device = next(model.parameters()).device
    rows = max(1, BATCH_TOKENS // held_out.inputs.shape[1])
    total = 0.0
    for first in range(0, len(held_out.inputs), rows):
        inputs, targets = (part[first : first + rows].to(device) for part in (held_out.inputs, held_out.targets))
        total += float(loss_of(model, inputs, targets)) * len(inputs)
    return total / len(held_out.inputs)


log = get_logger("evaluator")

POLL_SECONDS = 0.2
"""Interval of the checks whether the run is over."""
TUNING_PART, REPORTED_PART = "A", "B"
"""Held-out parts. Evaluations during a run use B; A is evaluated at the end, for choosing settings."""


def main(
    config: LearnerConfig, data: Path | None, eval_every_seconds: float, on_finished: Callable[[], None] = lambda: None
) -> int:
    """Evaluate the run at `config.broker` until it is over or a stop signal arrives; returns the exit code.
    `on_finished` is called after the last evaluation of a finished run.

    Raises a DilocoError with its own code if there is no run, it trains another text, or the text cannot be read.
    """
    if not eval_every_seconds > 0:
        raise SettingError(f"--eval-every must be greater than 0 seconds, not {eval_every_seconds}")
    check_exists(data)
    StopFlag()
    torch.set_num_threads(1)
    try:
        beat = discover(config.broker, config.run, config.join_timeout_seconds, config.key)
        task, seed = task_of(beat), RunSettings.from_map(beat.settings).seed
        corpus = load_corpus(data, task.sequence_length)
        if beat.data_hash not in ("", corpus.sha256):
            raise SettingError(f"run {beat.run} trains another text than {corpus.source}; give the same --data")
        log_file = EvaluationLog(config.directory or Path())
        log_file.write_text_facts(corpus)
        model = Transformer(task, seed)
        evaluator = Evaluator(model, corpus, task, seed)
        with Observer(
            config.broker, model, run=beat.run, name=config.name, key=config.key,
            join_timeout_seconds=config.join_timeout_seconds,
        ) as observer:  # fmt: skip
            follow(observer, evaluator, log_file, eval_every_seconds)
        on_finished()
    except OSError as error:
        raise SettingError(f"cannot write evaluations: {error}; check --dir and the disk") from error
    except KeyboardInterrupt:
        log.info("evaluator_left", cpu_seconds=round(time.process_time(), 2))
        return 0
    log.info("evaluator_finished", cpu_seconds=round(time.process_time(), 2))
    return 0


def follow(observer: Observer, evaluator: Evaluator, log_file: EvaluationLog, every_seconds: float) -> None:
    """Evaluate version 0 in full, then the newest model periodically, and the final model in full."""
    if not log_file.has_version_zero:
        if not any(observer.versions):
            observer.load()
        # else merging began before the first load: the model still has its initial values, which are version 0
        log_file.add(evaluator.evaluate(REPORTED_PART, "full", 0))
    while not observer.finished:
        if _finished_within(observer, every_seconds):
            break
        t = observer.progress.step
        observer.load()
        log_file.add(evaluator.evaluate(REPORTED_PART, "small", t))
    observer.load()
    for part in (TUNING_PART, REPORTED_PART):
        log_file.add(evaluator.evaluate(part, "full", observer.progress.step))


def _finished_within(observer: Observer, seconds: float) -> bool:
    due = time.monotonic() + seconds
    while not observer.finished and time.monotonic() < due:
        observer.check()
        time.sleep(POLL_SECONDS)
    return observer.finished


class Evaluator:
    """Model and the windows it is evaluated on."""

    def __init__(self, model: Transformer, corpus: Corpus, task: TaskSettings, seed: int) -> None:
        self.model = model
        self._windows = {
            (part, size): validation_windows(corpus, part, size, sequence_length=task.sequence_length, seed=seed)
            for part in (TUNING_PART, REPORTED_PART)
            for size in ("small", "full")
        }

    def evaluate(self, part: str, size: str, t: int) -> dict[str, Any]:
        """Loss of the current model, at global step `t`, on held-out part `part`: a line of the log."""
        before = time.process_time()
        loss = evaluate(self.model, self._windows[part, size])
        return {
            "t": t, "part": part, "size": size, "val_loss": round(loss, 6),
            "cpu_seconds": round(time.process_time() - before, 3),
        }  # fmt: skip


class EvaluationLog:
    """Files that the evaluator writes into the run's folder; continues those of an earlier evaluator of the run."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._path = folder / "evaluations.jsonl"
        earlier = self._earlier()
        self.has_version_zero = any(row.get("t") == 0 and row.get("size") == "full" for row in earlier)
        self._clock = clock
        self._start = clock() - max((row.get("seconds", 0.0) for row in earlier), default=0.0)

    def _earlier(self) -> list[dict[str, Any]]:
        """Existing lines; cuts off a partial line left by a killed evaluator."""
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
            "baselines": {part: baselines(corpus, part) for part in (TUNING_PART, REPORTED_PART)},
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
        part = row.pop("part")  # the log uses this word for the part of the process that writes
        log.info("evaluated", held_out=part, **row)
