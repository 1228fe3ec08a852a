"""`diloco syncer`: read the settings, build the parts, run. Exit codes are those of the errors (common.errors)."""

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
from ..common.signals import stop_signals
from .epoch_discovery import EpochDiscovery
from .rejections import sender_from_topic
from .telemetry import Telemetry
from .transport import Transport


def main(config: SyncerConfig) -> None:
    """Serve the run until it is over or a signal asks for a stop. DilocoError says what went wrong."""
    log = get_logger("syncer")
    run = config.settings.run
    teller = Telemetry(Registry(config.redis, run, log), log, run)

    def malformed(topic: bytes, wrong: Malformed) -> None:
        name, kind = sender_from_topic(topic)
        teller.reject(name, wrong.reason, message=kind, detail=str(wrong)[:200])

    def absent(seconds: float) -> None:
        if lines.refusal:
            log.warning("broker_refuses", sentence=lines.refusal, seconds=round(seconds))
        elif lines.unresolved:
            log.warning("host_unresolved", sentence=lines.unresolved, seconds=round(seconds))
        else:
            log.warning("broker_absent", broker=config.broker, seconds=round(seconds))

    lines = Transport(config.broker, run, malformed, config.key)
    listening = EpochDiscovery(lines, config.listen_seconds, absent)
    try:
        # Torch comes with these. It takes as long to load as `listening` has to listen anyway.
        from .loop import Syncer  # noqa: PLC0415
        from .run_state import assemble  # noqa: PLC0415

        syncer = Syncer(assemble(config, lines, listening, teller))
        gc.freeze()  # torch's hundred thousands of objects stay for ever: no collection need look at them

        def ask_to_stop(_signal: int, _frame: FrameType | None) -> None:
            syncer.stop()

        for number in stop_signals():
            signal.signal(number, ask_to_stop)
        syncer.run()
    finally:
        listening.close()
        teller.registry.close()
        lines.close()
    if config.stop_redis and config.redis is not None and syncer.finished:
        stop_redis(config.redis, log)


def stop_redis(url: str, log: FilteringBoundLogger) -> None:
    """Tell the store that it may end, since nobody writes to it any more. The run is safe: one that stays is told of,
    and no more.
    """
    try:
        save_and_shut_down(url)
    except DilocoError as wrong:
        log.warning("redis_not_stopped", reason=str(wrong))
    else:
        log.info("redis_stopped", redis=redact_url(url))
