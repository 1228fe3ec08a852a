"""Command-line options derived from settings dataclasses: each field's name, type, default and docstring."""

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
Settings = TypeVar("Settings")


def options_of(
    settings: type[Any], *, leave_out: tuple[str, ...] = (), defaults: Mapping[str, str] | None = None
) -> Callable[[Command], Command]:
    """Decorator that adds one option to a click command for each field of the dataclass `settings`.

    `defaults`: how the help describes defaults that are computed later.
    """

    def decorate(command: Command) -> Command:
        for f in reversed([f for f in fields(settings) if f.name not in leave_out]):
            command = _option(settings, f.name, (defaults or {}).get(f.name, f.default not in ("", None)))(command)
        return command

    return decorate


def from_options(settings: type[Settings], options: Mapping[str, Any]) -> Settings:
    """An instance of `settings` from the options of a command; SettingError if a value is invalid."""
    return settings(**{f.name: options[f.name] for f in fields(settings) if f.name in options})  # type: ignore[arg-type]


def explicit_fields(context: click.Context) -> set[str]:
    """The fields that were given on the command line or in the environment, and not left at their defaults."""
    default = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)
    return {name for name in context.params if context.get_parameter_source(name) not in default}


def reject_options(names: Iterable[str], reason: str) -> None:
    """SettingError if the command line has one of these options, which would have no effect. Variables are accepted:
    they may be meant for another command.
    """
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise SettingError(f"{flag(name)} {reason}")


def _option(settings: type[Any], name: str, shown_default: str | bool) -> Callable[[Command], Command]:
    (field,) = (f for f in fields(settings) if f.name == name)
    hint = get_type_hints(settings)[name]
    required = field.default is MISSING
    option = flag(name)
    if hint is bool and not field.default:
        return click.option(option, name, is_flag=True, help=_help(settings, name))
    if hint is bool:
        option = f"{option}/--no-{option.removeprefix('--')}"
    return click.option(
        option,
        name,
        type=_click_type(hint),
        required=required,
        default=None if required else field.default,
        show_default=shown_default,
        help=_help(settings, name),
    )


def _click_type(hint: Any) -> Any:
    if get_origin(hint) is Literal:
        return click.Choice(get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    return click.Path(path_type=Path) if hint is Path else hint


def _help(settings: type[Any], name: str) -> str:
    return " ".join(_field_docs(inspect.getfile(settings))[settings.__name__].get(name, "").replace("`", "").split())


@cache
def _field_docs(file: str) -> dict[str, dict[str, str]]:
    """Class -> field -> docstring below the field, read from the source, since Python does not keep it."""
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
