"""Options from environment variables: every option of every command can be set by DILOCO_ and its field's name.

The command line takes precedence over the variable, and that over the default. Empty variables, which Compose passes
on, are ignored.
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

_SERVICES = ("BROKER", "SYNCER", "LEARNER", "EVALUATOR", "REDIS")
COMPOSE_ONLY = frozenset(
    f"DILOCO_{name}"
    for name in (
        *("PORTS", "RESULTS", "TEXT", "KEY_FILE", "GPUS", "TORCH_INDEX"),
        *(f"{part}_{limit}" for part in _SERVICES for limit in ("CPUS", "MEMORY")),
    )
)
"""Variables of the compose files that are not options of a command."""


class EnvironmentCommand(click.Command):
    """A command with options from the environment. Its errors name the variable if an invalid value came from one."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        for option in _options(self):
            option.envvar = variable(str(option.name))  # click ignores an empty one
        self.epilog = self.epilog or _epilog(_options(self))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            name = getattr(error.param, "name", None)
            if name and ctx.get_parameter_source(name) is ParameterSource.ENVIRONMENT:
                error.param_hint = variable(name)
            raise

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DilocoError as error:
            if error.args and isinstance(error.args[0], str):
                error.args = (_name_variables(ctx, error.args[0]), *error.args[1:])
            raise


class EnvironmentGroup(EnvironmentCommand, click.Group):
    """A group of such commands and groups."""

    command_class = EnvironmentCommand
    group_class = type


def _options(command: click.Command) -> list[click.Option]:
    """The options for users, without hidden ones and --version."""
    return [
        option
        for option in command.params
        if isinstance(option, click.Option) and option.expose_value and not option.hidden
    ]


def _epilog(options: list[click.Option]) -> str | None:
    """The help's last paragraph: an example of a variable, and the options whose variable has another name."""
    if not options:
        return None
    irregular: list[str] = []
    regular: list[str] = []
    for option in options:
        by_rule = variable(option.opts[-1].removeprefix("--").replace("-", "_"))
        (regular if by_rule == option.envvar else irregular).append(f"{option.opts[-1]} as {option.envvar}")
    rule = "Each option can also be set by an environment variable"
    return f"{rule}: {', '.join([*regular[:1], *irregular])}."


def from_environment(ctx: click.Context) -> list[str]:
    """The fields of this command that were set by variables."""
    return [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.ENVIRONMENT]


def _name_variables(ctx: click.Context, sentence: str) -> str:
    """Replace each option that came from a variable by the variable's name. If the sentence has only its value, append
    the variable.
    """
    for option in _options(ctx.command):
        name = str(option.name)
        if ctx.get_parameter_source(name) is not ParameterSource.ENVIRONMENT:
            continue
        flags = "|".join(map(re.escape, (*option.opts, *option.secondary_opts)))
        sentence, replaced = re.subn(rf"(?<![\w-])(?:{flags})(?![\w-])", variable(name), sentence)
        value = ctx.params.get(name)
        if (
            not replaced
            and isinstance(value, str | Path)
            and name != "run"  # a run's name may be a word of the sentence by chance
            and re.search(rf"(?<!\w){re.escape(printable(str(value)))}(?!\w)", sentence)
        ):
            sentence = f"{sentence.removesuffix('.')} (from {variable(name)})"
    return sentence


def unknown_variables(group: click.Group, environment: Mapping[str, str]) -> str:
    """A sentence about variables that no command reads, with suggestions; '' if there are none."""
    known = COMPOSE_ONLY | {variable(field) for field in _fields(group)}
    unknown = []
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known:
            similar = difflib.get_close_matches(name, known, n=1)
            unknown.append(f"{name} (did you mean {similar[0]}?)" if similar else name)
    return f"unknown variables: {', '.join(unknown)}; `diloco COMMAND --help` lists the options" if unknown else ""


def _fields(command: click.Command) -> set[str]:
    found = {str(option.name) for option in _options(command)}
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            found |= _fields(inner)
    return found


def effective_settings(config: Any, **more: Any) -> dict[str, Any]:
    """All settings of `config`, nested ones included, as one flat map for a log event. Passwords are removed."""
    rows: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        rows |= effective_settings(value) if is_dataclass(value) else {f.name: value}
    rows |= more
    if rows.get("redis"):
        from ..common.redis_client import redact_url

        rows["redis"] = redact_url(rows["redis"])
    return rows
