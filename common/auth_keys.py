"""Authentication keys of a broker's clients. A client's key file holds a secret; the broker keeps the public half as a
grant.

    DIR/broker.key                   the broker's own key pair, mode 0600
    DIR/grants/RUN.ROLE.NAME.json    one grant for each key: run, role, name and public key; no secret

A key serves NAME and every NAME-*, so that replicas can share it. No error message quotes the content of a file.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args

import zmq

from .config import NAME_PATTERN, check_name
from .errors import SettingError

Role = Literal["syncer", "learner", "observer"]
ROLES: tuple[Role, ...] = get_args(Role)
FORMAT = 1
"""Version of the files, in each as `diloco_key`."""
FILE_BYTES = 4096
"""Upper bound of a key file's size."""
KEY_PATTERN = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""32 bytes in Z85."""


@dataclass(frozen=True, kw_only=True)
class Grant:
    """The broker's record of a key: its public half, run, role and name."""

    run: str
    role: Role
    name: str
    public: str
    """Z85."""

    def __str__(self) -> str:
        return f"{self.role} {self.name} of {self.run}"

    @property
    def file_name(self) -> str:
        return f"{self.run}.{self.role}.{self.name}.json"

    def may_be_called(self, name: str) -> bool:
        """Whether a holder of this key may use `name`: NAME or NAME-*."""
        return NAME_PATTERN.fullmatch(name) is not None and f"{name}-".startswith(f"{self.name}-")


@dataclass(frozen=True, kw_only=True)
class Key(Grant):
    """A client's key: its run, role, name and key pair, and the broker's public key, which authenticates the broker."""

    secret: str = field(repr=False)
    """Z85."""
    broker: str
    """Z85."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """The key in the file `path`; SettingError if it holds none."""
        return cls(**_read(path, "run", "role", "name", "public", "secret", "broker"))

    def save(self, path: Path) -> None:
        """Write the key file atomically, mode 0600; SettingError if `path` exists or cannot be written."""
        _write_new(path, self.text(), 0o600)

    def text(self) -> str:
        """The content of the key file. Secret."""
        return _text(asdict(self))

    @property
    def grant(self) -> Grant:
        return Grant(run=self.run, role=self.role, name=self.name, public=self.public)


class KeyRing:
    """The keys of a broker: its own pair, and the grants when they were last read."""

    def __init__(self, directory: Path) -> None:
        """SettingError if the directory has no broker key, or cannot be read."""
        self.directory = directory
        if not _pair_file(directory).exists():
            raise SettingError(
                f"the folder of keys {directory} has no broker.key; "
                f"make the first key with: diloco keys new --role syncer --run RUN --name syncer --dir {directory}"
            )
        pair = _read(_pair_file(directory), "public", "secret")
        self.public: str = pair["public"]
        self.secret: str = pair["secret"]
        self._grants: dict[str, Grant] = {}
        self._seen: dict[str, tuple[int, int, int]] = {}
        self._wrong: dict[str, SettingError] = {}
        """For each file without a valid grant when it was last read: the error."""
        try:
            self.reload()
        except OSError as cause:
            raise SettingError(f"the folder of keys {directory} cannot be read: {cause.strerror}") from cause

    def __repr__(self) -> str:
        return f"KeyRing({str(self.directory)!r}, {len(self._grants)} grants)"

    @property
    def grants(self) -> list[Grant]:
        """All grants, sorted by run, role and name."""
        return sorted(self._grants.values(), key=lambda grant: grant.file_name)

    def grant_of(self, public: str) -> Grant | None:
        """The grant of the key with this public half; None if it is unknown or revoked."""
        return self._grants.get(public)

    def changed(self) -> bool:
        """Whether `reload` is needed: the directory has changed since it was last read, or a file could not be read
        then. OSError if the directory cannot be read.
        """
        return self._look() != self._seen or any(map(_may_pass, self._wrong.values()))

    def reload(self) -> None:
        """Read the grants again. An invalid file is skipped. A file that cannot be read now and has not changed keeps
        its former grant. Each is warned about once.

        OSError, with the grants unchanged, if the directory cannot be read. A missing directory is empty.
        """
        seen = self._look()
        before = {grant.file_name: grant for grant in self._grants.values()}
        grants: dict[str, Grant] = {}
        wrong: dict[str, SettingError] = {}
        for name in sorted(seen):
            try:
                grant = self._read_grant(name, grants)
            except SettingError as error:
                wrong[name] = error
                if str(error) != str(self._wrong.get(name, "")):
                    _warn(str(error))
                if name not in before or self._seen.get(name) != seen[name] or not _may_pass(error):
                    continue
                grant = before[name]
            grants[grant.public] = grant
        self._grants, self._seen, self._wrong = grants, seen, wrong

    def _read_grant(self, name: str, others: Mapping[str, Grant]) -> Grant:
        path = self.directory / "grants" / name
        grant = Grant(**_read(path, "run", "role", "name", "public"))
        if grant.file_name != name or grant.public in others:
            raise SettingError(f"the content of the grant {path} does not match its file name; make another key")
        return grant

    def _look(self) -> dict[str, tuple[int, int, int]]:
        """Inode, modification time and size of each grant's file."""
        found = {}
        with suppress(FileNotFoundError), os.scandir(self.directory / "grants") as entries:
            for entry in entries:
                if entry.name.endswith(".json") and not entry.name.startswith("."):
                    with suppress(FileNotFoundError):  # revoked meanwhile
                        about = os.stat(entry.path)  # noqa: PTH116 an entry's own stat may be as old as the listing
                        found[entry.name] = (about.st_ino, about.st_mtime_ns, about.st_size)
        return found


def new_key(directory: Path, *, role: Role, run: str, name: str) -> Key:
    """Make a key for the broker of `directory`; the broker's own pair is made on first use.

    SettingError if another key permits the same name: two holders could impersonate each other. Learners and observers
    share one name space, since both send Hellos.
    """
    check_name("--run", run)
    check_name("--name", name)
    broker = _broker_public(directory)
    public, secret = (half.decode() for half in zmq.curve_keypair())
    key = Key(run=run, role=role, name=name, public=public, secret=secret, broker=broker)
    with _alone(directory):
        for held in KeyRing(directory).grants:
            if held.run == run and _share(held.role, role) and _overlap(held.name, name):
                raise SettingError(
                    f"{directory} has a key for {held} already, and a key for NAME permits NAME-* as well: "
                    f"choose another name than {name}, or revoke that key first"
                )
        _write_new(directory / "grants" / key.grant.file_name, _text(asdict(key.grant)), 0o644)
    return key


def _share(role: Role, other: Role) -> bool:
    """Whether two roles share a name space: a syncer sends no message under a learner's name."""
    return (role == "syncer") == (other == "syncer")


def _overlap(name: str, other: str) -> bool:
    return f"{name}-".startswith(f"{other}-") or f"{other}-".startswith(f"{name}-")


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Exclude other processes that make a key: two at the same moment would both find the name free."""
    try:
        file = _pair_file(directory).open("r+b")
    except OSError as cause:
        raise SettingError(f"no key can be made in {directory}: {cause.strerror}") from cause
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        yield


def revoke(directory: Path, *, role: Role, run: str, name: str) -> Grant:
    """Revoke a key: a running broker cuts it off within about a second. SettingError if there is no such key."""
    for grant in KeyRing(directory).grants:
        if (grant.run, grant.role, grant.name) == (run, role, name):
            path = directory / "grants" / grant.file_name
            try:
                path.unlink(missing_ok=True)
            except OSError as cause:
                raise SettingError(f"the grant {path} cannot be removed: {cause.strerror}") from cause
            return grant
    raise SettingError(f"{directory} has no key for {role} {name} of {run}; see: diloco keys list --dir {directory}")


def _broker_public(directory: Path) -> str:
    """The public half of the broker's pair, which is made if it does not exist."""
    path = _pair_file(directory)
    if not path.exists():
        public, secret = (half.decode() for half in zmq.curve_keypair())
        try:
            _write_new(path, _text({"public": public, "secret": secret}), 0o600)
        except SettingError:
            if not path.exists():  # else another `diloco keys new` made it
                raise
    return str(_read(path, "public", "secret")["public"])


def _pair_file(directory: Path) -> Path:
    return directory / "broker.key"


# --- files -----------------------------------------------------------------------------------------------------------
def _text(rows: Mapping[str, str]) -> str:
    return json.dumps({"diloco_key": FORMAT, **rows}, indent=1) + "\n"


def _warn(sentence: str) -> None:
    from .log import get_logger  # noqa: PLC0415 slow to import, and not needed by clients that only read a key

    get_logger("keys").warning("grant_unreadable", why=sentence)


def _may_pass(error: SettingError) -> bool:
    """Whether the file could not be read and may be readable later: its content is not known to be wrong."""
    return isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError)


def _read(path: Path, *names: str) -> dict[str, Any]:
    """The checked fields `names` of the file; SettingError, which does not quote the content, otherwise."""
    try:
        with path.open("rb") as file:
            octets = file.read(FILE_BYTES + 1)
    except OSError as cause:
        raise SettingError(f"the key file {path} cannot be read: {cause.strerror}") from cause
    wrong = SettingError(f"{path} is not a key file of this kind; make one with diloco keys new")
    try:
        rows = json.loads(octets) if len(octets) <= FILE_BYTES else None
    except (ValueError, RecursionError):
        raise wrong from None  # the cause would quote the content
    if not isinstance(rows, dict) or rows.pop("diloco_key", None) != FORMAT or rows.keys() != set(names):
        raise wrong
    for name, value in rows.items():
        fits = KEY_PATTERN if name in ("public", "secret", "broker") else NAME_PATTERN
        if not isinstance(value, str) or not fits.fullmatch(value) or (name == "role" and value not in ROLES):
            raise wrong
    return cast("dict[str, Any]", rows)


def _write_new(path: Path, text: str, mode: int) -> None:
    """Create a file atomically, and its folder if needed; SettingError if the name is taken."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        try:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.link(aside, path)  # unlike a rename, it never replaces a file
        finally:
            aside.unlink(missing_ok=True)
    except FileExistsError as cause:
        raise SettingError(f"{path} exists already and was not changed; choose another name or remove it") from cause
    except OSError as cause:
        raise SettingError(f"{path} cannot be written: {cause.strerror}") from cause


def held_key(file: Path | None, *roles: Role) -> Key | None:
    """The key in `file`; SettingError if it holds none, or none for one of `roles` (empty: any role)."""
    if file is None:
        return None
    key = Key.load(file)
    if key.role not in (roles or ROLES):
        raise SettingError(
            f"the key {file} is for {key.role}s and cannot be used here; give one that was made with "
            f"diloco keys new --role {roles[0]} --run {key.run}"
        )
    return key


def run_of(key: Key | None, run: str, file: Path | None) -> str:
    """The key's run, or `run` without a key; SettingError if `run` is given and the key is for another run."""
    if key is None:
        return run
    if run not in ("", key.run):
        raise SettingError(f"the key {file} is for the run {key.run}, not for --run {run}; leave --run out")
    return key.run


def check_called(key: Key | None, name: str, file: Path | None) -> str:
    """`name` itself if the key permits it; SettingError otherwise."""
    if key is not None and not key.may_be_called(name):
        raise SettingError(
            f"the key {file} permits only the names {key.name} and {key.name}-*, not --name {name}; "
            "choose such a name, or leave --name out"
        )
    return name
