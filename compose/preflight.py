"""Preflight checks of `diloco up`: all errors are found before anything is started or written."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import IO

from ..common.config import RunSettings, TaskSettings, flag
from ..common.errors import SettingError
from ..common.fragments import balanced_plan
from ..common.registry_preflight import check_redis
from ..common.run_folder import RUNS, RunFolder, Setup, find_run
from .ports import BROKER_PORTS, broker_port, check_free, is_taken, port_of
from .up_config import UpConfig


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that has passed all checks."""

    folder: RunFolder
    setup: Setup
    config: UpConfig
    """With the broker's port chosen; with --resume, completed from the folder."""
    fresh: bool
    """The folder was created by this command."""
    lock: IO[bytes]
    """Held until this `diloco up` exits."""


def prepare(config: UpConfig, settings: RunSettings, task: TaskSettings, explicit: Collection[str]) -> Prepared:
    """Check everything and create the run's folder, or with --resume open it; SettingError if a check fails.

    `explicit`: the fields that were given on the command line or in the environment.
    """
    if config.resume is not None:
        return _resume(config.resume, config, settings, task, explicit)
    if "run" not in explicit:
        settings = replace(settings, run=new_name())
    config.check(settings)
    config = _with_ports(config, settings.run)
    data_hash = check_data(config.data, task)
    check_fragments(settings, task)
    setup = Setup(settings=settings, task=task, data_hash=data_hash, local=config.remembered())
    folder = RunFolder.create(config.directory or RUNS / settings.run, setup)
    return Prepared(folder=folder, setup=setup, config=config, fresh=True, lock=_lock(folder))


def _resume(
    path: Path, config: UpConfig, settings: RunSettings, task: TaskSettings, explicit: Collection[str]
) -> Prepared:
    folder = find_run(str(path))
    setup = folder.setup()
    if setup.task is None:
        raise SettingError(
            f"the learners of {folder.name} bring their own model; start its syncer with `diloco syncer`"
        )
    for given, kept in ((settings, setup.settings), (task, setup.task)):
        refuse_changes(folder, given, kept, explicit)
    remembered = dict(setup.local or {})
    remembered["data"] = Path(remembered["data"]) if remembered.get("data") else None
    inherited = {f.name for f in fields(UpConfig)} - set(explicit)
    config = replace(config, **{name: value for name, value in remembered.items() if name in inherited})
    config.check(setup.settings)
    _lock(folder).close()  # checked first, because it is the most likely reason
    steps = settings.steps if "steps" in explicit else setup.settings.steps
    folder.check_steps(steps)
    summary = folder.summary()
    if summary.get("state") == "finished" and steps <= summary.get("t", 0):
        raise SettingError(
            f"{folder.name} has finished its {summary['t']} steps; give a higher --steps to continue it, "
            f"or show it with `diloco report {folder.name}`"
        )
    if check_data(config.data, setup.task) != setup.data_hash:
        raise SettingError(f"the text is not the one that {folder.name} was started with; give that one as --data")
    config = _with_ports(_with_former_ports(folder, config), setup.settings.run)
    lock = _lock(folder)
    folder.raise_steps(steps)
    return Prepared(folder=folder, setup=folder.setup(), config=config, fresh=False, lock=lock)


def refuse_changes(
    folder: RunFolder, given: RunSettings | TaskSettings, kept: RunSettings | TaskSettings, explicit: Collection[str]
) -> None:
    """SettingError if an explicit setting, other than --steps, differs from the run's."""
    for f in fields(given):
        wanted, has = getattr(given, f.name), getattr(kept, f.name)
        if f.name in explicit and f.name != "steps" and wanted != has:
            option = flag(f.name)
            raise SettingError(f"{option} {wanted} cannot change {folder.name}, which has {has}; leave {option} out")


def new_name(now: datetime | None = None) -> str:
    """A name, from date and time, that no run under `runs/` has."""
    name = f"run-{now or datetime.now().astimezone():%Y%m%d-%H%M%S}"
    numbered = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(candidate for candidate in numbered if not (RUNS / candidate).exists())


def check_data(data: Path | None, task: TaskSettings) -> str:
    """SHA-256 of the text; SettingError if it is missing, empty or shorter than a sequence."""
    from ..learner.task.text import load_corpus

    return load_corpus(data, task.sequence_length).sha256


def check_fragments(settings: RunSettings, task: TaskSettings) -> None:
    """SettingError if the built-in model cannot be divided into the given number of fragments."""
    if not settings.fragments:
        return
    from ..learner.model_layout import layout_of
    from ..learner.task.transformer import Transformer

    balanced_plan(layout_of(Transformer(task, settings.seed)), settings.fragments)


def _with_former_ports(folder: RunFolder, config: UpConfig) -> UpConfig:
    """`config` with the former ports of broker and Redis, unless other ones are given or they are taken: learners
    that were started separately, and users, still expect them there.
    """
    run_map = folder.run_map()
    if not config.broker_port:
        port = port_of(run_map.get("broker"))
        if port and not any(is_taken(port + n) for n in range(BROKER_PORTS)):
            config = replace(config, broker_port=port)
    if config.redis is None and not config.redis_port:
        port = port_of(run_map.get("redis"))
        if port and not is_taken(port):
            config = replace(config, redis_port=port)
    return config


def _with_ports(config: UpConfig, run: str) -> UpConfig:
    if config.redis is not None:
        check_redis(config.redis, run)
    elif config.redis_port:
        check_free("--redis-port", config.redis_port)
    return replace(config, broker_port=broker_port(config.broker_port))


def _lock(folder: RunFolder) -> IO[bytes]:
    lock = folder.lock()
    if lock is None:
        raise SettingError(f"{folder.name} is up already; stop that `diloco up` first")
    return lock
