"""Runs one broker until SIGTERM or SIGINT."""

from __future__ import annotations

import select
import signal

from ..common.config import BrokerConfig
from ..common.log import get_logger
from ..common.sockets import Waker
from .loop import Broker

log = get_logger("broker")

STATS_SECONDS = 10.0


def main(config: BrokerConfig) -> int:
    """Pass messages on until a signal asks to stop; the exit code. SettingError if a port is taken."""
    stop = Waker()  # a signal handler may write to a socket; it must not take the lock that an Event has
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.wake())
    broker = Broker(config, on_failure=stop.wake)
    broker.start()
    log.info("broker_ready", host=config.host, port=config.port, queue_mib=config.queue_mib)
    while not select.select([stop], [], [], STATS_SECONDS)[0]:
        log.debug("broker_stats", **broker.counters())
    broker.stop()
    log.info("broker_stopped", **broker.counters())
    return 1 if broker.failure is not None else 0
