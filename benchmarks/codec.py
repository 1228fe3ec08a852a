"""Speed of the codec and of the merge on this machine, relative to a plain copy of the same vector.

    python benchmarks/codec.py [--mib 16] [--threads 1] [--device cpu] [--learners 4]

Prints GB/s of f32 values (4 bytes per element, whatever the payload's size), the best of several rounds, and the ratio
to torch's own copy into allocated memory. On one CPU thread, seconds are the thread's CPU time, so that the figures are
meaningful on a busy machine; otherwise wall time. Takes a few seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from decoupled_diloco.common.codec import apply_step, decode_delta, digest, encode_delta, encode_step, encoded_bytes
from decoupled_diloco.common.config import CODECS
from decoupled_diloco.common.fragments import ALIGN, Layout, TensorSpec, balanced_plan
from decoupled_diloco.syncer.aggregate import merge
from decoupled_diloco.syncer.outer_optimizer import outer_step
from rich.console import Console
from rich.table import Table

ROUNDS = 5
SECONDS_EACH = 0.3


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of up to ROUNDS runs after a warm-up; stops early after SECONDS_EACH."""
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    work()
    best, deadline = float("inf"), time.perf_counter() + SECONDS_EACH
    for _ in range(ROUNDS):
        settle(device)
        start = clock()
        work()
        settle(device)
        best = min(best, clock() - start)
        if time.perf_counter() > deadline:
            break
    return best


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def work_on(length: int, learners: int, device: torch.device) -> dict[str, tuple[Callable[[], object], int]]:
    """Measured work: name -> (function, number of f32 values that it reads)."""
    generator = torch.Generator().manual_seed(0)
    public = torch.randn(length, generator=generator).to(device)
    target = public + torch.randn(length, generator=generator).to(device) * 1e-3
    room = torch.empty_like(public)
    work: dict[str, tuple[Callable[[], object], int]] = {
        "copy (memory there)": (lambda: room.copy_(public), length),
        "copy (new memory)": (public.clone, length),
    }
    for codec in CODECS:
        payload = encode_delta(codec, public, target)
        step, _ = encode_step(codec, public, target)
        for name, call in (
            ("encode_delta", lambda c=codec: encode_delta(c, public, target)),
            ("decode_delta", lambda c=codec, p=payload: decode_delta(c, public, p)),
            ("encode_step", lambda c=codec: encode_step(c, public, target)),
            ("apply_step", lambda c=codec, p=step: apply_step(c, public, p)),
        ):
            work[f"{codec} {name}"] = (call, length)
    work["digest (sha256)"] = (lambda: digest(public), length)
    fragment = balanced_plan(Layout((TensorSpec(name="w", shape=(length,), dtype="float32"),)), 1).fragments[0]
    deltas, weights = [torch.roll(target - public, i) for i in range(learners)], [1.0 + i for i in range(learners)]
    work[f"merge of {learners}"] = (lambda: merge(fragment, deltas, weights), length * learners)
    momentum = torch.zeros_like(public)
    work["outer step, momentum"] = (lambda: outer_step(public, deltas[0], momentum, 0.7, 0.9), length)
    return work


def main() -> None:
    parser = argparse.ArgumentParser(description="GB/s of codec and merge against a plain copy")
    parser.add_argument("--mib", type=int, default=16, help="size of the vector in MiB of f32 (default 16)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--learners", type=int, default=4, help="deltas that are merged (default 4)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device, length = torch.device(options.device), options.mib * 2**18 // ALIGN * ALIGN
    table = Table(title=f"{options.mib} MiB of f32, {options.threads} thread(s), {device}, torch {torch.__version__}")
    for column in ("work", "GB/s of f32", "of a copy", "ms"):
        table.add_column(column, justify="left" if column == "work" else "right")
    copy = 0.0
    for name, (call, values) in work_on(length, options.learners, device).items():
        seconds = best_seconds(call, device)
        speed = values * 4 / seconds / 1e9
        copy = copy or speed
        table.add_row(name, f"{speed:.2f}", f"{speed / copy:.2f}", f"{seconds * 1e3:.1f}")
    console = Console()
    console.print(table)
    sizes = ", ".join(f"{codec} {encoded_bytes(codec, length) / length:.3f}" for codec in CODECS)
    console.print(f"bytes on the wire an element: {sizes}")


if __name__ == "__main__":
    main()
