"""`diloco simulate ...`: ask before you pay. Options come from the settings; what is heavy is loaded inside."""

from __future__ import annotations

import json
from typing import Any

import click

from ..simulator.settings import FailureModel, GoodputPlan, Link
from .environment import Group
from .options import made_of, options_of

AS_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")


@click.group(cls=Group)
def simulate() -> None:
    """Ask what a cluster would do, before you pay for it. Nothing is trained; seconds are virtual."""


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
    from ..simulator import show

    plan, model = made_of(GoodputPlan, given), made_of(FailureModel, given)
    steps, seed = plan.simulated_steps, plan.seed
    if sensitivity:
        rows = cluster.sensitivity(model, steps=steps, seed=seed)
        click.echo(json.dumps({"rows": rows}) if as_json else show.sensitivity(rows))
    elif table:
        cells = cluster.table_1(model, steps=steps, seed=seed)
        worst = cluster.worst_difference(cells)
        click.echo(json.dumps({"cells": cells, "worst": worst}) if as_json else show.table_1(cells, worst))
    else:
        outcomes = cluster.beside_each_other(plan, model)
        figures: dict[str, Any] = {system: {"goodput": o.goodput, "uptime": o.uptime} for system, o in outcomes.items()}
        told = {"chips": plan.chips, "learners": plan.learners, **figures}
        click.echo(json.dumps(told) if as_json else show.outcomes(plan, outcomes))
    return 0


@simulate.command()
@options_of(Link)
@click.option("--table", is_flag=True, help="The paper's Table 13 beside the closed forms, instead of one link.")
@AS_JSON
def bandwidth(*, table: bool, as_json: bool, **given: Any) -> int:
    """Gbit/s between sites, so that chips compute a given share of the time.

    `published` are closed forms that reproduce the paper's Table 13. `this system` is what our own messages weigh,
    broadcast included, in each direction of a learner's link, and at the syncer and the broker.
    """
    from ..simulator import bandwidth as network
    from ..simulator import show

    if table:
        cells = network.table_13()
        click.echo(json.dumps({"cells": cells}) if as_json else show.table_13(cells))
        return 0
    link = made_of(Link, given)
    bits = network.BITS[link.codec_up]
    published: dict[str, float] = {method: network.published(link, method, bits) for method in network.METHODS}
    ours = network.this_system(link)
    click.echo(
        json.dumps({"published": published, "this_system": ours}) if as_json else show.link(link, published, ours)
    )
    return 0
