"""`diloco up`: one run on this machine, from the first check to the last figure. `up` is a table of contents."""

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
from ..common.registry_preflight import store_advice
from ..monitor.console import PlainConsole
from ..monitor.status import Source
from ..monitor.watch import Display, open_display
from .final_report import figures, judge_final, show_results
from .preflight import Prepared, prepare
from .signals import StopRequest
from .supervisor import Supervisor
from .up_config import UpConfig

log = get_logger("up")

LOOK_SECONDS = 0.1
SHOW_SECONDS = 1.0


def up(
    config: UpConfig, settings: RunSettings, task: TaskSettings, told: Collection[str], logging: Mapping[str, Any]
) -> int:
    """Prepare, start, keep alive until the run is finished or somebody wishes to stop, end, show; the exit code.

    `told`: fields that stood on the command line.
    """
    console = PlainConsole(stderr=config.as_json)
    with StopRequest() as wish:
        prepared = prepare(config, settings, task, told)
        with prepared.lock:
            _begin_log(prepared, logging)
            house = Supervisor(prepared)
            wish.at_once = house.family.kill_now
            wish.last_words = f"ended at once; go on by: diloco up --resume {shlex.quote(house.folder.name)}"
            try:
                _serve(house, wish, console)
            except DilocoError as wrong:
                if not (isinstance(wrong, SettingError) and _forget_if_never_begun(house)):
                    house.stop()
                raise
            finally:
                house.family.kill()
            return _show(house, wish, console)


def _begin_log(prepared: Prepared, logging: Mapping[str, Any]) -> None:
    file = logging["log_file"] or prepared.folder.log("up")
    configure("up", json_file=file, level=logging["log_level"], terminal=False)
    with suppress(FileNotFoundError):  # figures of an earlier part of the run must not pass for this one's
        (prepared.folder.path / "summary.json").unlink()


def _serve(house: Supervisor, wish: StopRequest, console: PlainConsole) -> None:
    """Start the house and keep it until the end; then let it end in order."""
    if wish.stop:
        return
    house.start()
    _greet(house, console)
    display = open_display(console)
    try:
        _keep(house, wish, display)
        if house.finished:
            display.note("all steps are done; the final model is judged")
            house.finish(hurry=lambda: wish.stop)
        else:
            display.note("stopping: the open round is finished and saved (Ctrl-C again ends at once)")
            house.stop()
            house.check_saved()
    finally:
        display.close()


def _greet(house: Supervisor, console: PlainConsole) -> None:
    settings, folder = house.prepared.setup.settings, house.folder
    port = house.redis.rpartition(":")[2].partition("/")[0]
    say = [f"run {settings.run} in {folder.name}, broker {house.broker}"]
    say += [f"  join it:      diloco learner --broker {house.broker}"]
    if house.prepared.config.redis is None:
        say += [f"  look inside:  redis-cli -p {port} HGETALL dd:{settings.run}:run"]
    say += [f"  or:           diloco status {shlex.quote(folder.path.name)}"] if folder.name.startswith("runs/") else []
    say += [f"  mind:         {sentence}" for sentence in (*settings.advice(), *store_advice(house.redis))]
    for sentence in say:
        console.print(sentence, soft_wrap=True)
    log.info("run_started", run=settings.run, broker=house.broker, pids=house.family.pids())


def _keep(house: Supervisor, wish: StopRequest, display: Display) -> None:
    """Until the run is finished or somebody wishes to stop: keep all alive, show how it goes."""
    source = Source(house.prepared.setup.settings.run, house.redis, house.folder)
    now, shown_at = source.read(), 0.0
    while not (house.finished or wish.stop):
        for sentence in house.look(merged=bool(now.figures_so_far.get("merges"))):
            display.note(sentence)
        if time.monotonic() - shown_at >= SHOW_SECONDS:
            now, shown_at = source.read(), time.monotonic()
            display.show(now)
        time.sleep(LOOK_SECONDS)


def _forget_if_never_begun(house: Supervisor) -> bool:
    """A folder made for a run that could not start goes again, so that the same command works once it is mended."""
    never_begun = house.prepared.fresh and not (house.folder.path / "global" / "version-0").exists()
    if never_begun:
        house.family.kill()
        shutil.rmtree(house.folder.path, ignore_errors=True)
    return never_begun


def _show(house: Supervisor, wish: StopRequest, console: PlainConsole) -> int:
    """Tables, pictures and the model's own words after a finished run; how to go on after a stopped one."""
    told = figures(house.folder)
    if house.finished and not wish.stop:
        if house.prepared.config.evaluator:
            judge_final(house.folder, house.prepared.config.data)
        show_results(house.folder, console)
    elif house.finished:
        console.print(f"finished; its results: diloco report {shlex.quote(house.folder.name)}", soft_wrap=True)
    elif _forget_if_never_begun(house):
        console.print("stopped before anything was trained; nothing is kept")
    else:
        how = f"go on by: diloco up --resume {shlex.quote(house.folder.name)}"
        console.print(f"stopped at step {told['steps']}; {how}", soft_wrap=True)
    if house.prepared.config.as_json:
        _deliver(json_line(figures(house.folder) if house.finished else told), house.folder.name)
    return 0


def _deliver(line: str, name: str) -> None:
    """Print the last line of `diloco up --json`; DilocoError if it does not arrive. The run is saved by now."""
    try:
        deliver(line + "\n")
    except OSError as wrong:
        raise DilocoError(
            f"standard output does not take the figures of {name}: {wrong.strerror}; the run is saved, and "
            f"`diloco status {shlex.quote(name)} --json` shows them again"
        ) from wrong
