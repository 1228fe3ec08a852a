"""State of a syncer under test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decoupled_diloco.common.wire import Beat
from scripted_learner import ScriptedLearner
from syncer_run import SyncerRun


def versions(run: SyncerRun) -> list[int]:
    training = run.syncer.current.training
    assert training is not None
    return list(training.model.versions)


def answers_until(run: SyncerRun, a: ScriptedLearner, enough: Callable[[], Any]) -> Callable[[], Any]:
    """A predicate for `wait_for`: the learner steps and answers every call until `enough` is true."""
    answered: set[tuple[int, int]] = set()

    def predicate() -> Any:
        a.listen()
        if found := enough():
            return found
        training = run.syncer.current.training
        for call in training.rounds.wire_calls() if training else ():
            if (call.slot, call.attempt) not in answered:
                answered.add((call.slot, call.attempt))
                p = call.fragment
                a.versions[p], a.since[p] = call.version, max(a.since[p], a.steps)
                a.step()
                a.bulk.send(a.delta(call))
                a.since[p] = a.steps
        a.alive()
        return None

    return predicate


def beats(a: ScriptedLearner) -> list[Beat]:
    a.listen()
    return [m for m in a.heard if isinstance(m, Beat)]


def finished(a: ScriptedLearner) -> Any:
    """The newest beat, if the run is over."""
    return next((beat for beat in beats(a)[-1:] if beat.state == "finished"), None)
