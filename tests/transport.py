"""Brokers, links and messages for tests of what travels: in this process, or as real children that can be killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket as network
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import zmq
from decoupled_diloco.broker.broker import Broker
from decoupled_diloco.common.config import BrokerConfig
from decoupled_diloco.common.sockets import Address, Context, PublishSocket, SubscribeSocket, Waker, is_ipv6
from decoupled_diloco.common.wire import Delta, Message, Update, split
from waiting import wait_for

HWM = 256
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
PORTS = range(10_000 + 1_200 * WORKER, 10_000 + 1_200 * (WORKER + 1), 4)
"""Each process that runs tests has some of its own, so that none takes those of another's broker that is away for a
moment. And they are below those that systems give to outgoing connections: while a broker is away, no client of it,
calling again and again, may get the very port and so keep it from coming back."""
CHILD = """
import sys
from decoupled_diloco.broker.__main__ import main
from decoupled_diloco.common.config import BrokerConfig
from decoupled_diloco.common.log import configure
configure("broker", level="debug", terminal=True)
sys.exit(main(BrokerConfig(port=int(sys.argv[1]), queue_mib=int(sys.argv[2]))))
"""


def free_ports(host: str = "127.0.0.1") -> int:
    """The first of four consecutive ports on which nobody listens now."""
    for first in random.sample(PORTS, 200):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + 4):
                family = network.AF_INET6 if is_ipv6(host) else network.AF_INET
                held.enter_context(network.socket(family, network.SOCK_STREAM)).bind((host, port))
            return first
    raise AssertionError(f"no four ports are free on {host}")


@contextlib.contextmanager
def broker_here(host: str = "127.0.0.1", queue_mib: int = 256) -> Iterator[tuple[Broker, Address]]:
    """A broker in this process: its counters can be read."""
    port = free_ports(host)
    broker = Broker(BrokerConfig(host=host, port=port, queue_mib=queue_mib))
    broker.start()
    try:
        yield broker, Address(host, port)
    finally:
        broker.stop()


class BrokerChild:
    """A broker that can be stopped, killed, and started again on the same ports. Use as a context manager."""

    def __init__(self, queue_mib: int = 256) -> None:
        self.address = Address("127.0.0.1", free_ports())
        self.queue_mib = queue_mib
        self.start()

    def start(self) -> None:
        arguments = [sys.executable, "-P", "-c", CHILD, str(self.address.port), str(self.queue_mib)]
        self.process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def stop_in_its_tracks(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on()
        self.kill()


@contextlib.contextmanager
def context() -> Iterator[Context]:
    """A context all of whose sockets are closed at the end, at once."""
    made: Context = zmq.Context()
    try:
        yield made
    finally:
        made.destroy(linger=0)


def uplink(made: Context, endpoint: str, *, hwm_messages: int = HWM) -> PublishSocket:
    """An uplink whose path to the broker is proven."""
    link = PublishSocket(made, endpoint, hwm_messages=hwm_messages)

    def proven() -> bool:
        link.read_subscriptions()
        return link.proven

    wait_for(proven, f"the broker at {endpoint} is heard")
    return link


def downlink(made: Context, endpoint: str, *prefixes: bytes, hwm_messages: int = HWM, **more: Any) -> SubscribeSocket:
    link = SubscribeSocket(made, endpoint, hwm_messages=hwm_messages, **more)
    for prefix in prefixes:
        link.subscribe(prefix)
    return link


def next_of(link: SubscribeSocket, what: str = "a message arrives") -> Message:
    message = wait_for(link.receive, what)
    assert message is not None
    return message


def take_all(link: SubscribeSocket, into: list[Message] | None = None) -> list[Message]:
    """All that waits now."""
    found = [] if into is None else into
    while (message := link.receive()) is not None:
        found.append(message)
    return found


def meet(up: PublishSocket, down: SubscribeSocket, message: Message) -> None:
    """Return when what `up` sends reaches `down`: subscriptions take a moment to arrive at the broker."""
    wait_for(lambda: up.send(message) and down.socket.poll(50), "the receiver's subscription reaches the broker")
    wait_for(lambda: not take_all(down) and not down.socket.poll(50), "the trial messages are through")


def update(slot: int = 0, payload: bytes | memoryview = b"payload", **changed: Any) -> Update:
    rows: dict[str, Any] = {
        "run": "run", "epoch": 1, "slot": slot, "t": slot, "fragment": 3, "version": 1, "base_version": 0,
        "codec": "int4", "digest": "", **split(payload)[0], **changed,
    }  # fmt: skip
    return Update(**rows)


def delta(payload: bytes = b"12345678", **changed: Any) -> Delta:
    rows: dict[str, Any] = {
        "run": "run", "name": "node1", "incarnation": 7, "epoch": 1, "slot": 4, "attempt": 1, "base_version": 2,
        "fragment": 3, "tokens_from": 0, "tokens_to": 10, "steps_from": 0, "steps_to": 1, "codec": "int4",
        **split(payload)[0], **changed,
    }  # fmt: skip
    return Delta(**rows)


class LinkThread:
    """What a learner's link does: polls its own sockets all the time, whatever the rest of the program is busy with."""

    def __init__(self, made: Context, address: Address, *prefixes: bytes) -> None:
        self.received: list[Message] = []
        self.proven = False
        self._outbox: list[Message] = []
        self._context, self._address, self._prefixes = made, address, prefixes
        self._waker = Waker()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Hand over for sending; it goes out as soon as a broker is heard."""
        self._outbox.append(message)
        self._waker.wake()

    def close(self) -> None:
        self._stopping = True
        self._waker.wake()
        self._thread.join()
        self._waker.close()

    def _run(self) -> None:
        up = PublishSocket(self._context, self._address.bulk_in, hwm_messages=HWM)
        down = downlink(self._context, self._address.bulk_out, *self._prefixes)
        poller = zmq.Poller()
        for socket in (up.socket, down.socket, self._waker.socket):
            poller.register(socket, zmq.POLLIN)
        while not self._stopping:
            poller.poll(100)
            self._waker.clear()
            up.read_subscriptions()
            self.proven = up.proven
            while self._outbox and up.send(self._outbox[0]):
                self._outbox.pop(0)
            take_all(down, self.received)
        up.close()
        down.close()
