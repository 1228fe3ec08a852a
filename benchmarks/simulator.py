"""Cost of the simulator: seconds for the whole Table 1, memory by number of chips, and a training run's time profile.

    python benchmarks/simulator.py

Uses one core. The share of forward and backward passes is measured in a virtual run of the built-in model, at its
default size and at the size of the suites of `diloco compare`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from decoupled_diloco.common.config import RunSettings, TaskSettings
from decoupled_diloco.common.log import configure
from decoupled_diloco.experiments.suites import SMALL
from decoupled_diloco.learner.task import loop
from decoupled_diloco.learner.task.text import load_corpus
from decoupled_diloco.simulator.availability import VirtualMember, steady
from decoupled_diloco.simulator.real_training import TrainedModel
from decoupled_diloco.simulator.virtual_cluster import VirtualCluster

DILOCO = [sys.executable, "-P", "-m", "decoupled_diloco.cli"]


def table_seconds() -> float:
    """Wall seconds of `diloco simulate goodput --table` on one core, starting Python included."""
    began = time.perf_counter()
    subprocess.run(
        [*DILOCO, "simulate", "goodput", "--table", "--json"],
        check=True,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    )
    return time.perf_counter() - began


def peak_mib(chips: int) -> float:
    """Peak resident memory of a cost-only simulation of that many chips."""
    command = [*DILOCO, "simulate", "goodput", "--chips", str(chips), "--json"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, _, usage = os.wait4(child.pid, 0)
    return float(usage.ru_maxrss) / 1024


class Passes:
    """Real seconds inside forward and backward passes."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        forward, backward = loop.loss_of, torch.autograd.backward

        def timed(call: Any) -> Any:
            def run(*given: Any, **named: Any) -> Any:
                began = time.perf_counter()
                try:
                    return call(*given, **named)
                finally:
                    self.seconds += time.perf_counter() - began

            return run

        loop.loss_of, torch.autograd.backward = timed(forward), timed(backward)
        try:
            yield
        finally:
            loop.loss_of, torch.autograd.backward = forward, backward


def passes_share(task: TaskSettings, learners: int, steps: int) -> float:
    """Share of a virtual run's real time inside the models' forward and backward passes."""
    corpus, settings = load_corpus(None, task.sequence_length), RunSettings(steps=steps)
    members = [VirtualMember(f"learner-{n}", [(steady(1.0), math.inf)]) for n in range(1, learners + 1)]
    passes = Passes()
    with passes.counted():
        outcome = VirtualCluster(settings, TrainedModel(settings, task, corpus), members).run()
    return passes.seconds / outcome.real_seconds


def main() -> None:
    configure("benchmark", level="warning")
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])  # loads further torch modules, which takes a second
    told = {
        "table_1_seconds": round(table_seconds(), 1),
        "peak_MiB": {chips: round(peak_mib(chips), 1) for chips in (150_000, 2_400_000, 1_000_000_000)},
        "forward_and_backward_default": round(passes_share(TaskSettings(), 2, 48), 3),
        "forward_and_backward_suites": round(passes_share(SMALL, 4, 240), 3),
        "own_peak_MiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
