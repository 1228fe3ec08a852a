"""`diloco evaluator --report`: an evaluator that shows at the end what `diloco up` shows, where no `up` is there to."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from ..common.config import LearnerConfig
from ..common.errors import DilocoError, PeerLost
from ..common.log import get_logger
from ..common.run_folder import RunFolder
from ..monitor.console import PlainConsole
from .final_report import judge_final, show_results

log = get_logger("evaluator")

SUMMARY_SECONDS = 60.0
"""How long the syncer may take to write its summary, once everybody has heard that the run is over."""
LOOK_SECONDS = 0.2
FINISHED_SECONDS = 10.0
"""How long a run is listened for that has finished already: its syncer may be back to tell so, or to go on."""


def evaluate_and_report(config: LearnerConfig, data: Path | None, eval_every_seconds: float) -> int:
    """Judge the run until it is over, then write metrics.csv and loss.png into its folder and show its figures; the
    exit code. A run that has finished is shown again, whether or not anybody serves it. Raises what the evaluator
    raises, and DilocoError if the folder does not tell of the end.
    """
    from ..learner.task.evaluator import main as evaluate

    folder = RunFolder((config.directory or Path()).absolute())

    def report() -> None:
        _wait_for_the_end(folder)
        judge_final(folder, data)
        show_results(folder, PlainConsole())
        log.info("reported", folder=folder.name)

    if is_finished(folder):
        config = replace(config, join_timeout_seconds=min(FINISHED_SECONDS, config.join_timeout_seconds))
    try:
        return evaluate(config, data, eval_every_seconds, report)
    except PeerLost:
        if not is_finished(folder):
            raise
        log.info("finished_already", folder=folder.name)
        report()
    return 0


def is_finished(folder: RunFolder) -> bool:
    """All steps that the run has now are done and saved: its summary says so, and is not of an earlier end."""
    if not (folder.path / "settings.json").is_file():
        return False
    summary = folder.summary()
    return bool(summary.get("state") == "finished" and summary.get("t", 0) >= folder.setup().settings.steps)


def _wait_for_the_end(folder: RunFolder) -> None:
    due = time.monotonic() + SUMMARY_SECONDS
    while not is_finished(folder):
        if time.monotonic() >= due:
            raise DilocoError(
                f"the run is over, but {folder.name}/summary.json does not say so after {SUMMARY_SECONDS:g} s; "
                "is --dir the folder that its syncer writes?"
            )
        time.sleep(LOOK_SECONDS)
