"""Resolution of the broker's host name, watched beside libzmq, which resolves the name at each connection attempt but
does not report a failure. A resolver may take many seconds, so it runs in threads of its own.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import socket as network
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

AGAIN_SECONDS = 2.0
"""How long a result is used before the name is resolved again."""
SLOW_SECONDS = 4.0
"""A resolver that takes longer is reported."""
Resolve = Callable[..., Any]


@dataclass(frozen=True)
class Resolution:
    """The result of one resolution."""

    started_at: float
    family: network.AddressFamily | None
    """IPv4 if the host has such an address, else IPv6; None if it has no address."""
    error: str = ""


class Lookup:
    """Resolves one host name repeatedly. Thread-safe."""

    def __init__(self, host: str, resolve: Resolve = network.getaddrinfo) -> None:
        self.host = host
        self.answer: Resolution | None = None
        """The newest result; None before the first."""
        self._resolve = resolve
        self._lock = threading.Lock()
        self._started_at = 0.0
        self._thread: threading.Thread | None = None

    def start(self, now: float) -> None:
        """Start a resolution, unless one is running or the newest result is recent. Returns at once."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            if self.answer is not None and now - self.answer.started_at < AGAIN_SECONDS:
                return
            thread = threading.Thread(target=self._run, args=(now,), name="diloco-lookup", daemon=True)
            with contextlib.suppress(RuntimeError):  # the limit of threads: a later call tries again
                thread.start()
                self._started_at, self._thread = now, thread

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for the end of a running resolution."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def trouble(self, since: float, now: float) -> str:
        """Why the name cannot be resolved, by resolutions started since `since`; "" if it can, or none has ended."""
        answer = self.answer
        if answer is not None and answer.started_at >= since:
            if answer.family is not None:
                return ""
            return f"host name {self.host} cannot be resolved ({answer.error}); is it spelled right?"
        waits = self._started_at >= since and now - self._started_at >= SLOW_SECONDS
        return f"host name {self.host} cannot be resolved: no name server answers" if waits else ""

    def _run(self, started_at: float) -> None:
        error = ""
        for family in (network.AF_INET, network.AF_INET6):
            try:
                self._resolve(self.host, None, family, network.SOCK_STREAM)
            except (OSError, UnicodeError) as wrong:
                error = error or str(getattr(wrong, "strerror", None) or wrong)
            else:
                self.answer = Resolution(started_at, family)
                return
        self.answer = Resolution(started_at, None, error)


@functools.lru_cache(maxsize=64)
def _shared_lookup(host: str) -> Lookup:
    """The Lookup of `host` that all connections of this process share."""
    return Lookup(host)


def _is_literal(host: str) -> bool:
    """Whether `host` is a numeric address, which needs no resolver."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class HostWatch:
    """The host of one connection's endpoint: detects that its name cannot be resolved while the connection is down."""

    def __init__(self, host: str, names: Callable[[str], Lookup] = _shared_lookup) -> None:
        self.unresolved = ""
        """Why the name cannot be resolved, in a sentence; "" if it can, or the connection is up."""
        self._lookup = None if _is_literal(host) else names(host)
        self._down_since: float | None = None
        self._host = host

    def family(self, seconds: float) -> network.AddressFamily:
        """The address family for connecting; waits `seconds` for it at most. IPv6 sockets reach IPv4 hosts as well."""
        if self._lookup is None:
            is_v4 = ipaddress.ip_address(self._host).version == 4
            return network.AF_INET if is_v4 else network.AF_INET6
        self.look(connected=False, now=time.monotonic())
        self._lookup.wait(seconds)
        if self._lookup.answer is not None and self._down_since is not None:
            started_at = self._lookup.answer.started_at  # perhaps for another connection
            self._down_since = min(self._down_since, started_at)
        return self.newest_family() or network.AF_INET6

    def newest_family(self) -> network.AddressFamily | None:
        """The address family in the newest result; None before the first."""
        answer = None if self._lookup is None else self._lookup.answer
        return None if answer is None else answer.family

    def look(self, *, connected: bool, now: float) -> None:
        """Update `unresolved`. To be called often."""
        if self._lookup is None:
            return
        if connected:
            self._down_since, self.unresolved = None, ""
            return
        if self._down_since is None:
            self._down_since = now
        self._lookup.start(now)
        self.unresolved = self._lookup.trouble(self._down_since, now)
