"""Availability of virtual learners: their step times, and when they join, die and return."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import count

from ..common.config import flag
from ..common.errors import SettingError
from ..common.journal import RunJournal
from ..learner.task.text import generator
from ..syncer.membership import SILENCE_SECONDS
from .failures import ChipGroup, Stretch
from .goodput import absences_of
from .settings import ClusterPlan, FailureModel

StepStream = Iterator[Stretch]
"""Inner steps of one incarnation, each with its share of the batch; a gap between two is a pause."""


@dataclass(frozen=True)
class VirtualMember:
    """One virtual learner: its incarnations, and when each dies."""

    name: str
    incarnations: Iterable[tuple[StepStream, float]]
    """(steps, time of death in virtual seconds; infinity = never), in order of their starts."""
    joins_at: float = 0.0
    """Start of its allocation, dead or alive."""


def steady(step_seconds: float, *, begins: float = 0.0) -> StepStream:
    """Endless steps of equal length, without a pause."""
    for number in count():
        start = begins + number * step_seconds
        yield Stretch(start, start + step_seconds, 1.0, step_seconds)


def members_of(plan: ClusterPlan, failures: FailureModel, seed: int, horizon_seconds: float) -> list[VirtualMember]:
    """Learners of `plan`, for a run that ends within `horizon_seconds`. With chips, each has its share of them, which
    fail by the failure model; without, each has its own step time and the plan's absences. SettingError for settings
    that conflict.
    """
    _check(plan, failures)
    return [
        VirtualMember(
            name=f"learner-{number}",
            incarnations=[(_chips(plan, failures, number, seed, horizon_seconds), math.inf)]
            if plan.chips
            else _lives(plan, number, seed, horizon_seconds),
            joins_at=_joins_at(plan, number),
        )
        for number in range(1, plan.learners + plan.late + 1)
    ]


def members_of_tape(tape: RunJournal) -> list[VirtualMember]:
    """Learners of a taped run: each incarnation at its recorded step time, from its join to its last report.
    SettingError if the tape has no reports.
    """
    incarnations: dict[tuple[str, int], list[float]] = {}
    ended = 0.0
    for row in tape.syncer.rows:
        who = (str(row.get("learner")), int(row.get("incarnation", 0)))
        ended = max(ended, float(row.get("at", 0.0)))
        if row["what"] == "join" and who not in incarnations:
            incarnations[who] = [row["at"], row["at"], 0.0]
        elif row["what"] == "alive" and who in incarnations and row["step_seconds"]:
            first_step_at = row["at"] - row["since_first_step_seconds"]
            incarnations[who] = [first_step_at, row["at"], row["step_seconds"]]
    stepping = {who: life for who, life in incarnations.items() if life[2]}
    if not stepping:
        raise SettingError(
            f"{tape.syncer.path} has no learner reports, so step times are unknown; record a run whose learners train"
        )
    zero = min(begins for begins, _, _ in stepping.values())
    return [
        VirtualMember(
            name,
            [
                (steady(step, begins=begins - zero), math.inf if last > ended - SILENCE_SECONDS else last - zero)
                for who, (begins, last, step) in stepping.items()
                if who[0] == name
            ],
        )
        for name in sorted({who[0] for who in stepping})
    ]


def step_seconds_of(plan: ClusterPlan, number: int) -> float:
    """Step time of learner `number` (from 1), between the plan's and `slowest` times as long."""
    if number > plan.learners:
        return plan.step(0.0)
    if plan.stragglers:
        return plan.step(0.0) * (plan.slowest if number > plan.learners - plan.stragglers else 1.0)
    between = (number - 1) / max(1, plan.learners - 1)
    return plan.step(0.0) * (1 + (plan.slowest - 1) * between)


def _check(plan: ClusterPlan, failures: FailureModel) -> None:
    """Reject settings that would be ignored: chips take step time and absences from the failure model."""
    ours, theirs = {f.name: f.default for f in fields(ClusterPlan)}, {f.name: f.default for f in fields(FailureModel)}
    if plan.chips:
        failures.check_slices(plan.chips, plan.learners)
        names = ("absent", "slowest", "absence_seconds", "stragglers", "late", "late_seconds")
        idle = [n for n in names if getattr(plan, n) != ours[n]]
        if idle:
            raise SettingError(f"{flag(idle[0])} is for learners without chips; with --chips slices fail and return")
    else:
        if plan.stragglers and plan.slowest == 1:
            raise SettingError("--stragglers are as fast as all others: say by --slowest how slow they are")
        if plan.absence_seconds != ours["absence_seconds"] and not plan.absent:
            raise SettingError("--absence-seconds is how long an absence lasts: say by --absent how much there is")
        if plan.late_seconds and not plan.late:
            raise SettingError("--late-seconds is when further learners come: say by --late how many")
        idle = [n for n, default in theirs.items() if n != "step_seconds" and getattr(failures, n) != default]
        if idle:
            raise SettingError(f"{flag(idle[0])} says how chips fail: give --chips, too")


def _chips(plan: ClusterPlan, failures: FailureModel, number: int, seed: int, horizon_seconds: float) -> StepStream:
    rng, absences = (
        generator("chips", seed, number),
        absences_of(failures, number - 1, plan.learners, horizon_seconds, seed),
    )
    failures = replace(failures, step_seconds=plan.step(failures.step_seconds))
    return ChipGroup(failures, plan.chips / plan.learners, rng, list(absences)).life(horizon_seconds)


def _joins_at(plan: ClusterPlan, number: int) -> float:
    return plan.late_seconds if number > plan.learners else 0.0


def _lives(plan: ClusterPlan, number: int, seed: int, horizon_seconds: float) -> Iterator[tuple[StepStream, float]]:
    """(steps, time of death) of one learner: present and absent times are exponential, with the plan's means."""
    step, rng = step_seconds_of(plan, number), generator("absences", seed, number)
    comes = _joins_at(plan, number)
    if not plan.absent:
        yield steady(step, begins=comes), math.inf
        return
    here_seconds = plan.absence_seconds * (1 - plan.absent) / plan.absent
    t = comes + (float(rng.exponential(plan.absence_seconds)) if rng.random() < plan.absent else 0.0)
    while t < horizon_seconds:
        dies_at = t + float(rng.exponential(here_seconds))
        yield steady(step, begins=t), dies_at
        t = dies_at + float(rng.exponential(plan.absence_seconds))
