"""`diloco simulate`, `diloco replay` and `diloco compare`. Heavy modules are imported inside the commands."""

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
from .options import from_options, options_of, reject_options

_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
_DATA = click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Text file, or folder of text files. Without it: the source of Python's standard library.",
)


@click.group(cls=EnvironmentGroup)
def simulate() -> None:
    """Simulate a cluster or a network before paying for it.

    All times are virtual seconds. Example: diloco simulate goodput --chips 2400000 --learners 16
    """


@simulate.command()
@options_of(GoodputPlan)
@click.option(
    "--table", is_flag=True, help="Instead of one cluster: Table 1 of arXiv 2604.21428 beside this simulator's results."
)
@click.option(
    "--sensitivity",
    is_flag=True,
    help="Instead of one cluster: how that table changes if a parameter is 25 % higher or lower.",
)
@_AS_JSON
@options_of(FailureModel)
def goodput(*, table: bool, sensitivity: bool, as_json: bool, **options: Any) -> int:
    """Goodput and uptime of a cluster whose chips fail.

    Goodput is the share of allocated chip time spent on useful steps; uptime is the share of time in which at least one
    learner steps. Three systems are compared: data-parallel without elasticity, elastic data-parallel, and decoupled
    learners.

    Example: diloco simulate goodput --chips 1200000 --learners 8
    """
    from ..simulator import goodput as cluster
    from ..simulator import tables

    if table or sensitivity:
        reject_options(
            ("chips", "learners"), "is for one cluster: --table and --sensitivity use those of the published table"
        )
        if table and sensitivity:
            raise SettingError("--table and --sensitivity exclude each other: give only one of them")
    plan, model = from_options(GoodputPlan, options), from_options(FailureModel, options)
    steps, seed = plan.steps(model), plan.seed
    if sensitivity:
        rows = cluster.sensitivity(model, steps=steps, seed=seed, on_progress=lambda what: echo(what, err=True))
        echo(json_line({"rows": rows}) if as_json else tables.sensitivity(rows))
    elif table:
        cells = cluster.table_1(model, steps=steps, seed=seed)
        worst = cluster.largest_difference(cells)
        echo(json_line({"cells": cells, "worst": worst}) if as_json else tables.table_1(cells, worst))
    else:
        outcomes = cluster.compare_systems(plan, model)
        figures: dict[str, Any] = {
            system: {"goodput": round(o.goodput, 4), "uptime": round(o.uptime, 4)} for system, o in outcomes.items()
        }
        hours = round(steps * model.step_seconds / 3600, 1)
        failed = cluster.outages(model, plan) if model.site_failures_a_year else None
        result = {"chips": plan.chips, "learners": plan.learners, "seed": seed, "hours": hours, "site_outages": failed}
        echo(json_line(result | figures) if as_json else tables.outcomes(plan, outcomes, hours, failed))
    return 0


@simulate.command()
@options_of(LinkModel)
@click.option(
    "--table", is_flag=True, help="Instead of one link: Table 13 of arXiv 2604.21428 beside the closed forms."
)
@_AS_JSON
def bandwidth(*, table: bool, as_json: bool, **options: Any) -> int:
    """Bandwidth, in Gbit/s, that a given compute utilisation needs.

    The published figures are closed forms that reproduce Table 13 of arXiv 2604.21428. Those of this system follow from
    the size of its messages, broadcasts included: per direction of a learner's link, at the syncer and at the broker.

    Example: diloco simulate bandwidth --sites 8 --codec-up int4
    """
    from ..simulator import bandwidth as network
    from ..simulator import tables

    if table:
        reject_options((f.name for f in fields(LinkModel)), "is for one link: --table uses the published settings")
        cells = network.table_13()
        echo(json_line({"cells": cells}) if as_json else tables.table_13(cells))
        return 0
    link = from_options(LinkModel, options)
    bits = network.BITS[link.codec_up]
    published: dict[str, float] = {method: network.published(link, method, bits) for method in network.METHODS}
    ours = network.this_system(link)
    echo(json_line({"published": published, "this_system": ours}) if as_json else tables.link(link, published, ours))
    return 0


@simulate.command("run")
@options_of(ClusterPlan)
@_DATA
@click.option(
    "--tape", type=click.Path(path_type=Path), help="Folder for an event tape, for diloco replay. Without it: no tape."
)
@_AS_JSON
@options_of(RunSettings)
@options_of(TaskSettings)
@options_of(FailureModel, leave_out=("step_seconds",))
def run_cluster(*, data: Path | None, tape: Path | None, as_json: bool, **options: Any) -> int:
    """A whole run in virtual time, in one process.

    Learners of unequal speed, with failures and slow links, train a real model (or none, with --cost-only). Rounds,
    merges and adoption are those of `diloco up`. The same seed gives bit-identical results.

    Example: diloco simulate run --learners 8 --slowest 2 --steps 240
    """
    from ..simulator import tables, virtual_run

    plan = from_options(ClusterPlan, options)
    if plan.cost_only:
        used = {"batch_sequences", "sequence_length"}
        unused = [f.name for f in fields(TaskSettings) if f.name not in used]
        reject_options(("data", *unused), "has no effect with --cost-only, which trains no model")
    failures = from_options(FailureModel, {**options, "step_seconds": FailureModel.step_seconds})
    settings, task = from_options(RunSettings, options), from_options(TaskSettings, options)
    result = virtual_run.run(
        plan, settings, task, failures, data=data, tape=tape, on_progress=_progress(settings.steps)
    )
    echo(json_line(result) if as_json else tables.run(result))
    return 0


@click.command(cls=EnvironmentCommand)
@click.argument("tape", type=click.Path(path_type=Path))
@_DATA
@click.option("--decisions", is_flag=True, help="Repeat only the syncer's decisions, without training.")
@_AS_JSON
def replay(tape: Path, data: Path | None, *, decisions: bool, as_json: bool) -> int:
    """Repeat a recorded run bit by bit.

    TAPE is the folder of a run that was started with --tape, or the tape itself. The run is trained again as recorded,
    and each version is compared with the tape. Exit code 2 at the first difference.

    Example: diloco replay runs/my-run
    """
    from ..common.journal import read_journal
    from ..simulator import replay as again
    from ..simulator import tables

    journal = read_journal(tape)
    merges = sum(row["what"] == "merged" for row in journal.syncer.rows)
    verdict = again.replay_decisions(journal) if decisions else again.replay(journal, data, _progress(merges, "merge"))
    echo(json_line(vars(verdict)) if as_json else tables.verdict(verdict))
    return 0


def _progress(total: int, unit: str = "step") -> Callable[[int], None]:
    """Prints progress on standard error, once per second at most."""
    shown_at = time.monotonic()

    def show(done: int) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= 1:
            shown_at = time.monotonic()
            echo(f"{unit} {done} of {total}", err=True)

    return show


@click.command(cls=EnvironmentCommand)
@click.option(
    "--suite", default="quick", show_default=True, help="Name of a suite (see --list), or full for all of them."
)
@click.option("--list", is_flag=True, help="List the suites: question, size and core-hours of each.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("compare"), show_default=True, help="Folder for the results."
)
@click.option("--seeds", type=int, default=0, show_default=True, help="Number of seeds per cell. 0 = the suite's own.")
@click.option(
    "--jobs",
    type=int,
    default=0,
    show_default=True,
    help="Trainings in parallel, one core each. 0 = all cores.",
)
@click.option(
    "--minutes",
    type=float,
    default=0.0,
    show_default=True,
    help="Minutes after which no further training is started. 0 = no limit.",
)
@_DATA
@_AS_JSON
def compare(
    *, out: Path, seeds: int, jobs: int, minutes: float, data: Path | None, as_json: bool, **options: Any
) -> int:
    """Compare training methods on one model.

    Each cell of a suite is trained with every seed. Each result is stored in OUT at once, so that the same command
    continues after an interruption. At the end it writes OUT/SUITE.csv, a table (SUITE.md) and a plot (SUITE.png).

    Example: diloco compare --suite quick --jobs 4
    """
    from ..experiments import runner
    from ..experiments.analysis import differences, markdown
    from ..experiments.catalogue import SUITES, suite

    if options["list"]:
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
    ends_at, reports, failed = time.monotonic() + 60 * (minutes or math.inf), [], []
    for wanted in map(suite, SUITES if options["suite"] == "full" else [options["suite"]]):
        results, untrained = runner.run(
            wanted, out, data=data, seeds=seeds or wanted.seeds, jobs=jobs or os.cpu_count() or 1,
            minutes=(ends_at - time.monotonic()) / 60, report=lambda sentence: echo(sentence, err=True),
        )  # fmt: skip
        failed += untrained
        if any(results.missing(seeds or wanted.seeds)):
            echo(f"{wanted.name}: {results.remaining(seeds or wanted.seeds)}; the same command continues", err=True)
        if not results.rows:
            continue
        paths = runner.write(results, out)
        found = [each.to_json() for each in differences(wanted, results.rows)]
        reports.append({"suite": wanted.name, "rows": results.rows, "differences": found})
        if not as_json:
            echo(markdown(wanted, results.rows))
            echo("written: " + ", ".join(map(str, paths)))
    if as_json:
        echo(json_line({"suites": reports} if options["suite"] == "full" else reports[0] if reports else {}))
    if failed:
        raise DilocoError(f"{len(failed)} trainings failed, the first is {failed[0]}; the other results are in {out}")
    return 0
