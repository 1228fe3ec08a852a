"""`diloco simulate ...`: ask before you pay. Options come from the settings; what is heavy is loaded inside."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from ..common.config import RunSettings, TaskSettings
from ..common.errors import DilocoError, SettingError
from ..common.output import echo
from ..common.printable import json_line
from ..simulator.settings import ClusterPlan, FailureModel, GoodputPlan, LinkModel
from .environment import EnvironmentCommand, EnvironmentGroup
from .options import made_of, options_of, refuse

AS_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
TEXT = click.option("--data", type=click.Path(path_type=Path), help="A text, or a folder. Without it: Python's own.")


@click.group(cls=EnvironmentGroup)
def simulate() -> None:
    """Ask what a cluster would do, before you pay for it. Seconds are virtual."""


@simulate.command()
@options_of(GoodputPlan)
@click.option("--table", is_flag=True, help="All of the paper's Table 1 beside ours, instead of one cluster.")
@click.option("--sensitivity", is_flag=True, help="What a fourth more or less of each parameter does to the table.")
@AS_JSON
@options_of(FailureModel)
def goodput(*, table: bool, sensitivity: bool, as_json: bool, **given: Any) -> int:
    """Goodput and uptime of a cluster whose chips fail.

    Goodput: share of the allocated time in which chips make useful steps. Uptime: share of the time in which anybody
    does. Three systems beside each other: data-parallel without elasticity, elastic data-parallel, and decoupled
    learners.
    """
    from ..simulator import goodput as cluster
    from ..simulator import tables

    if table or sensitivity:
        refuse(("chips", "learners"), "is for one cluster: --table and --sensitivity have those of the paper's table")
        if table and sensitivity:
            raise SettingError("--table and --sensitivity are two answers: give one of them")
    plan, model = made_of(GoodputPlan, given), made_of(FailureModel, given)
    steps, seed = plan.steps(model), plan.seed
    if sensitivity:
        rows = cluster.sensitivity(model, steps=steps, seed=seed, said=lambda what: echo(what, err=True))
        echo(json_line({"rows": rows}) if as_json else tables.sensitivity(rows))
    elif table:
        cells = cluster.table_1(model, steps=steps, seed=seed)
        worst = cluster.worst_difference(cells)
        echo(json_line({"cells": cells, "worst": worst}) if as_json else tables.table_1(cells, worst))
    else:
        outcomes = cluster.beside_each_other(plan, model)
        figures: dict[str, Any] = {
            system: {"goodput": round(o.goodput, 4), "uptime": round(o.uptime, 4)} for system, o in outcomes.items()
        }
        hours = round(steps * model.step_seconds / 3600, 1)
        failed = cluster.outages(model, plan) if model.site_failures_a_year else None
        told = {"chips": plan.chips, "learners": plan.learners, "seed": seed, "hours": hours, "site_outages": failed}
        echo(json_line(told | figures) if as_json else tables.outcomes(plan, outcomes, hours, failed))
    return 0


@simulate.command()
@options_of(LinkModel)
@click.option("--table", is_flag=True, help="The paper's Table 13 beside the closed forms, instead of one link.")
@AS_JSON
def bandwidth(*, table: bool, as_json: bool, **given: Any) -> int:
    """Gbit/s between sites, so that chips compute a given share of the time.

    `published` are closed forms that reproduce the paper's Table 13. `this system` is what our own messages weigh,
    broadcast included, in each direction of a learner's link, and at the syncer and the broker.
    """
    from ..simulator import bandwidth as network
    from ..simulator import tables

    if table:
        refuse((f.name for f in fields(LinkModel)), "is for one link: --table has the paper's settings")
        cells = network.table_13()
        echo(json_line({"cells": cells}) if as_json else tables.table_13(cells))
        return 0
    link = made_of(LinkModel, given)
    bits = network.BITS[link.codec_up]
    published: dict[str, float] = {method: network.published(link, method, bits) for method in network.METHODS}
    ours = network.this_system(link)
    echo(json_line({"published": published, "this_system": ours}) if as_json else tables.link(link, published, ours))
    return 0


@simulate.command("run")
@options_of(ClusterPlan)
@TEXT
@click.option("--tape", type=click.Path(path_type=Path), help="Folder into which an event tape is written, for replay.")
@AS_JSON
@options_of(RunSettings)
@options_of(TaskSettings)
@options_of(FailureModel, leave_out=("step_seconds",))
def run_cluster(*, data: Path | None, tape: Path | None, as_json: bool, **given: Any) -> int:
    """A whole run in virtual time, in one process.

    Learners that are unequal, far away or die train a real model (or, with --cost-only, none), around the same round
    machine, merge and adoption as `diloco up`. The same seed gives the same bits.
    """
    from ..simulator import tables, virtual_run

    plan = made_of(ClusterPlan, given)
    if plan.cost_only:
        uses = {"batch_sequences", "sequence_length"}
        unused = [f.name for f in fields(TaskSettings) if f.name not in uses]
        refuse(("data", *unused), "is for a model that is trained, which --cost-only has not")
    failures = made_of(FailureModel, {**given, "step_seconds": FailureModel.step_seconds})
    settings, task = made_of(RunSettings, given), made_of(TaskSettings, given)
    told = virtual_run.run(plan, settings, task, failures, data=data, tape=tape, said=_progress(settings.steps))
    echo(json_line(told) if as_json else tables.run(told))
    return 0


@click.command(cls=EnvironmentCommand)
@click.argument("tape", type=click.Path(path_type=Path))
@TEXT
@click.option("--decisions", is_flag=True, help="Only take the decisions again: nothing is trained.")
@AS_JSON
def replay(tape: Path, data: Path | None, *, decisions: bool, as_json: bool) -> int:
    """Do a taped run again, to the same bits.

    TAPE is the folder of a run that was made with --tape, or of its tape. Everything is trained anew at the steps that
    the tape tells, and compared with it, version by version. Exit code 2 at the first difference.
    """
    from ..common.journal import read_journal
    from ..simulator import replay as again
    from ..simulator import tables

    read = read_journal(tape)
    merges = sum(row["what"] == "merged" for row in read.syncer.rows)
    verdict = again.replay_decisions(read) if decisions else again.replay(read, data, _progress(merges, "merge"))
    echo(json_line(vars(verdict)) if as_json else tables.verdict(verdict))
    return 0


def _progress(total: int, unit: str = "step") -> Callable[[int], None]:
    """Says on standard error, once a second, how far it is."""
    said_at = time.monotonic()

    def say(done: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= 1:
            said_at = time.monotonic()
            echo(f"{unit} {done} of {total}", err=True)

    return say


@click.command(cls=EnvironmentCommand)
@click.option("--suite", default="quick", show_default=True, help="Which comparison (see --list), or full: all.")
@click.option("--list", is_flag=True, help="Name the suites, and what each asks.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("compare"), show_default=True, help="Folder for results."
)
@click.option(
    "--seeds", type=int, default=0, show_default=True, help="Seeds of each cell. 0 = as many as the suite wants."
)
@click.option(
    "--jobs",
    type=int,
    default=0,
    show_default=True,
    help="Trainings at the same time, a core each. 0 = as many as cores.",
)
@click.option(
    "--minutes", type=float, default=0.0, show_default=True, help="Begin nothing new after so many. 0 = no limit."
)
@TEXT
@AS_JSON
def compare(*, out: Path, seeds: int, jobs: int, minutes: float, data: Path | None, as_json: bool, **given: Any) -> int:
    """Train one model by several methods.

    Each cell of a suite is trained with every seed; results are kept one by one in OUT, so that the same command goes
    on where it was broken off. It ends with OUT/SUITE.csv, a table (SUITE.md) and a picture (SUITE.png). The suite
    `full` is all of them, one after the other.
    """
    from ..experiments import runner
    from ..experiments.analysis import differences, markdown
    from ..experiments.catalogue import SUITES, suite

    if given["list"]:
        suites = [suite(name) for name in SUITES]
        if as_json:
            listed = [{"suite": each.name, "asks": each.asks, "cells": len(each.cells), "seeds": each.seeds,
                       "core_hours": round(each.core_hours, 3)} for each in suites]  # fmt: skip
            echo(json_line({"suites": listed}))
            return 0
        for each in suites:
            size = f"{len(each.cells)} cells, {each.seeds} seeds, about {each.core_hours:.1g} core-hours"
            echo(f"{each.name}: {each.asks} ({size})")
        return 0
    for option, value, most in (("--seeds", seeds, 1000), ("--jobs", jobs, 1000), ("--minutes", minutes, 1e6)):
        if not 0 <= value <= most:
            raise SettingError(f"{option} must lie between 0 and {most:g}, not {value:g}")
    ends_at, told, failed = time.monotonic() + 60 * (minutes or math.inf), [], []
    for wanted in map(suite, SUITES if given["suite"] == "full" else [given["suite"]]):
        results, untrained = runner.run(
            wanted, out, data=data, seeds=seeds or wanted.seeds, jobs=jobs or os.cpu_count() or 1,
            minutes=(ends_at - time.monotonic()) / 60, said=lambda sentence: echo(sentence, err=True),
        )  # fmt: skip
        failed += untrained
        if any(results.missing(seeds or wanted.seeds)):
            echo(f"{wanted.name}: {results.left(seeds or wanted.seeds)}; the same command goes on", err=True)
        if not results.rows:
            continue
        paths = runner.write(results, out)
        found = [each.to_json() for each in differences(wanted, results.rows)]
        told.append({"suite": wanted.name, "rows": results.rows, "differences": found})
        if not as_json:
            echo(markdown(wanted, results.rows))
            echo("in " + ", ".join(map(str, paths)))
    if as_json:
        echo(json_line({"suites": told} if given["suite"] == "full" else told[0] if told else {}))
    if failed:
        raise DilocoError(f"{len(failed)} could not be trained, the first is {failed[0]}; the rest is kept in {out}")
    return 0
