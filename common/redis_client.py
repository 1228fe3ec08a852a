"""A connection to Redis or Valkey from one URL: parsed strictly, bounded in time, with errors a person can act on.

    redis://USER:PASSWORD@HOST:PORT/DATABASE      PASSWORD percent-encoded: / is %2F, @ is %40, # is %23, % is %25
    rediss://HOST:PORT/0?ssl_ca_certs=/path/ca.pem          TLS; without ssl_ca_certs the system's authorities count
    redis://USER@HOST:PORT/0?password_file=/run/secrets/redis     the password as it is, from a file
    unix:///path/redis.sock?db=3

No error and no log line shows a password: what quotes a URL quotes `redact_url` of it.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from .errors import DilocoError, PeerLost, SettingError

TIMEOUT_SECONDS = 1.0
"""For connecting, and again for each answer."""
SAVE_SECONDS = 30.0
"""For a store that is told to end: it writes all that it holds before."""
FAILURES = (redis.RedisError, OSError, ValueError)
"""All that a call may raise because of the store: ValueError is what a host name of 300 characters gives."""
CLUSTER = (
    redis.exceptions.AskError, redis.exceptions.ClusterCrossSlotError, redis.exceptions.ClusterDownError,
    redis.exceptions.MovedError, redis.exceptions.TryAgainError,
)  # fmt: skip
"""What only a cluster answers."""
_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_ALLOWED = ("db", "password_file", "ssl_cert_reqs", "ssl_check_hostname", *_FILES)


def redact_url(url: str) -> str:
    """`url` with *** for the password; of a malformed one rather too much is hidden than too little."""
    scheme, mark, rest = url.rpartition("://") if url.count("://") == 1 else url.partition("://")
    if not mark:
        scheme, rest = "", url
    login, at, place = rest.rpartition("@")
    if at:
        user = login.partition(":")[0] if ":" in login else ""
        place = f"{user}:***@{place}"
    return scheme + mark + re.sub(r"(?i)(password=)[^&]*", r"\1***", place)


def connect(url: str, answer_seconds: float = TIMEOUT_SECONDS, *, keep_connection: bool = False) -> Any:
    """A client (`redis.Redis`, texts decoded) that has not connected yet, tries once and waits TIMEOUT_SECONDS at most,
    for an answer `answer_seconds`.

    `keep_connection`: all commands go over one connection, the client's `connection`, which the first of them opens.

    SettingError if the URL is not one of the forms above, or a file that it names cannot be read.
    """
    options = _options(url)
    password: dict[str, str] = {}
    if "password_file" in options:
        path = options.pop("password_file")
        try:
            password["password"] = Path(path).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeError) as wrong:
            raise SettingError(f"the password file {path} of {redact_url(url)} cannot be read: {wrong}") from wrong
    for name in _FILES:
        if name in options and not Path(options[name]).exists():
            raise SettingError(f"{name} of {redact_url(url)} names {options[name]}, which does not exist")
    return redis.Redis.from_url(
        urlsplit(url)._replace(query=urlencode(options)).geturl(),
        socket_timeout=answer_seconds,
        socket_connect_timeout=TIMEOUT_SECONDS,
        retry=Retry(NoBackoff(), 0),
        decode_responses=True,
        encoding_errors="replace",
        protocol=2,
        single_connection_client=keep_connection,
        **password,
    )


def check_connection(url: str) -> None:
    """Once, before anything starts. SettingError if the URL, the password, the database or the certificate is wrong;
    PeerLost if nobody answers (which a syncer survives, since the registry comes back by itself).
    """
    client = connect(url)
    try:
        client.ping()
    except FAILURES as wrong:
        raise explain(url, wrong) from None
    finally:
        client.close()


def save_and_end(url: str) -> None:
    """Tell the store to write all that it holds to its disk, and to end. After it, it does so no more: a store that
    cannot save stays. SettingError, PeerLost or DilocoError say why it did not end.
    """
    client = connect(url, SAVE_SECONDS)
    try:
        client.ping()  # where nobody answers, SHUTDOWN would take the closed connection for its success
        client.shutdown(save=True)
    except FAILURES as wrong:
        raise explain(url, wrong) from None
    finally:
        client.close()


def explain(url: str, wrong: Exception) -> DilocoError:
    """The error of ours that says what `wrong` means at `url`, without its password."""
    place, said = redact_url(url), str(wrong)
    if isinstance(wrong, redis.AuthenticationError) or re.search(r"\bAUTH\b|NOAUTH|WRONGPASS", said):
        return SettingError(
            f"authentication failed at {place}: {said} Check user and password; "
            "in the URL the password must be percent-encoded, in ?password_file=PATH it stands as it is"
        )
    if is_forbidden(wrong):
        return SettingError(f"the user of {place} may not do this: {said}")
    if is_wrong_type(wrong):
        key = found[0] if (found := re.search(r"\bdd:[^\s)]+", said)) else "a key of the run"
        return DilocoError(f"in Redis at {place} {foreign_key(key)}")
    if isinstance(wrong, CLUSTER):
        return SettingError(
            f"Redis at {place} is a cluster, and all keys of a run must be at one server: give one that is none "
            "by --redis (cluster-enabled no), or leave --redis out"
        )
    if isinstance(wrong, redis.exceptions.ReadOnlyError):
        return SettingError(f"Redis at {place} is a replica, which takes no writes; give its primary's address")
    if "DB index" in said:
        return SettingError(f"the database number of {place} is not one of this server: {said}")
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return SettingError(
            f"the TLS certificate of {place} is not trusted: {said}; name its authority with ?ssl_ca_certs=/path/ca.pem"
        )
    if any(isinstance(cause, ssl.SSLError) for cause in _causes(wrong)):
        return SettingError(
            f"no TLS connection to {place}: {said}; a server without TLS is named redis://, not rediss://"
        )
    if isinstance(wrong, redis.ResponseError):
        return DilocoError(f"Redis at {place} refuses: {said[:300]}")
    if any(isinstance(cause, socket.gaierror) for cause in _causes(wrong)):
        return PeerLost(f"no Redis answers at {place}: host name {urlsplit(url).hostname} cannot be resolved")
    tls = " with TLS" if url.startswith("rediss:") else ""
    return PeerLost(f"no Redis answers at {place}: {said.rstrip('.')}; is it running{tls}?")


def is_wrong_type(wrong: object) -> bool:
    """A key holds another type than the command is for; in a pipeline the server's word stands behind the command."""
    return isinstance(wrong, redis.ResponseError) and "WRONGTYPE" in str(wrong)


def foreign_key(key: str) -> str:
    """What to do about a key of ours into which another program wrote."""
    return f"{key} is of another type than a run writes; delete it (redis-cli DEL {key}), and the run writes it anew"


def is_forbidden(wrong: Exception) -> bool:
    """The user lacks a right; for EXEC the server says so in other words than for all other commands."""
    return isinstance(wrong, redis.exceptions.NoPermissionError) or "NOPERM" in str(wrong)


def _causes(wrong: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came of."""
    while wrong is not None:
        yield wrong
        wrong = wrong.__cause__ or wrong.__context__


def _options(url: str) -> dict[str, str]:
    """The query of `url`, once everything in it is known to mean what its author thinks (redis-py lets much pass)."""
    place = redact_url(url)
    encode = "characters such as / @ # ? % in a password must be percent-encoded"
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
        port_is_fine = parts.port != 0
    except ValueError:
        # The cause is left out: it quotes the part of the URL that it could not read, which may be the password.
        raise SettingError(
            f"--redis {place} is not a URL: redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE]; {encode}"
        ) from None
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise SettingError(f"--redis {place} must begin with redis://, rediss:// (TLS) or unix:// (a socket's path)")
    if unknown := sorted(set(options) - set(_ALLOWED)):
        raise SettingError(f"--redis {place}: unknown {', '.join(unknown)}; known are {', '.join(_ALLOWED)}")
    database = options.get("db", "0")
    if parts.scheme != "unix":
        if not parts.hostname or not port_is_fine or parts.fragment:
            raise SettingError(f"--redis {place} names no host; {encode}")
        database = parts.path.removeprefix("/") or database
    if not re.fullmatch(r"\d{1,9}", database):
        raise SettingError(f"--redis {place}: the database must be a number, as in redis://HOST:6379/3; {encode}")
    return options
