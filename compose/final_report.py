"""Results of a run: exported model, sample text, loss plot, metrics table and JSON figures."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.table import Table

from ..common.errors import SettingError
from ..common.run_folder import RunFolder
from ..monitor.console import PlainConsole
from ..monitor.run_figures import run_figures
from ..monitor.status import find_source
from ..monitor.watch import duration, size

_RESULT_FILES = ("model.safetensors", "loss.png", "metrics.csv", "summary.json", "logs", "global", "tape")
_SAMPLE_BYTES = 200
_SAMPLE_PROMPT = "def "
_SHOWN_FIGURES = (
    "steps",
    "cycles",
    "merges",
    "faults",
    "uptime",
    "merge_participation",
    "goodput",
    "useful_share",
    "stall_share",
)


def figures(folder: RunFolder) -> dict[str, Any]:
    """The figures of `diloco up --json`, from the files of the run's folder."""
    run_map = folder.run_map()
    summary = {"run": folder.setup().settings.run} | folder.summary()
    asked = run_map.get("learners_asked") or [row["name"] for row in summary.get("learners", [])]
    return run_figures(summary, requested=asked, faults=run_map.get("faults", 0), evaluations=folder.evaluations())


def show_summary(shown: Mapping[str, Any], console: PlainConsole) -> None:
    """Print the figures as a table, without those that are unknown."""
    rows = Table(title=f"run {shown['run']}", title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    first, last = shown["val_loss_first"], shown["val_loss_last"]
    if last is not None:
        rows.add_row(
            "validation loss", f"{last:.3f} nats per byte" + ("" if first is None else f" (began at {first:.3f})")
        )
    for name in _SHOWN_FIGURES:
        if shown[name] is not None:
            rows.add_row(name.replace("_", " "), str(shown[name]))
    if shown["tokens_reported"] is not None:
        rows.add_row("tokens reported", f"{shown['tokens_reported']:,}")
        counts = ", ".join(f"{shown[f'tokens_{what}']:,} {what}" for what in ("merged", "pending", "lost"))
        rows.add_row("", f"= {counts}")
    if shown["bytes_up"] or shown["bytes_down"]:
        rows.add_row("bytes", f"{size(shown['bytes_up'])} up, {size(shown['bytes_down'])} down")
    if shown["bytes_f32_allreduce"]:
        rows.add_row("f32 all-reduce", f"{size(shown['bytes_f32_allreduce'])}, if one were made at each step")
    if shown["seconds"] is not None:
        rows.add_row("time", duration(shown["seconds"]))
    console.print(rows)


def show_unconfirmed(folder: RunFolder, console: PlainConsole) -> None:
    """Print which learners did not confirm the final model, and why."""
    from ..syncer.final_confirmations import describe_missing

    missing = folder.summary().get("unconfirmed")
    if isinstance(missing, dict) and missing:
        console.print(f"final model not confirmed by: {describe_missing(missing)}", soft_wrap=True)


def show_results(folder: RunFolder, console: PlainConsole) -> None:
    """Write the plots of a finished run and print its figures and a sample of the model."""
    _write_plots(folder)
    show_summary(figures(folder), console)
    show_unconfirmed(folder, console)
    console.rule(f"{_SAMPLE_BYTES} bytes written by the model", align="left", style="dim")
    for line in sample_text(folder, _SAMPLE_PROMPT, _SAMPLE_BYTES).split("\n"):
        console.print(line)
    console.rule(style="dim")
    files = ", ".join(name for name in _RESULT_FILES if (folder.path / name).exists())
    console.print(f"in {folder.name}: {files}", soft_wrap=True)


def _write_plots(folder: RunFolder) -> list[Path]:
    """Write metrics.csv and loss.png from the folder's logs and evaluations."""
    from ..monitor.report import write_report

    return list(write_report(folder.path))


def judge_final(folder: RunFolder, data: Path | None) -> None:
    """Make the last evaluation of a finished run, if its evaluator did not. `data` as in `diloco up`."""
    setup, t = folder.setup(), folder.summary()["t"]
    is_evaluated = any(row.get("size") == "full" and row.get("t", 0) >= t for row in folder.evaluations())
    if is_evaluated or setup.task is None:
        return
    from safetensors.torch import load_file

    from ..learner.task.evaluator import REPORTED_PART, TUNING_PART, EvaluationLog, Evaluator
    from ..learner.task.text import load_corpus
    from ..learner.task.transformer import Transformer

    model = Transformer(setup.task, setup.settings.seed)
    model.load_state_dict(load_file(folder.model))
    corpus = load_corpus(data, setup.task.sequence_length)
    judge, record = Evaluator(model, corpus, setup.task, setup.settings.seed), EvaluationLog(folder.path)
    for part in (TUNING_PART, REPORTED_PART):
        record.add(judge.evaluate(part, "full", t))


def export_model(folder: RunFolder, to: Path | None = None) -> Path:
    """Write the global model, or the newest checkpoint, as a safetensors file. SettingError if there is none."""
    from ..syncer.checkpoint import Checkpoints
    from ..syncer.model_file import save_model

    target = to or folder.model
    if folder.model.exists() and folder.summary():
        if target != folder.model:
            try:
                shutil.copyfile(folder.model, target)
            except OSError as error:
                raise SettingError(f"cannot write {target}: {error.strerror}") from error
        return target
    restored = Checkpoints(folder.path / "global").restore(folder.setup().settings)
    if restored is None:
        raise SettingError(f"{folder.name} has no model yet; wait until its first learner has joined")
    save_model(restored.state, target)
    return target


def sample_text(folder: RunFolder, prompt: str, length: int, seed: int = 0) -> str:
    """`prompt` and the next `length` bytes, generated by the run's global model."""
    if length < 0:
        raise SettingError(f"--bytes must be 0 or more, not {length}")
    import torch
    from safetensors.torch import load_file

    from ..learner.task.transformer import Transformer, sample

    task = folder.setup().task
    if task is None:
        raise SettingError(
            f"{folder.name} trains a model that its learners define; `diloco export` writes it to a file"
        )
    torch.set_num_threads(1)  # steps of one byte are too small to be worth several threads
    model = Transformer(task, folder.setup().settings.seed)
    model.load_state_dict(load_file(_current_model(folder)))
    start = prompt.encode("utf-8", "surrogateescape")
    return (start + sample(model, start, length, seed=seed)).decode("utf-8", "replace")


def _current_model(folder: RunFolder) -> Path:
    if folder.model.exists() and folder.summary():
        return folder.model
    return export_model(folder, folder.path / "model-now.safetensors")


def show_report(folder: RunFolder) -> int:
    """`diloco report`: write the files and print the figures; of an active run, the current ones."""
    console = PlainConsole()
    shown = figures(folder)
    if folder.is_up():
        with suppress(SettingError):  # its Redis requires a password
            shown = find_source(str(folder.path), None).read().figures()
    for path in _write_plots(folder):
        console.print(RunFolder(path).name, soft_wrap=True)
    if folder.setup().task is not None and not folder.evaluations():
        console.print("no loss.png: this run has no evaluations; start `diloco evaluator` while it runs")
    show_summary(shown, console)
    show_unconfirmed(folder, console)
    return 0
