"""Runs one broker until SIGTERM or SIGINT."""

from __future__ import annotations

import signal
import threading

from ..common.config import BrokerConfig
from ..common.log import get_logger
from .loop import Broker

log = get_logger("broker")

STATS_SECONDS = 10.0


def main(config: BrokerConfig) -> int:
    """Pass messages on until a signal asks to stop; the exit code. SettingError if a port is taken."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    broker = Broker(config)
    broker.start()
    log.info("broker_ready", host=config.host, port=config.port, queue_mib=config.queue_mib)
    while not stopping.wait(STATS_SECONDS) and broker.failure is None:
        log.debug("broker_stats", **broker.counters())
    broker.stop()
    log.info("broker_stopped", **broker.counters())
    return 1 if broker.failure is not None else 0
