"""Redis client: a connection to Redis or Valkey from a strictly parsed URL, with timeouts and actionable errors.

    redis://USER:PASSWORD@HOST:PORT/DATABASE      PASSWORD percent-encoded: / is %2F, @ is %40, # is %23, % is %25
    rediss://HOST:PORT/0?ssl_ca_certs=/path/ca.pem          TLS; without ssl_ca_certs the system's authorities are used
    redis://USER@HOST:PORT/0?password_file=/run/secrets/redis     the password from a file, not encoded
    unix:///path/redis.sock?db=3

No error and no log line shows a password: they quote `redact_url` of a URL.
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
"""For connecting, and for each answer."""
SAVE_SECONDS = 30.0
"""For a Redis that is shut down: it saves all its data first."""
FAILURES = (redis.RedisError, OSError, ValueError)
"""All errors that a call may raise because of Redis (ValueError: for a host name of 300 characters)."""
CLUSTER = (
    redis.exceptions.AskError, redis.exceptions.ClusterCrossSlotError, redis.exceptions.ClusterDownError,
    redis.exceptions.MovedError, redis.exceptions.TryAgainError,
)  # fmt: skip
"""Errors that only a cluster returns."""
_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_ALLOWED = ("db", "password_file", "ssl_cert_reqs", "ssl_check_hostname", *_FILES)


def redact_url(url: str) -> str:
    """`url` with *** for the password; of a malformed URL, too much is hidden rather than too little."""
    scheme, mark, rest = url.rpartition("://") if url.count("://") == 1 else url.partition("://")
    if not mark:
        scheme, rest = "", url
    login, at, place = rest.rpartition("@")
    if at:
        user = login.partition(":")[0] if ":" in login else ""
        place = f"{user}:***@{place}"
    return scheme + mark + re.sub(r"(?i)(password=)[^&]*", r"\1***", place)


def connect(url: str, answer_seconds: float = TIMEOUT_SECONDS, *, keep_connection: bool = False) -> Any:
    """A client (`redis.Redis`, decoding text) that is not connected yet. It connects without retries, within
    TIMEOUT_SECONDS, and waits `answer_seconds` for each answer.

    `keep_connection`: all commands use one connection, the client's `connection`, opened by the first of them.

    SettingError if the URL has none of the forms above, or a file that it names cannot be read.
    """
    options = _options(url)
    password: dict[str, str] = {}
    if "password_file" in options:
        path = options.pop("password_file")
        try:
            password["password"] = Path(path).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeError) as error:
            raise SettingError(f"the password file {path} of {redact_url(url)} cannot be read: {error}") from error
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
    """Check the connection once, before anything starts. SettingError if the URL, password, database or certificate is
    wrong; PeerLost if no Redis answers (a running syncer survives that, since the registry reconnects by itself).
    """
    client = connect(url)
    try:
        client.ping()
    except FAILURES as error:
        raise explain(url, error) from None
    finally:
        client.close()


def save_and_shut_down(url: str) -> None:
    """Make Redis save all its data to disk and shut down; if it cannot save, it keeps running. SettingError, PeerLost
    or DilocoError say why it did not shut down.
    """
    client = connect(url, SAVE_SECONDS)
    try:
        client.ping()  # without a server, SHUTDOWN would take the closed connection for success
        client.shutdown(save=True)
    except FAILURES as error:
        raise explain(url, error) from None
    finally:
        client.close()


def explain(url: str, error: Exception) -> DilocoError:
    """Our error for `error` at `url`, without the password."""
    place, message = redact_url(url), str(error)
    if isinstance(error, redis.AuthenticationError) or re.search(r"\bAUTH\b|NOAUTH|WRONGPASS", message):
        return SettingError(
            f"authentication failed at {place}: {message} Check user and password; "
            "the password must be percent-encoded in the URL, but not in the file of ?password_file=PATH"
        )
    if is_forbidden(error):
        return SettingError(f"the user of {place} may not do this: {message}")
    if is_wrong_type(error):
        key = found[0] if (found := re.search(r"\bdd:[^\s)]+", message)) else "a key of the run"
        return DilocoError(f"in Redis at {place} {foreign_key(key)}")
    if isinstance(error, CLUSTER):
        return SettingError(
            f"Redis at {place} is a cluster, and all keys of a run must be at one server: give --redis a server "
            "that is not a cluster (cluster-enabled no), or omit --redis"
        )
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return SettingError(f"Redis at {place} is a replica, which takes no writes; give the address of its primary")
    if "DB index" in message:
        return SettingError(f"this server does not have the database number of {place}: {message}")
    if "CERTIFICATE_VERIFY_FAILED" in message:
        return SettingError(
            f"the TLS certificate of {place} is not trusted: {message}; "
            "give its authority with ?ssl_ca_certs=/path/ca.pem"
        )
    if any(isinstance(cause, ssl.SSLError) for cause in _causes(error)):
        return SettingError(
            f"no TLS connection to {place}: {message}; for a server without TLS use redis://, not rediss://"
        )
    if isinstance(error, redis.ResponseError):
        return DilocoError(f"Redis at {place} refuses: {message[:300]}")
    if any(isinstance(cause, socket.gaierror) for cause in _causes(error)):
        return PeerLost(f"no Redis answers at {place}: host name {urlsplit(url).hostname} cannot be resolved")
    tls = " with TLS" if url.startswith("rediss:") else ""
    return PeerLost(f"no Redis answers at {place}: {message.rstrip('.')}; is it running{tls}?")


def is_wrong_type(reply: object) -> bool:
    """Whether a key has another type than the command needs; in a pipeline the error quotes the command first."""
    return isinstance(reply, redis.ResponseError) and "WRONGTYPE" in str(reply)


def foreign_key(key: str) -> str:
    """Advice about a key of the run that another program has overwritten."""
    return f"{key} is of another type than a run writes; delete it (redis-cli DEL {key}), and the run writes it again"


def is_forbidden(error: Exception) -> bool:
    """The user lacks a permission; the server's error for EXEC differs from that for all other commands."""
    return isinstance(error, redis.exceptions.NoPermissionError) or "NOPERM" in str(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its chain of causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _options(url: str) -> dict[str, str]:
    """The query of `url` after strict validation of the whole URL (redis-py ignores many mistakes)."""
    place = redact_url(url)
    encode = "characters such as / @ # ? % in a password must be percent-encoded"
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
        port_is_fine = parts.port != 0
    except ValueError:
        # The cause is suppressed: it quotes the part of the URL that it could not parse, which may be the password.
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
