"""What a run leaves behind: the model's own words, the picture, the table, one line of JSON."""

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

RESULTS = ("model.safetensors", "loss.png", "metrics.csv", "summary.json", "logs", "global", "tape")
SAMPLE_BYTES = 200
SAMPLE_PROMPT = "def "
SHOWN = (
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
    """The keys of `diloco up --json`, from what lies in the folder."""
    told = folder.run_map()
    summary = {"run": folder.setup().settings.run} | folder.summary()
    asked = told.get("learners_asked") or [row["name"] for row in summary.get("learners", [])]
    return run_figures(summary, asked=asked, faults=told.get("faults", 0), evaluations=folder.evaluations())


def show_summary(told: Mapping[str, Any], console: PlainConsole) -> None:
    """The figures as a table; what is not known is left out."""
    rows = Table(title=f"run {told['run']}", title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    first, last = told["val_loss_first"], told["val_loss_last"]
    if last is not None:
        rows.add_row(
            "validation loss", f"{last:.3f} nats per byte" + ("" if first is None else f" (began at {first:.3f})")
        )
    for name in SHOWN:
        if told[name] is not None:
            rows.add_row(name.replace("_", " "), str(told[name]))
    if told["tokens_reported"] is not None:
        rows.add_row("tokens reported", f"{told['tokens_reported']:,}")
        counts = ", ".join(f"{told[f'tokens_{what}']:,} {what}" for what in ("merged", "pending", "lost"))
        rows.add_row("", f"= {counts}")
    if told["bytes_up"] or told["bytes_down"]:
        rows.add_row("bytes", f"{size(told['bytes_up'])} up, {size(told['bytes_down'])} down")
    if told["bytes_f32_allreduce"]:
        rows.add_row("f32 all-reduce", f"{size(told['bytes_f32_allreduce'])}, if it were made at each step")
    if told["seconds"] is not None:
        rows.add_row("time", duration(told["seconds"]))
    console.print(rows)


def show_unconfirmed(folder: RunFolder, console: PlainConsole) -> None:
    """Which learners did not say that they hold the final model, if any, and why."""
    from ..syncer.final_confirmations import describe_missing

    missing = folder.summary().get("unconfirmed")
    if isinstance(missing, dict) and missing:
        console.print(f"not confirmed that they hold the final model: {describe_missing(missing)}", soft_wrap=True)


def show_results(folder: RunFolder, console: PlainConsole) -> None:
    """The end of a finished run: pictures, table, figures, and the model's own words."""
    write_pictures(folder)
    show_summary(figures(folder), console)
    show_unconfirmed(folder, console)
    console.rule(f"{SAMPLE_BYTES} bytes written by the model", align="left", style="dim")
    for line in sample_text(folder, SAMPLE_PROMPT, SAMPLE_BYTES).split("\n"):
        console.print(line)
    console.rule(style="dim")
    files = ", ".join(name for name in RESULTS if (folder.path / name).exists())
    console.print(f"in {folder.name}: {files}", soft_wrap=True)


def write_pictures(folder: RunFolder) -> list[Path]:
    """metrics.csv and loss.png, from the folder's logs and evaluations."""
    from ..monitor.report import write_report

    return list(write_report(folder.path))


def judge_final(folder: RunFolder, data: Path | None) -> None:
    """The last evaluation of a finished run, if its evaluator did not live to make it. `data` as `diloco up` has it."""
    setup, t = folder.setup(), folder.summary()["t"]
    judged = any(row.get("size") == "full" and row.get("t", 0) >= t for row in folder.evaluations())
    if judged or setup.task is None:
        return
    from safetensors.torch import load_file

    from ..learner.task.evaluator import CHOOSING, REPORTED, Judge, Record
    from ..learner.task.text import load_corpus
    from ..learner.task.transformer import Transformer

    model = Transformer(setup.task, setup.settings.seed)
    model.load_state_dict(load_file(folder.model))
    corpus = load_corpus(data, setup.task.sequence_length)
    judge, record = Judge(model, corpus, setup.task, setup.settings.seed), Record(folder.path)
    for part in (CHOOSING, REPORTED):
        record.add(judge.judge(part, "full", t))


def export_model(folder: RunFolder, to: Path | None = None) -> Path:
    """The global model as safetensors; of a run that is up, its newest checkpoint. SettingError if there is none."""
    from ..syncer.checkpoint import Checkpoints
    from ..syncer.model_file import save_model

    target = to or folder.model
    if folder.model.exists() and folder.summary():
        if target != folder.model:
            try:
                shutil.copyfile(folder.model, target)
            except OSError as wrong:
                raise SettingError(f"cannot write {target}: {wrong.strerror}") from wrong
        return target
    restored = Checkpoints(folder.path / "global").restore(folder.setup().settings)
    if restored is None:
        raise SettingError(f"{folder.name} has no model yet; wait until its first learner has joined")
    save_model(restored.state, target)
    return target


def sample_text(folder: RunFolder, prompt: str, length: int, seed: int = 0) -> str:
    """`prompt` and `length` bytes that the run's global model writes after it."""
    if length < 0:
        raise SettingError(f"--bytes must be 0 or more, not {length}")
    import torch
    from safetensors.torch import load_file

    from ..learner.task.transformer import Transformer, sample

    task = folder.setup().task
    if task is None:
        raise SettingError(
            f"{folder.name} trains a model that its learners brought; `diloco export` writes it to a file"
        )
    torch.set_num_threads(1)  # steps of one byte are too small to share
    model = Transformer(task, folder.setup().settings.seed)
    model.load_state_dict(load_file(_current_model(folder)))
    first = prompt.encode("utf-8", "surrogateescape")
    return (first + sample(model, first, length, seed=seed)).decode("utf-8", "replace")


def _current_model(folder: RunFolder) -> Path:
    if folder.model.exists() and folder.summary():
        return folder.model
    return export_model(folder, folder.path / "model-now.safetensors")


def show_report(folder: RunFolder) -> int:
    """`diloco report`: the files, then the figures; of a run that is up, as they are now."""
    console = PlainConsole()
    told = figures(folder)
    if folder.is_up():
        with suppress(SettingError):  # its store wants a password
            told = find_source(str(folder.path), None).read().figures()
    for path in write_pictures(folder):
        console.print(RunFolder(path).name, soft_wrap=True)
    if folder.setup().task is not None and not folder.evaluations():
        console.print("no loss.png: nobody has evaluated this run; `diloco evaluator` does so while it goes on")
    show_summary(told, console)
    show_unconfirmed(folder, console)
    return 0
