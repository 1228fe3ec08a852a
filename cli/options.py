"""Command-line options made from the frozen settings: each field's name, type, default and docstring, written once."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from ..common.config import flag
from ..common.errors import SettingError

Command = TypeVar("Command", bound=Callable[..., Any])
Made = TypeVar("Made")


def options_of(
    settings: type[Any], *, leave_out: tuple[str, ...] = (), defaults: Mapping[str, str] | None = None
) -> Callable[[Command], Command]:
    """A decorator that gives a click command one option for each field of the dataclass `settings`.

    `defaults`: what the help says of a default that is worked out later.
    """

    def decorate(command: Command) -> Command:
        for f in reversed([f for f in fields(settings) if f.name not in leave_out]):
            command = _option(settings, f.name, (defaults or {}).get(f.name, f.default not in ("", None)))(command)
        return command

    return decorate


def made_of(settings: type[Made], given: Mapping[str, Any]) -> Made:
    """`settings` from what click collected; SettingError if a value is out of its range."""
    return settings(**{f.name: given[f.name] for f in fields(settings) if f.name in given})  # type: ignore[arg-type]


def explicit(context: click.Context) -> set[str]:
    """The fields that stood on the command line or in the environment, as opposed to those that have their default."""
    default = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)
    return {name for name in context.params if context.get_parameter_source(name) not in default}


def refuse(names: Iterable[str], why: str) -> None:
    """SettingError if one of these options of the running command stands on its command line: it would do nothing. In
    the environment it may stand for another command.
    """
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise SettingError(f"{flag(name)} {why}")


def _option(settings: type[Any], name: str, shown: str | bool) -> Callable[[Command], Command]:
    (spec,) = (f for f in fields(settings) if f.name == name)
    hint = get_type_hints(settings)[name]
    required = spec.default is MISSING
    spelling = flag(name)
    if hint is bool and not spec.default:
        return click.option(spelling, name, is_flag=True, help=_help(settings, name))
    if hint is bool:
        spelling = f"{spelling}/--no-{spelling.removeprefix('--')}"
    return click.option(
        spelling,
        name,
        type=_kind(hint),
        required=required,
        default=None if required else spec.default,
        show_default=shown,
        help=_help(settings, name),
    )


def _kind(hint: Any) -> Any:
    if get_origin(hint) is Literal:
        return click.Choice(get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    return click.Path(path_type=Path) if hint is Path else hint


def _help(settings: type[Any], name: str) -> str:
    return " ".join(_docs(inspect.getfile(settings))[settings.__name__].get(name, "").replace("`", "").split())


@cache
def _docs(file: str) -> dict[str, dict[str, str]]:
    """Class -> field -> the docstring under it. Python keeps no such docstrings, so they are read from the source."""
    docs: dict[str, dict[str, str]] = {}
    for cls in ast.parse(Path(file).read_text("utf-8")).body:
        if isinstance(cls, ast.ClassDef):
            pairs = zip(cls.body, cls.body[1:], strict=False)
            docs[cls.name] = {
                field.target.id: under.value.value
                for field, under in pairs
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(under, ast.Expr)
                and isinstance(under.value, ast.Constant)
                and isinstance(under.value.value, str)
            }
    return docs
