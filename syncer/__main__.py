"""The syncer process (`diloco syncer`): builds the components and runs the loop. Exit codes: see common/errors.py."""

from __future__ import annotations

import gc
import signal
from types import FrameType

from structlog.typing import FilteringBoundLogger

from ..common.config import SyncerConfig
from ..common.errors import DilocoError, Malformed
from ..common.log import get_logger
from ..common.redis_client import redact_url, save_and_shut_down
from ..common.registry import Registry
from ..common.stop_signals import stop_signals
from .epoch_discovery import EpochDiscovery
from .rejections import sender_from_topic
from .telemetry import Telemetry
from .transport import Transport


def main(config: SyncerConfig) -> None:
    """Serve the run until its end or a stop signal. Raises a DilocoError that names the problem."""
    log = get_logger("syncer")
    run = config.settings.run
    telemetry = Telemetry(Registry(config.redis, run, log), log, run)

    def malformed(topic: bytes, wrong: Malformed) -> None:
        name, kind = sender_from_topic(topic)
        telemetry.reject(name, wrong.reason, message=kind, detail=str(wrong)[:200])

    def absent(seconds: float) -> None:
        if transport.refusal:
            log.warning("broker_refuses", sentence=transport.refusal, seconds=round(seconds))
        elif transport.unresolved:
            log.warning("host_unresolved", sentence=transport.unresolved, seconds=round(seconds))
        else:
            log.warning("broker_absent", broker=config.broker, seconds=round(seconds))

    transport = Transport(config.broker, run, malformed, config.key)
    discovery = EpochDiscovery(transport, config.listen_seconds, absent)
    try:
        # These import torch, which takes about as long as the epoch discovery that runs meanwhile.
        from .loop import Syncer  # noqa: PLC0415
        from .run_state import assemble  # noqa: PLC0415

        syncer = Syncer(assemble(config, transport, discovery, telemetry))
        gc.freeze()  # torch's many objects live for ever: no garbage collection needs to visit them

        def request_stop(_signal: int, _frame: FrameType | None) -> None:
            syncer.stop()

        for number in stop_signals():
            signal.signal(number, request_stop)
        syncer.run()
    finally:
        discovery.close()
        telemetry.registry.close()
        transport.close()
    if config.stop_redis and config.redis is not None and syncer.finished:
        _stop_redis(config.redis, log)


def _stop_redis(url: str, log: FilteringBoundLogger) -> None:
    """Shut the Redis server down after the run. A failure is only logged: the run is saved already."""
    try:
        save_and_shut_down(url)
    except DilocoError as wrong:
        log.warning("redis_not_stopped", reason=str(wrong))
    else:
        log.info("redis_stopped", redis=redact_url(url))
