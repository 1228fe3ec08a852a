"""Options from the environment: each option of each command may stand in DILOCO_ and its field's name in capitals.

What is given on the command line counts first, then the variable, then the default. A variable that is empty is as if
it were not there: Compose passes empty ones on.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..common.environment import PREFIX, variable
from ..common.errors import DilocoError
from ..common.printable import printable

PARTS = ("BROKER", "SYNCER", "LEARNER", "EVALUATOR", "REDIS")
COMPOSE_ONLY = frozenset(
    f"DILOCO_{name}"
    for name in (
        *("PORTS", "RESULTS", "TEXT", "KEY_FILE", "GPUS", "TORCH_INDEX"),
        *(f"{part}_{limit}" for part in PARTS for limit in ("CPUS", "MEMORY")),
    )
)
"""Variables that the compose files read themselves; no command has an option of that name."""


class EnvironmentCommand(click.Command):
    """A command whose errors name the variable where a wrong value came from one."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for option in _options(self):
            option.envvar = variable(str(option.name))  # click takes an empty one for none
        self.epilog = self.epilog or _epilog(_options(self))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as wrong:
            name = getattr(wrong.param, "name", None)
            if name and ctx.get_parameter_source(name) is ParameterSource.ENVIRONMENT:
                wrong.param_hint = variable(name)
            raise

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DilocoError as wrong:
            if wrong.args and isinstance(wrong.args[0], str):
                wrong.args = (_named(ctx, wrong.args[0]), *wrong.args[1:])
            raise


class EnvironmentGroup(EnvironmentCommand, click.Group):
    """A group of such commands, and of such groups."""

    command_class = EnvironmentCommand
    group_class = type


def _options(command: click.Command) -> list[click.Option]:
    """Those that people may set: neither what is hidden nor --version."""
    return [
        option
        for option in command.params
        if isinstance(option, click.Option) and option.expose_value and not option.hidden
    ]


def _epilog(options: list[click.Option]) -> str | None:
    """How the help tells of the variables: the rule once, and the options whose variable it does not give."""
    if not options:
        return None
    odd: list[str] = []
    even: list[str] = []
    for option in options:
        by_rule = variable(option.opts[-1].removeprefix("--").replace("-", "_"))
        (even if by_rule == option.envvar else odd).append(f"{option.opts[-1]} as {option.envvar}")
    rule = "Each option may also come from the environment"
    return f"{rule}: {', '.join([*even[:1], *odd])}."


def from_environment(ctx: click.Context) -> list[str]:
    """The fields of this command that variables gave."""
    return [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.ENVIRONMENT]


def _named(ctx: click.Context, sentence: str) -> str:
    """`sentence` with the variable's name for each option that came from one; where a bad value stands without its
    option, the variable is added.
    """
    for option in _options(ctx.command):
        name = str(option.name)
        if ctx.get_parameter_source(name) is not ParameterSource.ENVIRONMENT:
            continue
        flags = "|".join(map(re.escape, (*option.opts, *option.secondary_opts)))
        sentence, times = re.subn(rf"(?<![\w-])(?:{flags})(?![\w-])", variable(name), sentence)
        value = ctx.params.get(name)
        if (
            not times
            and isinstance(value, str | Path)
            and name != "run"  # a run's name is a word that may stand there by chance
            and re.search(rf"(?<!\w){re.escape(printable(str(value)))}(?!\w)", sentence)
        ):
            sentence = f"{sentence.removesuffix('.')} (from {variable(name)})"
    return sentence


def strangers(group: click.Group, environment: Mapping[str, str]) -> str:
    """One sentence about variables that no command reads, with those that were likely meant; '' if there are none."""
    known = COMPOSE_ONLY | {variable(field) for field in _fields(group)}
    told = []
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known:
            meant = difflib.get_close_matches(name, known, n=1)
            told.append(f"{name} (did you mean {meant[0]}?)" if meant else name)
    return f"no option is given by {', '.join(told)}; `diloco COMMAND --help` names the options" if told else ""


def _fields(command: click.Command) -> set[str]:
    found = {str(option.name) for option in _options(command)}
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            found |= _fields(inner)
    return found


def in_force(config: Any, **more: Any) -> dict[str, Any]:
    """All settings of `config` and those inside it, flat, for one event. Of a URL everything but its password."""
    rows: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        rows |= in_force(value) if is_dataclass(value) else {f.name: value}
    rows |= more
    if rows.get("redis"):
        from ..common.redis_client import redact_url

        rows["redis"] = redact_url(rows["redis"])
    return rows
