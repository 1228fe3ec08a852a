"""`diloco syncer` started by hand: its settings from the command line, a key, or the folder that it goes on with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..common.auth_keys import Key, held_key, run_of
from ..common.config import RunSettings, SyncerConfig, TaskSettings, preset
from ..common.errors import DilocoError, SettingError
from ..common.registry_preflight import check_store
from ..common.run_folder import RUNS, RunFolder, Setup
from ..compose.preflight import check_data, check_fragments, refuse_changes
from .options import made_of


def syncer_config(given: Mapping[str, Any], told: Collection[str], *, redis_is_checked: bool = False) -> SyncerConfig:
    """The configuration of one syncer; a folder that holds no run yet becomes this run's.

    `told`: the fields that stood on the command line. SettingError where they are wrong or another run's, or where the
    store cannot show the run (unless that `redis_is_checked`).
    """
    path: Path | None = given["directory"]
    key = held_key(given["key"], "syncer")
    given = {**given, "run": run_of(key, given["run"] if "run" in told else "", given["key"]) or given["run"]}
    changes = preset(given["preset"], given["quorum"] if "quorum" in told else None)
    given |= {name: value for name, value in changes.items() if name not in told}
    settings, task = made_of(RunSettings, given), made_of(TaskSettings, given)
    place = path or RUNS / settings.run
    is_there = (place / "settings.json").exists()
    if given["redis"] and not redis_is_checked:
        _check_redis(given["redis"], RunFolder.open(place).setup().settings.run if is_there else settings.run)
    if is_there:
        if changes:
            raise SettingError(f"{place} goes on with its run's own settings; leave --preset out")
        _check_kind(RunFolder.open(place), given, told)
        _check_run(RunFolder.open(place), key)
        folder, setup = _go_on(place, settings, task, told)
    else:
        if given["init"] is not None and not given["init"].is_file():
            raise SettingError(f"--init {given['init']} is no file; give a safetensors file with the model")
        setup = _new_setup(settings, None if given["own_model"] else task, given["data"])
        folder = RunFolder.create(place, setup)
    return SyncerConfig(
        settings=setup.settings,
        task=setup.task,
        broker=given["broker"],
        directory=folder.path / "global",
        redis=given["redis"],
        init=given["init"],
        data_hash=setup.data_hash,
        key=given["key"],
        tape=given["tape"],
        stop_redis=given["stop_redis"],
    )


def _check_redis(url: str, run: str) -> None:
    """SettingError if the store cannot show the run. One that is away is no reason to wait, since it is only a view:
    the registry tells of it, and fills it when it is there.
    """
    try:
        check_store(url, run)
    except SettingError:
        raise
    except DilocoError:
        return


def _go_on(place: Path, settings: RunSettings, task: TaskSettings, told: Collection[str]) -> tuple[RunFolder, Setup]:
    folder = RunFolder.open(place)
    setup = folder.setup()
    refuse_changes(folder, settings, setup.settings, told)
    if setup.task is not None:
        refuse_changes(folder, task, setup.task, told)
    if "steps" in told:
        folder.raise_steps(settings.steps)
    return folder, folder.setup()


def _check_run(folder: RunFolder, key: Key | None) -> None:
    run = folder.setup().settings.run
    if key is not None and run != key.run:
        raise SettingError(
            f"{folder.path} holds run {run}, and the key is for run {key.run}; give another --dir or --key"
        )


def _check_kind(folder: RunFolder, given: Mapping[str, Any], told: Collection[str]) -> None:
    """SettingError if the command line speaks of another kind of model, or another text, than the folder has."""
    setup = folder.setup()
    if given["own_model"] and setup.task is not None:
        raise SettingError(f"{folder.name} trains the built-in model; leave --own-model out, or choose another --run")
    if "data" in told and (setup.task is None or check_data(given["data"], setup.task) != setup.data_hash):
        raise SettingError(f"--data {given['data']} is not the text that {folder.name} began with; leave it out")


def _new_setup(settings: RunSettings, task: TaskSettings | None, data: Path | None) -> Setup:
    if task is None and data is not None:
        raise SettingError("--own-model learners bring their own text; leave --data out")
    if task is None:
        return Setup(settings=settings, task=None)
    check_fragments(settings, task)
    return Setup(settings=settings, task=task, data_hash=check_data(data, task))
