"""Whether the broker's host name can be resolved. libzmq resolves it by itself at each attempt to connect and does not
report a failure; a resolver may take many seconds to answer, so it is asked in threads of its own.
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
"""How long an answer counts before it is asked for again."""
SLOW_SECONDS = 4.0
"""A resolver that takes longer is named."""
Resolve = Callable[..., Any]


@dataclass(frozen=True)
class Resolution:
    """What the resolver said."""

    asked_at: float
    family: network.AddressFamily | None
    """IPv4 where the host has such an address, else IPv6; None if it has no address."""
    error: str = ""


class Lookup:
    """Asks for one host name, as often as a connection wants to know. Safe from every thread."""

    def __init__(self, host: str, resolve: Resolve = network.getaddrinfo) -> None:
        self.host = host
        self.answer: Resolution | None = None
        """The newest one; None before the first."""
        self._resolve = resolve
        self._lock = threading.Lock()
        self._asked_at = 0.0
        self._thread: threading.Thread | None = None

    def ask(self, now: float) -> None:
        """Have it asked, unless that goes on or was done a moment ago. Returns at once."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            if self.answer is not None and now - self.answer.asked_at < AGAIN_SECONDS:
                return
            thread = threading.Thread(target=self._run, args=(now,), name="diloco-lookup", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread is left: it is asked again later
                thread.start()
                self._asked_at, self._thread = now, thread

    def wait(self, seconds: float) -> None:
        """Until the question that is under way is answered, at most so long."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def trouble(self, since: float, now: float) -> str:
        """Why the name leads nowhere, by answers to what was asked from `since` on; "" if it does, or none came yet."""
        answer = self.answer
        if answer is not None and answer.asked_at >= since:
            if answer.family is not None:
                return ""
            return f"host name {self.host} cannot be resolved ({answer.error}); is it spelled right?"
        waits = self._asked_at >= since and now - self._asked_at >= SLOW_SECONDS
        return f"host name {self.host} cannot be resolved: no name server answers" if waits else ""

    def _run(self, asked_at: float) -> None:
        error = ""
        for family in (network.AF_INET, network.AF_INET6):
            try:
                self._resolve(self.host, None, family, network.SOCK_STREAM)
            except (OSError, UnicodeError) as wrong:
                error = error or str(getattr(wrong, "strerror", None) or wrong)
            else:
                self.answer = Resolution(asked_at, family)
                return
        self.answer = Resolution(asked_at, None, error)


@functools.lru_cache(maxsize=64)
def lookup(host: str) -> Lookup:
    """The process's own Lookup of `host`: all connections to it share its answers."""
    return Lookup(host)


def is_literal(host: str) -> bool:
    """Whether `host` is a numeric address, which needs no resolver."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class HostWatch:
    """The host of one endpoint, as a connection sees it: does its name lead anywhere while the connection is down?"""

    def __init__(self, host: str, names: Callable[[str], Lookup] = lookup) -> None:
        self.unresolved = ""
        """Why the name leads nowhere, in a sentence; "" while it does, or the connection is up."""
        self._lookup = None if is_literal(host) else names(host)
        self._down_since: float | None = None
        self._host = host

    def family(self, seconds: float) -> network.AddressFamily:
        """By which addresses to connect; waits `seconds` for that at most. IPv6 sockets reach IPv4 hosts as well."""
        if self._lookup is None:
            is_v4 = ipaddress.ip_address(self._host).version == 4
            return network.AF_INET if is_v4 else network.AF_INET6
        self.look(connected=False, now=time.monotonic())
        self._lookup.wait(seconds)
        if self._lookup.answer is not None and self._down_since is not None:
            asked_at = self._lookup.answer.asked_at  # also one that another line asked for
            self._down_since = min(self._down_since, asked_at)
        return self.newest_family() or network.AF_INET6

    def newest_family(self) -> network.AddressFamily | None:
        """The same by the newest answer; None while there is none."""
        answer = None if self._lookup is None else self._lookup.answer
        return None if answer is None else answer.family

    def look(self, *, connected: bool, now: float) -> None:
        """To be called often."""
        if self._lookup is None:
            return
        if connected:
            self._down_since, self.unresolved = None, ""
            return
        if self._down_since is None:
            self._down_since = now
        self._lookup.ask(now)
        self.unresolved = self._lookup.trouble(self._down_since, now)
