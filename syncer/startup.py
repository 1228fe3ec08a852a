"""Startup of a syncer: reads the disk, discovers the epoch, takes a higher one, and resumes the run if there is one."""

from __future__ import annotations

from collections.abc import Callable

from ..common.errors import SettingError
from ..common.registry_preflight import redis_advice
from .checkpoint import Restored
from .epoch_discovery import KnownEpochs
from .global_model import GlobalModel
from .journal import recorded
from .model_file import check_model_file
from .rounds import Rounds
from .run_metrics import RunMetrics
from .run_state import Components, RunState, TrainingState


def begin(components: Components, run: RunState, stopped: Callable[[], bool]) -> bool:
    """Make the new epoch durable and, if the directory holds a run, serve it again. Returns False, with nothing
    published or written, if `stopped` meanwhile: a syncer with an incomplete discovery must not publish.

    SettingError if the directory is in use, or is empty while the run exists elsewhere.
    """
    telemetry = components.telemetry
    components.checkpoints.lock()
    restored = components.checkpoints.restore(run.settings)
    if restored is None and components.config.init is not None:
        check_model_file(components.config.init)
    survey = components.discovery.survey(stopped)
    if stopped():
        return False
    stored_epoch = telemetry.registry.stored_epoch()
    if restored is None:
        _refuse_foreign(components, run, survey)
    run.epoch = 1 + max(stored_epoch, survey.epoch(components.checkpoints.epoch()))
    components.checkpoints.write_epoch(run.epoch)
    telemetry.registry.write_epoch(run.epoch)
    if restored is not None:
        _resume(components, run, restored, survey)
    step = run.training.rounds.t if run.training else 0
    telemetry.event("syncer_started", epoch=run.epoch, resumed=restored is not None, step=step)
    redis = components.config.redis
    for sentence in (*run.settings.advice(), *(redis_advice(redis) if redis is not None else ())):
        telemetry.warn("advice", sentence=sentence)
    return True


def serve(components: Components, run: RunState, state: GlobalModel) -> TrainingState:
    """Serve a model (version 0, or a checkpoint): from now on learners can be welcomed."""
    plan, config = state.plan, components.config
    sizes = [f.parameters for f in plan.fragments]
    rounds = Rounds(run.settings, sizes, run.epoch)
    if config.tape is not None:
        rounds = recorded(
            config.tape, run.settings, sizes, epoch=run.epoch, task=config.task, plan_digest=plan.digest,
            data_hash=config.data_hash,
        )  # fmt: skip
    rounds.versions = list(state.versions)
    run.training = TrainingState(state, rounds, RunMetrics(plan.parameters, rounds.schedule.steps_between))
    run.phase = "running"
    components.telemetry.publish_fragments(state, rounds.t)
    return run.training


def _refuse_foreign(components: Components, run: RunState, survey: KnownEpochs) -> None:
    """SettingError if the directory is empty while the run exists elsewhere: it must not begin a second time."""
    where, name = components.config.directory, run.settings.run
    if survey.rival is not None:
        raise SettingError(
            f"run {name} is already served on {components.config.broker}, and {where} holds nothing of it; "
            "take another --run name, or give the directory that it began in"
        )
    if survey.knows_merges:
        raise SettingError(
            f"learners of run {name} are on {components.config.broker}, and {where} holds nothing of it; "
            "give the directory that it began in, or stop those learners and begin again"
        )
    if components.telemetry.registry.stored_versions():
        raise SettingError(
            f"Redis knows run {name} as seeded, but {where} holds nothing of it; give the directory that it began in, "
            f"or delete the keys dd:{name}:* and begin again"
        )


def _resume(components: Components, run: RunState, restored: Restored, survey: KnownEpochs) -> None:
    """Contents are the checkpoint's; versions continue above every version that any process has received."""
    state, telemetry = restored.state, components.telemetry
    for warning in restored.warnings:
        telemetry.warn("checkpoint_damaged", sentence=warning)
    stored = telemetry.registry.stored_versions()
    versions = [1 + max(stored.get(p, 0), survey.version(p, v)) for p, v in enumerate(state.versions)]
    undone = sum(new - 1 - old for new, old in zip(versions, state.versions, strict=True))
    state.renumber(versions)
    training = serve(components, run, state)
    if restored.bookkeeping is not None:
        training.rounds.load_json(restored.bookkeeping["rounds"])
        training.rounds.versions = list(versions)
        training.metrics.load_json(restored.bookkeeping["figures"], components.clock.now())
        if restored.bookkeeping["phase"] == "finished" and training.rounds.t >= run.settings.steps:
            run.phase = "finished"
    if undone:
        telemetry.warn("rolled_back", merges=undone, epoch=run.epoch, step=training.rounds.t)
