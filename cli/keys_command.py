"""`diloco keys`: who may take part. A key file goes to its holder; the broker keeps what tells that it is his."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..common.errors import SettingError
from ..common.output import deliver, echo
from .environment import EnvironmentGroup

OUTPUT = Path("-")
DIRECTORY = click.option(
    "--dir",
    "keys",  # so that its variable is the broker's
    type=click.Path(path_type=Path),
    default=Path("keys"),
    show_default=True,
    help="The folder that the broker gets as --keys.",
)
ROLE = click.option(
    "--role",
    type=click.Choice(["syncer", "learner", "observer"]),
    required=True,
    help="What the key is for. An observer fetches and listens, and has no vote.",
)
RUN = click.option("--run", required=True, help="The run that it is for, and no other.")
NAME = click.option("--name", required=True, help="Its holder may be called NAME or NAME-*, so that replicas share it.")


@click.group(cls=EnvironmentGroup, invoke_without_command=True)
@click.pass_context
def keys(context: click.Context) -> None:
    """Make, list and take back the keys of those who may take part."""
    if context.invoked_subcommand is None:
        echo(context.get_help())


@keys.command()
@ROLE
@RUN
@NAME
@DIRECTORY
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The key file to write, or - for standard output. Without it: RUN.ROLE.NAME.key, here.",
)
def new(keys: Path, out: Path | None, **about: Any) -> int:
    """Make a key for one holder.

    Who has the key file is its holder: bring it there in secret. A broker that runs takes it within a second or two.
    """
    from ..common.auth_keys import new_key, revoke

    place = out or Path("{run}.{role}.{name}.key".format(**about))
    if place != OUTPUT and place.exists():
        raise SettingError(f"{place} exists already and is left as it is; choose another --out, or remove it")
    key = new_key(keys, **about)
    try:
        if place == OUTPUT:
            _print(key.text())
        else:
            key.save(place)
    except BaseException:
        revoke(keys, **about)
        raise
    if place != OUTPUT:
        echo(f"{place}: the key of {key}; a holder of this file may act as {key.name} and {key.name}-*")
    return 0


def _print(text: str) -> None:
    """SettingError if standard output does not take it all."""
    try:
        deliver(text)
    except OSError as cause:
        raise SettingError(f"standard output does not take the key: {cause.strerror}; none was made") from cause


@keys.command("list")
@DIRECTORY
def list_keys(keys: Path) -> int:
    """Show whose keys the broker takes."""
    from ..common.auth_keys import KeyRing

    for grant in KeyRing(keys).grants:
        echo(f"{grant.run:<20} {grant.role:<10} {grant.name}".rstrip())
    return 0


@keys.command()
@ROLE
@RUN
@NAME
@DIRECTORY
def revoke(keys: Path, **about: Any) -> int:
    """Take a key back.

    A broker that runs cuts its holder off within a second or two, wherever the key file lies.
    """
    from ..common.auth_keys import revoke as take_back

    echo(f"the key of {take_back(keys, **about)} is no longer taken")
    return 0


@keys.command()
@RUN
@click.option(
    "--dir",
    "folders",
    type=click.Path(path_type=Path),
    default=Path("keys"),
    show_default=True,
    help="The folder of these folders.",
)
def init(folders: Path, run: str) -> int:
    """Make all keys and passwords that compose.yaml needs.

    Each in a folder that is a volume of its own. What is there already stays as it is.
    """
    from ..compose.credentials import init as make_missing

    made = make_missing(folders, run)
    echo(f"keys for run {run}: {'made ' + ', '.join(made) if made else 'all are there'}")
    return 0
