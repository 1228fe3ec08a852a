"""Throughput of our broker and of zmq.proxy: messages per second, and CPU time per message.

    .venv/bin/python benchmarks/broker.py [--seconds 10] [--port 5650]

All run with the same socket options, each in its own process and in turns, so that other load disturbs all equally;
one publisher and one receiver keep a fixed number of messages in flight. A ratio of 1 is as fast as zmq.proxy, which
neither inspects nor encrypts messages. "keyed" is ours with --keys: encrypted both ways, and checked.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import zmq
from decoupled_diloco.broker.broker import Broker
from decoupled_diloco.common.auth_keys import Key, new_key
from decoupled_diloco.common.config import BrokerConfig
from decoupled_diloco.common.sockets import Address, Context, PublishSocket, Socket, SubscribeSocket, configure
from decoupled_diloco.common.wire import Update, encode, split

QUEUE_MESSAGES = 256
ROUNDS = 4
SIZES = {"1 MiB": 2**20, "200 B": 200}
IN_FLIGHT = {"1 MiB": 16, "200 B": 128}


def run_proxy(port: int) -> None:
    address = Address("127.0.0.1", port)
    context: Context = zmq.Context()
    source, sink = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    for socket, endpoint in ((source, address.bulk_in), (sink, address.bulk_out)):
        configure(socket, hwm_messages=QUEUE_MESSAGES)
        socket.bind(endpoint)
    zmq.proxy(source, sink)


def run_ours(port: int, keys: Path | None = None) -> None:
    broker = Broker(BrokerConfig(port=port, queue_mib=QUEUE_MESSAGES, keys=keys))
    broker.start()
    broker.join()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, in steps of 10 ms."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / 100


def pump(up: Socket, down: Socket, frames: list[bytes | memoryview], in_flight: int, seconds: float) -> int:
    """Number of messages forwarded in `seconds`."""
    sent = got = 0
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        while sent - got < in_flight:
            up.send_multipart(frames, copy=False)
            sent += 1
        while down.poll(0 if got else 1000):
            down.recv_multipart(copy=False)
            got += 1
    while got < sent:
        down.recv_multipart(copy=False)
        got += 1
    return got


def measure(
    run: object, *, port: int, size: str, seconds: float, syncer: Key | None = None, learner: Key | None = None
) -> tuple[float, float]:
    """Messages per second, and microseconds of the broker's CPU time per message."""
    child = multiprocessing.get_context("spawn").Process(target=run, args=(port,), daemon=True)  # type: ignore[arg-type]
    child.start()
    pid = child.pid or 0
    context: Context = zmq.Context()
    address = Address("127.0.0.1", port)
    down = SubscribeSocket(context, address.bulk_out, hwm_messages=QUEUE_MESSAGES, key=learner)
    up = PublishSocket(context, address.bulk_in, hwm_messages=QUEUE_MESSAGES, key=syncer)
    try:
        # zmq.proxy forwards subscriptions, and only a subscription to everything proves an uplink
        down.subscribe(b"" if learner is None else b"run/fragment/")
        message = Update(
            run="run", epoch=1, slot=1, t=1, fragment=3, version=2, base_version=1, codec="int4", digest="0" * 64,
            **split(bytes(SIZES[size]))[0],
        )  # fmt: skip
        while not (up.socket.poll(1000) or up.proven):
            pass
        while not up.send(message) or not down.socket.poll(100):
            pass
        while down.socket.poll(100):
            down.receive()
        began, cpu = time.perf_counter(), cpu_seconds(pid)
        count = pump(up.socket, down.socket, encode(message), IN_FLIGHT[size], seconds)
        return count / (time.perf_counter() - began), 1e6 * (cpu_seconds(pid) - cpu) / count
    finally:
        child.kill()
        child.join()
        up.close()
        down.close()
        context.term()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of measuring, all together (default: 10)")
    parser.add_argument("--port", type=int, default=5650, help="the first of four free ports (default: 5650)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        syncer = new_key(Path(folder), role="syncer", run="run", name="syncer")
        learner = new_key(Path(folder), role="learner", run="run", name="learner")
        measures = {
            "ours": partial(measure, run_ours),
            "keyed": partial(measure, partial(run_ours, keys=Path(folder)), syncer=syncer, learner=learner),
            "zmq.proxy": partial(measure, run_proxy),
        }
        for size in SIZES:
            compare(measures, arguments.port, size, arguments.seconds / (len(SIZES) * len(measures) * ROUNDS))


def compare(measures: dict[str, Callable[..., tuple[float, float]]], port: int, size: str, seconds: float) -> None:
    """Measure all brokers in turns and print the results."""
    rows = [{name: one(port=port, size=size, seconds=seconds) for name, one in measures.items()} for _ in range(ROUNDS)]
    print(f"{size}, median of {ROUNDS} turns of {seconds:.2g} s")
    speeds = {}
    for name in measures:
        speed, cpu = (statistics.median(row[name][figure] for row in rows) for figure in (0, 1))
        speeds[name] = speed
        rate = speed * SIZES[size] / 2**20
        print(f"  {name:>9}: {speed:8.0f} messages/s  {rate:6.0f} MiB/s  {cpu:5.0f} us of CPU each")
    print(f"  speed against zmq.proxy: ours {speeds['ours'] / speeds['zmq.proxy']:.2f}, ", end="")
    print(f"keyed {speeds['keyed'] / speeds['zmq.proxy']:.2f}")


if __name__ == "__main__":
    main()
