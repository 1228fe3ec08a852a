"""Final report of `diloco evaluator --report`: what `diloco up` shows at the end, for runs without it."""

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

_SUMMARY_SECONDS = 60.0
"""Most time for which the syncer's summary is awaited after the end of the run."""
_POLL_SECONDS = 0.2
_FINISHED_JOIN_SECONDS = 10.0
"""Join timeout for a run that has finished: its syncer may have been restarted, perhaps to continue the run."""


def evaluate_and_report(config: LearnerConfig, data: Path | None, eval_every_seconds: float) -> int:
    """Evaluate the run until it ends, then write metrics.csv and loss.png to its folder and print its figures; returns
    the exit code. A finished run is reported again, even without its syncer. Raises what the evaluator raises, and
    DilocoError if the folder holds no summary of the end.
    """
    from ..learner.task.evaluator import main as evaluate

    folder = RunFolder((config.directory or Path()).absolute())

    def report() -> None:
        _wait_for_summary(folder)
        judge_final(folder, data)
        show_results(folder, PlainConsole())
        log.info("reported", folder=folder.name)

    if is_finished(folder):
        config = replace(config, join_timeout_seconds=min(_FINISHED_JOIN_SECONDS, config.join_timeout_seconds))
    try:
        return evaluate(config, data, eval_every_seconds, report)
    except PeerLost:
        if not is_finished(folder):
            raise
        log.info("finished_already", folder=folder.name)
        report()
    return 0


def is_finished(folder: RunFolder) -> bool:
    """Whether the summary says that the run finished, with as many steps as it has now: more may have been added."""
    if not (folder.path / "settings.json").is_file():
        return False
    summary = folder.summary()
    return bool(summary.get("state") == "finished" and summary.get("t", 0) >= folder.setup().settings.steps)


def _wait_for_summary(folder: RunFolder) -> None:
    deadline = time.monotonic() + _SUMMARY_SECONDS
    while not is_finished(folder):
        if time.monotonic() >= deadline:
            raise DilocoError(
                f"the run has ended, but after {_SUMMARY_SECONDS:g} s {folder.name}/summary.json does not say so; "
                "check that --dir is the folder that its syncer writes"
            )
        time.sleep(_POLL_SECONDS)
