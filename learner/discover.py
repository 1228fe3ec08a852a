"""Run discovery: which run sends beats at a broker's address."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import zmq

from ..common.auth_keys import held_key, run_of
from ..common.config import check_name
from ..common.errors import PeerLost, SettingError
from ..common.log import get_logger
from ..common.sockets import CONTROL_MESSAGES, Address, SubscribeSocket, check_sockets, refusal_of, unresolved_of
from ..common.wire import Beat, beat_topic

log = get_logger("learner")

LISTEN_SECONDS = 2.0
"""How long to listen if the run is not named: two beats of each run."""
SINCE_FIRST_SECONDS = 1.2
"""Minimum time to listen after the first beat, so that a broker reached late delivers a beat of every run."""
SAY_SECONDS = 5.0


def discover(address: str, run: str = "", timeout_seconds: float = 60.0, key: Path | None = None) -> Beat:
    """A beat of run `run`, or of the key's run, or of the only run with beats at `address` (tcp://HOST:PORT) in 2 s.

    Raises SettingError if there are several runs (it lists them) or the key is of another run, PeerLost without a beat
    within `timeout_seconds`. Logs every few seconds what it waits for.
    """
    if run:
        check_name("--run", run)
    place, held = Address.parse(address), held_key(key)
    run = run_of(held, run, key)
    check_sockets("looking for a run", 1)
    with zmq.Context[zmq.Socket[bytes]](io_threads=1) as context:
        downlink = SubscribeSocket(context, place.control_out, hwm_messages=CONTROL_MESSAGES, key=held)
        try:
            downlink.subscribe(beat_topic(run))
            beats = _listen(downlink, address, run, timeout_seconds, key)
        finally:
            downlink.close()
    if len(beats) > 1:
        raise SettingError(f"several runs are at {address}: {', '.join(sorted(beats))}; choose one with --run")
    return next(iter(beats.values()))


def _listen(
    downlink: SubscribeSocket, address: str, run: str, timeout_seconds: float, key: Path | None
) -> dict[str, Beat]:
    start = time.monotonic()
    until, logged_at = start + timeout_seconds, start
    beats: dict[str, Beat] = {}
    rejected = downlink.rejected
    while (now := time.monotonic()) < until:
        downlink.socket.poll(100)
        downlink.look()
        while (message := downlink.receive()) is not None:
            if isinstance(message, Beat):
                if message.run == run:
                    return {run: message}
                if not beats:
                    until = max(start + LISTEN_SECONDS, now + SINCE_FIRST_SECONDS)
                if message.run not in beats or message.epoch >= beats[message.run].epoch:
                    beats[message.run] = message
        if not beats and now - logged_at >= SAY_SECONDS:
            logged_at = now
            log.info(
                "waiting",
                waits_for=_connection_problem(downlink, address, key) or _missing(run) + other_version(rejected),
                address=address,
                seconds=round(now - start),
            )
    if not beats:
        if problem := _connection_problem(downlink, address, key):
            raise PeerLost(f"{problem}; nothing was heard for {timeout_seconds:g} s")
        raise PeerLost(
            f"{_missing(run)}{other_version(rejected)} was not heard at {address} for {timeout_seconds:g} s; "
            "are the broker and the syncer running, and is the address right?"
        )
    return beats


def other_version(rejected: Counter[str]) -> str:
    """A hint for an error text, if messages of another version of this package were received."""
    return " (only one of another version is heard: install the same on both sides)" if rejected["protocol"] else ""


def _connection_problem(downlink: SubscribeSocket, address: str, key: Path | None) -> str:
    return refusal_of([downlink], address, key) or unresolved_of([downlink])


def _missing(run: str) -> str:
    return f"a beat of run {run}" if run else "a beat of any run"
