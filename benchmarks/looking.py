"""Cost per inner step of the session's checks of model and optimizers.

    .venv/bin/python benchmarks/looking.py [--tensors 100] [--seconds 5]

Prints microseconds of the training thread per step, as medians of ten stretches: in a usual step, in a step that checks
the whole model (once a second), and both together at 10 ms per step. The hook is the cost that every optimizer step of
the process pays, including those of unrelated models.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from decoupled_diloco.common.fragments import Layout, balanced_plan
from decoupled_diloco.learner.model_layout import inventory
from decoupled_diloco.learner.replica import Replica
from decoupled_diloco.learner.step_checks import StepChecks
from torch import nn

STRETCHES = 10
STEPS_A_SECOND = 100


class Looked:
    """A model of that many tensors in layers of weight and bias, and the session's checks of it."""

    def __init__(self, tensors: int) -> None:
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(tensors // 2)))
        self.optimizer = torch.optim.AdamW(
            [{"params": [p for p in self.model.parameters() if p.ndim == n]} for n in (1, 2)]
        )
        entries = inventory(self.model, self.optimizer)
        plan = balanced_plan(Layout(tuple(entry.spec() for entry in entries)), 4)
        self.now = 0.0
        self.checks = StepChecks("me", Replica(self.model, plan), self.optimizer, self.now, in_mid_run=True)

    def usual(self) -> None:
        self.checks.optimizers.saw_step(self.optimizer)
        self.checks.called(10, self.now)
        self.checks.left()

    def whole(self) -> None:
        self.now += 1.0
        self.usual()

    def hook(self) -> None:
        self.checks.optimizers.saw_step(self.optimizer)


def microseconds(work: Callable[[], None], seconds: float) -> float:
    """Microseconds of one call: the median of several stretches."""
    found = []
    for _ in range(STRETCHES):
        until, calls, began = time.thread_time() + seconds / STRETCHES, 0, time.thread_time()
        while time.thread_time() < until:
            for _ in range(50):
                work()
            calls += 50
        found.append((time.thread_time() - began) / calls * 1e6)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=100, metavar="N")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each figure")
    given = parser.parse_args()
    looked = Looked(given.tensors)
    usual, whole, hook = (microseconds(w, given.seconds) for w in (looked.usual, looked.whole, looked.hook))
    print(f"{given.tensors} tensors, microseconds a step:")
    print(f"  usual step           {usual:6.1f}")
    print(f"  with the whole model {whole:6.1f}")
    print(f"  at 10 ms a step      {usual + (whole - usual) / STEPS_A_SECOND:6.1f}")
    print(f"  of these, the hook   {hook:6.1f}")


if __name__ == "__main__":
    main()
