"""A hostile stranger: it listens to a run, and publishes what nobody should."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket as network
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import msgpack
import zmq
from decoupled_diloco.common.config import CHUNK_BYTES
from decoupled_diloco.common.sockets import SUBSCRIBE, Address, SubscribeSocket
from decoupled_diloco.common.wire import Delta, encode, split
from waiting import wait_for

Frames = list[bytes]


class Probe:
    """Connected to the four ports of a broker, as anybody can be."""

    def __init__(self, broker: str, run: str) -> None:
        self.address, self.run = Address.parse(broker), run
        self.sent_bytes = 0
        self._context: zmq.Context[Any] = zmq.Context()
        self._heard = SubscribeSocket(self._context, self.address.bulk_out, hwm_messages=1000)
        self._heard.subscribe(f"{run}/delta/".encode())
        self._up = [self._uplink(self.address.control_in), self._uplink(self.address.bulk_in)]

    def _uplink(self, endpoint: str) -> Any:
        socket = self._context.socket(zmq.XPUB)
        socket.setsockopt(zmq.LINGER, 2000)
        socket.setsockopt(zmq.XPUB_NODROP, 1)
        socket.connect(endpoint)
        wait_for(lambda: socket.poll(10) and socket.recv() == SUBSCRIBE, f"the broker listens at {endpoint}")
        return socket

    def delta(self) -> Delta:
        """The next genuine delta that passes by."""
        found = wait_for(self._next_delta, "a genuine delta passes by")
        assert found is not None
        return found

    def _next_delta(self) -> Delta | None:
        while (message := self._heard.receive()) is not None:
            if isinstance(message, Delta) and message.sequence:
                return message
        return None

    def publish(self, frames: Frames) -> None:
        """On both planes."""
        for socket in self._up:
            socket.send_multipart(frames)
            self.sent_bytes += sum(len(frame) for frame in frames)

    def send(self, delta: Delta, **changes: Any) -> None:
        """A delta with these changes, well-formed in all else. Its number 0 tells ours from a genuine one."""
        forged = replace(delta, sequence=0, **changes)
        self.publish([bytes(frame) for frame in encode(forged)])

    def send_raw(self, seed: int) -> None:
        """Random bytes to each of the four ports, after no greeting, half a greeting, and a whole one."""
        noise = random.Random(seed)
        greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48
        for endpoint in (self.address.control_in, self.address.control_out, self.address.bulk_in,
                         self.address.bulk_out):  # fmt: skip
            port = int(endpoint.rpartition(":")[2])
            for begin in (b"", greeting[:20], greeting):
                with (
                    contextlib.suppress(OSError),  # it is right to hang up
                    network.create_connection((self.address.host, port), timeout=5) as connection,
                ):
                    connection.sendall(begin + noise.randbytes(4096))
                    self.sent_bytes += 4096 + len(begin)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._heard.close()
        for socket in self._up:
            socket.close()
        self._context.term()


class _Pickled:
    """Whoever unpickles it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


def malformed(run: str, genuine: Delta, trap: Path) -> Iterator[Frames]:
    """Messages on a genuine delta's topic that are none. `trap` is a path that must not come to exist."""
    topic, header, payload = (bytes(frame) for frame in encode(genuine))
    rows = msgpack.unpackb(header)
    yield [b""]
    yield [topic]
    yield [topic, header]
    yield [topic, header, payload, b"one too many"]
    yield [topic, b"", payload]
    for bad in (
        random.Random(1).randbytes(4096),
        b"\x91" * 200_000,
        b"\x81\xa1a" * 60_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        header + b"\0",
        header[:-1],
        header[:1] + msgpack.packb("run") + msgpack.packb(run) + header[1:],
        b"\xde" + struct.pack(">H", len(rows) + 2) + header[3 if header[:1] == b"\xde" else 1 :]
        + (msgpack.packb("slot") + msgpack.packb(1)) * 2,
        msgpack.packb(7),
        msgpack.packb(msgpack.ExtType(1, b"x" * 10)),
        msgpack.packb({**rows, "slot": msgpack.Timestamp(1, 2)}),
        pickle.dumps(_Pickled(trap)),
    ):  # fmt: skip
        yield [topic, bad, payload]
    odd: list[dict[str, Any]] = [
        {"name": b"\xff\xfe"}, {"name": "a\nb"}, {"name": "a:b"}, {"name": "*"}, {"name": "../x"}, {"name": "x" * 41},
        {"fragment": -1}, {"fragment": 2**53}, {"size": 10**12}, {"size": -1}, {"chunks": 2**22, "size": 2**42},
        {"chunk": 5}, {"crc": 1}, {"codec": "pickle"}, {"codec": "f32\n"}, {"tokens_to": 2**64 - 1}, {"steps_to": 1.5},
        {"slot": None}, {"attempt": 0}, {"epoch": True}, {"protocol": 2}, {"run": "other"}, {"more": 1},
        {"incarnation": [1] * 10_000}, {"tokens_from": {"a": {"b": {"c": {}}}}},
    ]  # fmt: skip
    for changes in odd:
        yield [topic, msgpack.packb({**rows, **changes}, use_bin_type=False), payload]
    for name in (
        b"run/delta/0/a\nb/",
        topic[:-1],
        topic.upper(),
        run.encode() + b"/delta/-1/a/",
        b"/" * 200,
        b"\0" * 9,
    ):
        yield [name, header, payload]
    yield [topic, header, payload + b"\0"]
    yield [topic, header, pickle.dumps(_Pickled(trap))]
    yield [topic, header, b"\0" * CHUNK_BYTES]


def altered(genuine: Delta) -> Iterator[dict[str, Any]]:
    """Changes to a genuine delta that leave it well-formed and must keep it from being merged."""
    payload = bytes(genuine.payload)
    yield split(b"\xff" * len(payload))[0]  # not finite, whatever the codec
    yield split(b"\x7f\x80"[::-1] + payload[2:])[0]  # one infinite scale
    yield split(payload[:-1])[0]
    yield split(payload + b"\0" * 128)[0]
    yield split(b"")[0]
    yield {"tokens_from": 10, "tokens_to": 10}
    yield {"tokens_from": 11, "tokens_to": 10}
    yield {"steps_to": genuine.steps_from}
    yield {"base_version": genuine.base_version + 50}
    yield {"base_version": max(0, genuine.base_version - 50)} if genuine.base_version > 2 else {"base_version": 2**50}
    yield {"epoch": 0}
    yield {"epoch": genuine.epoch + 1000}
    yield {"slot": genuine.slot + 10**6}
    yield {"attempt": genuine.attempt + 1000}
    yield {"incarnation": genuine.incarnation % 2**52 + 1}
    yield {"name": "stranger"}
    yield {"fragment": 9_999}
    yield {"codec": "f32"}
    yield {"run": "other"}
    yield {"tokens_to": 2**53}  # taken, but it never counts
