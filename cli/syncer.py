"""Configuration of `diloco syncer`: from the command line, the key, or the folder of the run that it continues."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..common.auth_keys import Key, held_key, run_of
from ..common.config import RunSettings, SyncerConfig, TaskSettings, preset
from ..common.errors import DilocoError, SettingError
from ..common.registry_preflight import check_redis
from ..common.run_folder import RUNS, RunFolder, Setup
from ..compose.preflight import check_data, check_fragments, refuse_changes
from .options import from_options


def syncer_config(
    options: Mapping[str, Any], explicit: Collection[str], *, redis_is_checked: bool = False
) -> SyncerConfig:
    """The configuration of a syncer, whose run's folder is created if it does not exist.

    `explicit`: the fields that were given on the command line or in the environment. SettingError if options are
    invalid or contradict the run in the folder, or if Redis is unsuitable (unless `redis_is_checked`).
    """
    key = held_key(options["key"], "syncer")
    run = run_of(key, options["run"] if "run" in explicit else "", options["key"])
    options = {**options, "run": run or options["run"]}
    changes = preset(options["preset"], options["quorum"] if "quorum" in explicit else None)
    options |= {name: value for name, value in changes.items() if name not in explicit}
    settings, task = from_options(RunSettings, options), from_options(TaskSettings, options)
    path: Path = options["directory"] or RUNS / settings.run
    exists = (path / "settings.json").exists()
    if options["redis"] and not redis_is_checked:
        _check_redis(options["redis"], RunFolder.open(path).setup().settings.run if exists else settings.run)
    if exists:
        if changes:
            raise SettingError(f"{path} continues with its run's own settings; leave --preset out")
        _check_kind(RunFolder.open(path), options, explicit)
        _check_run(RunFolder.open(path), key)
        folder, setup = _continue_run(path, settings, task, explicit)
    else:
        if options["init"] is not None and not options["init"].is_file():
            raise SettingError(f"--init {options['init']} is not a file; give a safetensors file with the model")
        setup = _new_setup(settings, None if options["own_model"] else task, options["data"])
        folder = RunFolder.create(path, setup)
    return SyncerConfig(
        settings=setup.settings,
        task=setup.task,
        broker=options["broker"],
        directory=folder.path / "global",
        redis=options["redis"],
        init=options["init"],
        data_hash=setup.data_hash,
        key=options["key"],
        tape=options["tape"],
        stop_redis=options["stop_redis"],
    )


def _check_redis(url: str, run: str) -> None:
    """SettingError if Redis is unsuitable. One that cannot be reached is accepted, since it is only a view of the run:
    the registry reports that, and fills it as soon as it answers.
    """
    try:
        check_redis(url, run)
    except SettingError:
        raise
    except DilocoError:
        return


def _continue_run(
    path: Path, settings: RunSettings, task: TaskSettings, explicit: Collection[str]
) -> tuple[RunFolder, Setup]:
    folder = RunFolder.open(path)
    setup = folder.setup()
    refuse_changes(folder, settings, setup.settings, explicit)
    if setup.task is not None:
        refuse_changes(folder, task, setup.task, explicit)
    if "steps" in explicit:
        folder.raise_steps(settings.steps)
    return folder, folder.setup()


def _check_run(folder: RunFolder, key: Key | None) -> None:
    run = folder.setup().settings.run
    if key is not None and run != key.run:
        raise SettingError(
            f"{folder.path} holds run {run}, but the key is for run {key.run}; give another --dir or --key"
        )


def _check_kind(folder: RunFolder, options: Mapping[str, Any], explicit: Collection[str]) -> None:
    """SettingError if the options name another kind of model, or another text, than the run in the folder has."""
    setup = folder.setup()
    if options["own_model"] and setup.task is not None:
        raise SettingError(f"{folder.name} trains the built-in model; leave --own-model out, or choose another --run")
    if "data" in explicit and (setup.task is None or check_data(options["data"], setup.task) != setup.data_hash):
        raise SettingError(
            f"--data {options['data']} is not the text that {folder.name} was started with; leave it out"
        )


def _new_setup(settings: RunSettings, task: TaskSettings | None, data: Path | None) -> Setup:
    if task is None and data is not None:
        raise SettingError("learners of --own-model have their own text; leave --data out")
    if task is None:
        return Setup(settings=settings, task=None)
    check_fragments(settings, task)
    return Setup(settings=settings, task=task, data_hash=check_data(data, task))
