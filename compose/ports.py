"""Ports on loopback: the broker takes four in a row."""

from __future__ import annotations

import re
import socket

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
        if not any(is_taken(port) for port in range(first, first + BROKER_PORTS)):
            return first
    raise SettingError(f"no four free ports in a row from {DEFAULT_PORT} on; give --broker-port")


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
