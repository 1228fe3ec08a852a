"""`diloco keys`: creates, lists and revokes the keys of a broker's clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..common.errors import SettingError
from ..common.output import deliver, echo
from .environment import EnvironmentGroup

_STDOUT = Path("-")
_DIRECTORY = click.option(
    "--dir",
    "keys",  # so that its environment variable is the one of `diloco broker --keys`
    type=click.Path(path_type=Path),
    default=Path("keys"),
    show_default=True,
    help="The broker's key folder, its --keys.",
)
_ROLE = click.option(
    "--role",
    type=click.Choice(["syncer", "learner", "observer"]),
    required=True,
    help="Role of the client. An observer, such as the evaluator, reads the model but sends no deltas.",
)
_RUN = click.option("--run", required=True, help="The only run for which the key is valid.")
_NAME = click.option(
    "--name", required=True, help="Allowed client name: NAME, or NAME-* for several clients with one key."
)


@click.group(cls=EnvironmentGroup, invoke_without_command=True)
@click.pass_context
def keys(context: click.Context) -> None:
    """Create, list and revoke client keys for a broker.

    Example: diloco keys new --role learner --run my-run --name alice
    """
    if context.invoked_subcommand is None:
        echo(context.get_help())


@keys.command()
@_ROLE
@_RUN
@_NAME
@_DIRECTORY
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Key file to write, or - for standard output. Without it: RUN.ROLE.NAME.key in the working directory.",
)
def new(keys: Path, out: Path | None, **grant: Any) -> int:
    """Create a key for a client.

    Any client that has the key file is authenticated by it: transfer it over a secure channel. A running broker accepts
    it within about two seconds.

    Example: diloco keys new --role learner --run my-run --name alice
    """
    from ..common.auth_keys import new_key, revoke

    path = out or Path("{run}.{role}.{name}.key".format(**grant))
    if path != _STDOUT and path.exists():
        raise SettingError(f"{path} already exists and is not changed; choose another --out, or remove the file")
    key = new_key(keys, **grant)
    try:
        if path == _STDOUT:
            _print(key.text())
        else:
            key.save(path)
    except BaseException:
        revoke(keys, **grant)
        raise
    if path != _STDOUT:
        echo(f"{path}: the key of {key}; clients with this file may be named {key.name} or {key.name}-*")
    return 0


def _print(text: str) -> None:
    """SettingError if it cannot be written completely."""
    try:
        deliver(text)
    except OSError as cause:
        raise SettingError(
            f"the key could not be written to standard output: {cause.strerror}; no key was created"
        ) from cause


@keys.command("list")
@_DIRECTORY
def list_keys(keys: Path) -> int:
    """List the keys that the broker accepts: run, role and name."""
    from ..common.auth_keys import KeyRing

    for grant in KeyRing(keys).grants:
        echo(f"{grant.run:<20} {grant.role:<10} {grant.name}".rstrip())
    return 0


@keys.command()
@_ROLE
@_RUN
@_NAME
@_DIRECTORY
def revoke(keys: Path, **grant: Any) -> int:
    """Revoke a key.

    A running broker disconnects its clients within about two seconds. The key file itself is not needed.

    Example: diloco keys revoke --role learner --run my-run --name alice
    """
    from ..common.auth_keys import revoke as revoke_key

    echo(f"the key of {revoke_key(keys, **grant)} is revoked")
    return 0


@keys.command()
@_RUN
@click.option(
    "--dir",
    "folders",
    type=click.Path(path_type=Path),
    default=Path("keys"),
    show_default=True,
    help="Parent folder of the created folders.",
)
def init(folders: Path, run: str) -> int:
    """Create all keys and passwords that compose.yaml needs.

    Each role gets a folder, which is a separate volume. Existing keys and passwords are kept.
    """
    from ..compose.container_credentials import init as create_missing

    created = create_missing(folders, run)
    echo(f"keys for run {run}: {'created ' + ', '.join(created) if created else 'all exist already'}")
    return 0
