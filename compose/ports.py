"""Ports on loopback: the broker takes four in a row."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import tempfile

from ..common.config import DEFAULT_PORT
from ..common.errors import SettingError

BROKER_PORTS = 4
TRIES = 500
LAST_PORT = 65_535


def broker_port(wanted: int) -> int:
    """The first of four consecutive ports that are free: `wanted` itself, or with 0 the first such from 5550 on.

    SettingError if `wanted` or one of the three after it is taken.
    """
    if wanted:
        taken = [port for port in range(wanted, wanted + BROKER_PORTS) if is_taken(port)]
        if taken:
            raise SettingError(
                f"port {taken[0]} on 127.0.0.1 is taken; the broker needs {wanted} to {wanted + BROKER_PORTS - 1}: "
                "choose another --broker-port, or leave it out to have a free one found"
            )
        return wanted
    for first in range(DEFAULT_PORT, DEFAULT_PORT + TRIES * BROKER_PORTS, BROKER_PORTS):
        if not any(is_taken(port) for port in range(first, first + BROKER_PORTS)) and claim(first):
            return first
    raise SettingError(f"no four free ports in a row from {DEFAULT_PORT} on; give --broker-port")


def claim(first: int) -> bool:
    """Keep the four ports from `first` on for this process's life; False if another `diloco up` has done so.

    A port that is free now may be another run's in a moment: one that starts just now, or whose broker was killed and
    starts again. Only processes that ask here see the claim, so it is a courtesy among runs, not a lock.
    """
    place = os.path.join(tempfile.gettempdir(), f"diloco-broker-{first}.lock")  # noqa: PTH118 no Path is needed
    try:
        handle = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError:
        return True  # somebody else's file, or no place for one: then nobody can be asked
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return False
    return True  # the handle stays open on purpose


def check_free(option: str, port: int) -> None:
    """SettingError if `port` on 127.0.0.1 is taken."""
    if is_taken(port):
        raise SettingError(f"port {port} on 127.0.0.1 is taken; choose another {option}, or leave it out")


def port_of(url: object) -> int:
    """The port of an address on this machine, like tcp://127.0.0.1:5550 or redis://127.0.0.1:6379/0; 0 if it is none.

    >>> port_of("tcp://127.0.0.1:5550"), port_of("redis://far:6379/0")
    (5550, 0)
    """
    found = re.fullmatch(r"[a-z]+://127\.0\.0\.1:(\d{1,5})(/.*)?", str(url))
    return int(found[1]) if found and int(found[1]) <= LAST_PORT else 0


def is_taken(port: int) -> bool:
    """Does anybody listen at 127.0.0.1:`port`?"""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ports that only linger may be bound again
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
