"""`diloco up`: one run on this machine, from the preflight checks to the final report."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from ..common.config import RunSettings, TaskSettings
from ..common.errors import DilocoError, SettingError
from ..common.log import configure, get_logger
from ..common.output import deliver
from ..common.printable import json_line
from ..common.registry_preflight import redis_advice
from ..monitor.console import PlainConsole
from ..monitor.status import RunSource
from ..monitor.watch import Display, open_display
from .final_report import figures, judge_final, show_results
from .preflight import Prepared, prepare
from .signals import StopRequest
from .supervisor import Supervisor
from .up_config import UpConfig

log = get_logger("up")

_POLL_SECONDS = 0.1
_DISPLAY_SECONDS = 1.0


def up(
    config: UpConfig, settings: RunSettings, task: TaskSettings, explicit: Collection[str], logging: Mapping[str, Any]
) -> int:
    """Check and prepare the run, supervise its processes until it finishes or is stopped, and report; the exit code.

    `explicit`: the fields that were given on the command line or in the environment.
    """
    console = PlainConsole(stderr=config.as_json)
    with StopRequest() as stop_request:
        prepared = prepare(config, settings, task, explicit)
        with prepared.lock:
            _begin_log(prepared, logging)
            supervisor = Supervisor(prepared)
            stop_request.on_second = supervisor.processes.kill_now
            stop_request.second_message = f"killed; {_how_to_continue(supervisor)}"
            try:
                _serve(supervisor, stop_request, console)
            except DilocoError as error:
                if not (isinstance(error, SettingError) and _remove_if_never_started(supervisor)):
                    supervisor.stop()
                raise
            finally:
                supervisor.processes.kill()
            return _show(supervisor, stop_request, console)


def _begin_log(prepared: Prepared, logging: Mapping[str, Any]) -> None:
    file = logging["log_file"] or prepared.folder.log("up")
    configure("up", json_file=file, level=logging["log_level"], terminal=False)
    with suppress(FileNotFoundError):  # that of an earlier part of the run must not be taken for this one's
        (prepared.folder.path / "summary.json").unlink()


def _serve(supervisor: Supervisor, stop_request: StopRequest, console: PlainConsole) -> None:
    """Start all processes, supervise them until the run finishes or is stopped, then stop them in order."""
    if stop_request.requested:
        return
    supervisor.start()
    _print_start(supervisor, console)
    display = open_display(console)
    try:
        _supervise(supervisor, stop_request, display)
        if supervisor.finished:
            display.note("all steps are done; evaluating the final model")
            supervisor.finish(is_interrupted=lambda: stop_request.requested)
        else:
            display.note("stopping: finishing the open round and saving (Ctrl-C again kills the run)")
            supervisor.stop()
            supervisor.check_saved()
    finally:
        display.close()


def _print_start(supervisor: Supervisor, console: PlainConsole) -> None:
    settings, folder = supervisor.prepared.setup.settings, supervisor.folder
    port = supervisor.redis.rpartition(":")[2].partition("/")[0]
    lines = [f"run {settings.run} in {folder.name}, broker {supervisor.broker}"]
    lines += [f"  join:         diloco learner --broker {supervisor.broker}"]
    if supervisor.prepared.config.redis is None:
        lines += [f"  inspect:      redis-cli -p {port} HGETALL dd:{settings.run}:run"]
    lines += (
        [f"  status:       diloco status {shlex.quote(folder.path.name)}"] if folder.name.startswith("runs/") else []
    )
    lines += [f"  note:         {sentence}" for sentence in (*settings.advice(), *redis_advice(supervisor.redis))]
    for line in lines:
        console.print(line, soft_wrap=True)
    log.info("run_started", run=settings.run, broker=supervisor.broker, pids=supervisor.processes.pids())


def _supervise(supervisor: Supervisor, stop_request: StopRequest, display: Display) -> None:
    """Restart processes and show progress until the run finishes or a stop is requested."""
    source = RunSource(supervisor.prepared.setup.settings.run, supervisor.redis, supervisor.folder)
    now, shown_at = source.read(), 0.0
    while not (supervisor.finished or stop_request.requested):
        for sentence in supervisor.check_processes(merged=bool(now.summary.get("merges"))):
            display.note(sentence)
        if time.monotonic() - shown_at >= _DISPLAY_SECONDS:
            now, shown_at = source.read(), time.monotonic()
            display.show(now)
        time.sleep(_POLL_SECONDS)


def _remove_if_never_started(supervisor: Supervisor) -> bool:
    """Remove the folder of a new run that could not start, so that the same command works once the cause is fixed."""
    never_started = supervisor.prepared.fresh and not (supervisor.folder.path / "global" / "version-0").exists()
    if never_started:
        supervisor.processes.kill()
        shutil.rmtree(supervisor.folder.path, ignore_errors=True)
    return never_started


def _show(supervisor: Supervisor, stop_request: StopRequest, console: PlainConsole) -> int:
    """Print the results of a finished run, or how to continue a stopped one; the exit code."""
    final = figures(supervisor.folder)
    if supervisor.finished and not stop_request.requested:
        if supervisor.prepared.config.evaluator:
            judge_final(supervisor.folder, supervisor.prepared.config.data)
        show_results(supervisor.folder, console)
    elif supervisor.finished:
        console.print(
            f"finished; show its results with: diloco report {shlex.quote(supervisor.folder.name)}", soft_wrap=True
        )
    elif _remove_if_never_started(supervisor):
        console.print("stopped before any training; its folder is removed")
    else:
        console.print(f"stopped at step {final['steps']}; {_how_to_continue(supervisor)}", soft_wrap=True)
    if supervisor.prepared.config.as_json:
        _deliver(json_line(figures(supervisor.folder) if supervisor.finished else final), supervisor.folder.name)
    return 0


def _how_to_continue(supervisor: Supervisor) -> str:
    return f"continue with: diloco up --resume {shlex.quote(supervisor.folder.name)}"


def _deliver(line: str, name: str) -> None:
    """Print the JSON line of `diloco up --json`; DilocoError if that fails. The run has already been saved."""
    try:
        deliver(line + "\n")
    except OSError as error:
        raise DilocoError(
            f"the figures of {name} could not be written to standard output: {error.strerror}; the run is saved, and "
            f"`diloco status {shlex.quote(name)} --json` prints them again"
        ) from error
