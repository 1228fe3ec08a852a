"""Everything that can be wrong is found here, before anything starts and before anything is written."""

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
from ..common.registry_preflight import check_store
from ..common.run_folder import RUNS, RunFolder, Setup, find
from .ports import BROKER_PORTS, broker_port, check_free, is_taken, port_of
from .up_config import UpConfig


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that may start."""

    folder: RunFolder
    setup: Setup
    config: UpConfig
    """With the broker's port found; on --resume with what the folder remembers."""
    fresh: bool
    """The folder was made by this start."""
    lock: IO[bytes]
    """Held for as long as this `diloco up` lives."""


def prepare(config: UpConfig, settings: RunSettings, task: TaskSettings, told: Collection[str]) -> Prepared:
    """A new run's folder, or with --resume an old one's, after every check; SettingError otherwise.

    `told`: the fields that stood on the command line.
    """
    if config.resume is not None:
        return _resume(config.resume, config, settings, task, told)
    if "run" not in told:
        settings = replace(settings, run=new_name())
    config.check(settings)
    config = _with_ports(config, settings.run)
    data_hash = check_data(config.data, task)
    check_fragments(settings, task)
    setup = Setup(settings=settings, task=task, data_hash=data_hash, local=config.remembered())
    folder = RunFolder.create(config.directory or RUNS / settings.run, setup)
    return Prepared(folder=folder, setup=setup, config=config, fresh=True, lock=_lock(folder))


def _resume(path: Path, config: UpConfig, settings: RunSettings, task: TaskSettings, told: Collection[str]) -> Prepared:
    folder = find(str(path))
    setup = folder.setup()
    if setup.task is None:
        raise SettingError(f"the learners of {folder.name} bring their own model; start its syncer by `diloco syncer`")
    for given, kept in ((settings, setup.settings), (task, setup.task)):
        refuse_changes(folder, given, kept, told)
    remembered = dict(setup.local or {})
    remembered["data"] = Path(remembered["data"]) if remembered.get("data") else None
    known = {f.name for f in fields(UpConfig)} - set(told)
    config = replace(config, **{name: value for name, value in remembered.items() if name in known})
    config.check(setup.settings)
    _lock(folder).close()  # first of all the plainest reason
    steps = settings.steps if "steps" in told else setup.settings.steps
    folder.check_steps(steps)
    summary = folder.summary()
    if summary.get("state") == "finished" and steps <= summary.get("t", 0):
        raise SettingError(
            f"{folder.name} has finished its {summary['t']} steps; give --steps above that to go on, "
            f"or look at it by `diloco report {folder.name}`"
        )
    if check_data(config.data, setup.task) != setup.data_hash:
        raise SettingError(f"the text is not the one that {folder.name} began with; give --data the old one")
    config = _with_ports(_where_it_was(folder, config), setup.settings.run)
    lock = _lock(folder)
    folder.raise_steps(steps)
    return Prepared(folder=folder, setup=folder.setup(), config=config, fresh=False, lock=lock)


def refuse_changes(
    folder: RunFolder, given: RunSettings | TaskSettings, kept: RunSettings | TaskSettings, told: Collection[str]
) -> None:
    """SettingError if a setting on the command line differs from the run's own; only --steps may."""
    for f in fields(given):
        wanted, has = getattr(given, f.name), getattr(kept, f.name)
        if f.name in told and f.name != "steps" and wanted != has:
            option = flag(f.name)
            raise SettingError(f"{option} {wanted} cannot change {folder.name}, which has {has}; leave {option} out")


def new_name(now: datetime | None = None) -> str:
    """A name for a run that was not given one; free under `runs/`."""
    name = f"run-{now or datetime.now().astimezone():%Y%m%d-%H%M%S}"
    numbered = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(candidate for candidate in numbered if not (RUNS / candidate).exists())


def check_data(data: Path | None, task: TaskSettings) -> str:
    """sha256 of the text; SettingError if it is missing, empty or shorter than a sequence."""
    from ..learner.task.text import load_corpus

    return load_corpus(data, task.sequence_length).sha256


def check_fragments(settings: RunSettings, task: TaskSettings) -> None:
    """SettingError if the built-in model cannot be cut as the settings say."""
    if not settings.fragments:
        return
    from ..learner.model_layout import layout_of
    from ..learner.task.transformer import Transformer

    balanced_plan(layout_of(Transformer(task, settings.seed)), settings.fragments)


def _where_it_was(folder: RunFolder, config: UpConfig) -> UpConfig:
    """Broker and store at their old ports, if nobody says otherwise and nobody is there: learners on other machines,
    and people, still look for them there.
    """
    told = folder.run_map()
    if not config.broker_port:
        port = port_of(told.get("broker"))
        if port and not any(is_taken(port + n) for n in range(BROKER_PORTS)):
            config = replace(config, broker_port=port)
    if config.redis is None and not config.redis_port:
        port = port_of(told.get("redis"))
        if port and not is_taken(port):
            config = replace(config, redis_port=port)
    return config


def _with_ports(config: UpConfig, run: str) -> UpConfig:
    if config.redis is not None:
        check_store(config.redis, run)
    elif config.redis_port:
        check_free("--redis-port", config.redis_port)
    return replace(config, broker_port=broker_port(config.broker_port))


def _lock(folder: RunFolder) -> IO[bytes]:
    lock = folder.lock()
    if lock is None:
        raise SettingError(f"{folder.name} is up already; stop that `diloco up` first")
    return lock
