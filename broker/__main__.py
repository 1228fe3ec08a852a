"""The broker process: runs until a stop signal or, with an idle timeout, until its clients have left."""

from __future__ import annotations

import select
import signal
import time

from ..common.config import BrokerConfig
from ..common.errors import LimitReached
from ..common.log import get_logger
from ..common.sockets import Waker
from ..common.stop_signals import stop_signals
from ..common.system_limits import check_room, raise_file_limit
from .broker import Broker

log = get_logger("broker")

LOOK_SECONDS = 1.0
STATS_SECONDS = 10.0


def main(config: BrokerConfig) -> int:
    """Forward messages until a stop signal; returns the exit code. Raises SettingError if a port is taken, and
    LimitReached if the system has too few open files or threads left.
    """
    raise_file_limit()  # each client takes four open files
    stop = Waker()  # a signal handler may write to a socket, but must not take the lock inside an Event
    for number in stop_signals():
        signal.signal(number, lambda *_: stop.wake())
    broker = Broker(config, on_failure=stop.wake)
    broker.start()
    log.info(
        "broker_ready", host=config.host, port=config.port, queue_mib=config.queue_mib, keyed=config.keys is not None
    )
    room = ConnectionLimit()
    idle, stats_at = IdleTimeout(config.exit_when_idle_seconds), time.monotonic() + STATS_SECONDS
    while not select.select([stop], [], [], LOOK_SECONDS)[0]:
        now = time.monotonic()
        if now >= stats_at:
            stats_at = now + STATS_SECONDS
            log.debug("broker_stats", **broker.counters())
        room.look()
        if idle.over(now, in_use=broker.in_use()):
            log.info("broker_idle", seconds=config.exit_when_idle_seconds)
            break
    broker.stop()
    log.info("broker_stopped", **broker.counters())
    return 1 if broker.failure is not None else 0


class ConnectionLimit:
    """Detects that no more clients can connect, since each connection is an open file. The change is logged once in
    each direction.
    """

    def __init__(self) -> None:
        self._full = False

    def look(self) -> None:
        try:
            check_room("a broker with all its clients", files=0, threads=0)
        except LimitReached as wrong:
            if not self._full:
                log.warning("broker_full", sentence=f"no further client can connect: {wrong}")
            self._full = True
        else:
            if self._full:
                log.info("broker_has_room")
            self._full = False


class IdleTimeout:
    """Time since the last client left. It starts with the first client: a broker without any yet waits for ever."""

    def __init__(self, seconds: float) -> None:
        """0 = the broker never ends by itself."""
        self._seconds = seconds
        self._used_at: float | None = None

    def over(self, now: float, *, in_use: bool) -> bool:
        if in_use:
            self._used_at = now
        return self._seconds > 0 and self._used_at is not None and now - self._used_at >= self._seconds
