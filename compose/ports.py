"""Free TCP ports on loopback; the broker needs four consecutive ones."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import tempfile

from ..common.config import DEFAULT_PORT
from ..common.errors import SettingError

BROKER_PORTS = 4
"""Number of consecutive ports."""
_TRIES = 500
_LAST_PORT = 65_535


def broker_port(wanted: int) -> int:
    """First of four consecutive free ports: `wanted` itself, or if that is 0 the first such port from 5550 on.

    SettingError if `wanted` or one of the next three is in use.
    """
    if wanted:
        taken = [port for port in range(wanted, wanted + BROKER_PORTS) if is_taken(port)]
        if taken:
            raise SettingError(
                f"port {taken[0]} on 127.0.0.1 is taken; the broker needs {wanted} to {wanted + BROKER_PORTS - 1}: "
                "choose another --broker-port, or leave it out to have free ports chosen"
            )
        return wanted
    for first in range(DEFAULT_PORT, DEFAULT_PORT + _TRIES * BROKER_PORTS, BROKER_PORTS):
        if not any(is_taken(port) for port in range(first, first + BROKER_PORTS)) and _claim(first):
            return first
    raise SettingError(f"no four consecutive free ports found from {DEFAULT_PORT} on; give --broker-port")


def _claim(first: int) -> bool:
    """Reserve the four ports from `first` on while this process runs; False if another `diloco up` has reserved them.

    A port that is free now may belong to another run that is just starting, or whose broker is being restarted. Only
    processes that call this function see the reservation.
    """
    path = os.path.join(tempfile.gettempdir(), f"diloco-broker-{first}.lock")  # noqa: PTH118 no Path is needed
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError:
        return True  # another user's file, or no writable folder: no reservation is possible
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return False
    return True  # the handle stays open on purpose


def check_free(option: str, port: int) -> None:
    """SettingError if `port` on 127.0.0.1 is in use."""
    if is_taken(port):
        raise SettingError(f"port {port} on 127.0.0.1 is taken; choose another {option}, or leave it out")


def port_of(url: object) -> int:
    """Port of an address on 127.0.0.1, such as tcp://127.0.0.1:5550 or redis://127.0.0.1:6379/0; 0 for any other text.

    >>> port_of("tcp://127.0.0.1:5550"), port_of("redis://far:6379/0")
    (5550, 0)
    """
    found = re.fullmatch(r"[a-z]+://127\.0\.0\.1:(\d{1,5})(/.*)?", str(url))
    return int(found[1]) if found and int(found[1]) <= _LAST_PORT else 0


def is_taken(port: int) -> bool:
    """Whether `port` on 127.0.0.1 cannot be bound."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT may be bound again
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
