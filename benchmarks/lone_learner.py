"""One learner without a session: the baseline for slowdown and quality.

A plain torch loop with the built-in model, text, batches and schedule, and nothing of the pipeline. Compare a learner's
step time in `diloco up --json` with `step_seconds`, and `val_loss_last` with `val_loss`, at the same settings.

    .venv/bin/python -P benchmarks/lone_learner.py --steps 600 --seed 0
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, fields
from pathlib import Path

import torch
from decoupled_diloco.common.config import RunSettings, TaskSettings, flag
from decoupled_diloco.learner.task.evaluator import evaluate, validation_windows
from decoupled_diloco.learner.task.loop import inner_step, make_optimizer, schedule
from decoupled_diloco.learner.task.text import Corpus, batches, load_corpus
from decoupled_diloco.learner.task.transformer import Transformer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=RunSettings().steps, help="inner steps (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the model and of the batches (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default %(default)s)")
    parser.add_argument("--data", type=Path, help="file or folder; without it the standard library")
    for field in fields(TaskSettings):
        default = getattr(TaskSettings(), field.name)
        parser.add_argument(flag(field.name), type=type(default), default=default, help="(default %(default)s)")
    return parser.parse_args()


def train(model: Transformer, corpus: Corpus, task: TaskSettings, *, steps: int, seed: int) -> list[float]:
    """Take `steps` inner steps; returns the seconds of each."""
    optimizer = make_optimizer(model)
    stream = batches(corpus.train, task.batch_sequences, task.sequence_length, seed=seed, name="lone", incarnation=1)
    seconds = []
    for step in range(steps):
        start = time.perf_counter()
        inputs, targets = next(stream)
        inner_step(model, optimizer, inputs, targets, task.inner_lr * schedule(step / steps, step))
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    given = parse()
    torch.set_num_threads(given.threads)
    task = TaskSettings(**{field.name: getattr(given, field.name) for field in fields(TaskSettings)})
    corpus = load_corpus(given.data, task.sequence_length)
    model = Transformer(task, given.seed)
    cpu = time.process_time()
    seconds = train(model, corpus, task, steps=given.steps, seed=given.seed)
    cpu = time.process_time() - cpu
    judged = {
        part: validation_windows(corpus, part, "full", sequence_length=task.sequence_length, seed=given.seed)
        for part in ("A", "B")
    }
    told = {
        "task": asdict(task),
        "seed": given.seed,
        "threads": given.threads,
        "steps": given.steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tensors": len(list(model.parameters())),
        "tokens": given.steps * task.tokens_per_step,
        "seconds": round(sum(seconds), 2),
        "cpu_seconds": round(cpu, 2),
        "step_seconds": round(statistics.median(seconds), 5),
        "val_loss": round(evaluate(model, judged["B"]), 4),
        "val_loss_choosing": round(evaluate(model, judged["A"]), 4),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
