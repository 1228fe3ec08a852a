"""What one holder of a key can do to a run of real processes: repeat, flood, fill the broker. The others train on."""

from __future__ import annotations

import contextlib
import socket as network
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import pytest
import zmq
from decoupled_diloco.common.auth_keys import revoke
from decoupled_diloco.common.config import CHUNK_BYTES
from decoupled_diloco.common.sockets import SubscribeSocket
from decoupled_diloco.common.wire import Alive, Beat, Call, Delta, Keyframe, Plane, Update, encode, prefix, split
from keyed import RUN, START_SECONDS, Insider, KeyedRun
from run import resident_mib
from waiting import wait_for

pytestmark = pytest.mark.timeout(500)  # whole runs, on a machine that may be busy with others

LIMIT_BYTES = 2**30
"""Of address space, for a broker that is to run out of it."""
LIMITING = f"""
import os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({LIMIT_BYTES}, {LIMIT_BYTES}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedRun]:
    with KeyedRun(tmp_path_factory.mktemp("insiders")) as run:
        run.key("learner", "mallory")
        run.key("observer", "owl")
        yield run


@pytest.fixture
def mallory(run: KeyedRun) -> Iterator[Insider]:
    with Insider(run, run.files["mallory"]) as mallory:
        yield mallory


class Meanwhile:
    """Does something over and over in a thread of its own, as fast as it goes."""

    def __init__(self, do: Callable[[], object]) -> None:
        self.times = 0
        self._do, self._stop = do, threading.Event()
        self._failure: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._do()
                self.times += 1
        except BaseException as failure:  # noqa: BLE001 handed to the test
            self._failure.append(failure)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        if self._failure:
            raise self._failure[0]


# --- old messages ----------------------------------------------------------------------------------------------------
def test_an_insider_that_repeats_what_the_syncer_said_is_not_delivered(run: KeyedRun, mallory: Insider) -> None:
    bulk = SubscribeSocket(mallory.context, mallory.address.bulk_out, hwm_messages=1000, key=mallory.key)
    for kind in ("fragment", "keyframe"):
        bulk.subscribe(prefix(RUN, kind))
    kept: list[Any] = []

    def heard_all() -> bool:
        mallory.listen()
        while (message := bulk.receive()) is not None:
            kept.append(message)
        return {type(m) for m in (*kept, *mallory.heard)} >= {Beat, Call, Update}

    wait_for(heard_all, "beats, calls and fragments are kept")
    bulk.close()
    old = [m for m in (*kept, *mallory.heard) if isinstance(m, Beat | Call | Update | Keyframe)]
    for message in old:
        mallory.send(message)
        mallory.send(replace(message, sequence=message.sequence + 10**6))
    run.wait_for_merges(4, "all go on")
    denied = run.events("rejected", "model_hash_differs", "data_differs")
    assert not [row for row in denied if row.get("message") in ("beat", "call", "fragment", "keyframe")]


def test_an_insider_that_repeats_its_own_answer_is_counted_once(run: KeyedRun, mallory: Insider) -> None:
    """Also much later, when nobody remembers the round: what covers work that is in the model is not merged again."""
    mallory.join()
    who: dict[str, Any] = {"run": RUN, "name": "mallory", "incarnation": mallory.incarnation}
    spent: dict[str, Any] = dict.fromkeys(
        ("last_step_age_seconds", "inner_seconds", "session_seconds", "since_first_step_seconds"), 0.0
    )

    def newest() -> Call | None:
        mallory.down.socket.poll(100)
        mallory.listen()
        calls = [c for m in mallory.heard for c in (m.calls if isinstance(m, Beat) else (m,)) if isinstance(c, Call)]
        return max(calls, key=lambda c: (c.slot, c.attempt), default=None)

    def tell() -> None:
        alive = Alive(**who, epoch=1, local_steps=4, tokens=512, step_seconds=0.05, **spent)
        mallory.send(alive, Plane.CONTROL)

    sent: list[list[bytes]] = []

    def merged() -> bool:
        call = newest()
        if call is not None and int4_bytes(call.fragment):
            tell()
            part = split(bytes(int4_bytes(call.fragment)))[0]  # no step at all: every scale is zero
            answer = Delta(**who, epoch=call.epoch, slot=call.slot, attempt=call.attempt, base_version=call.version,
                           tokens_from=0, tokens_to=512, steps_from=0, steps_to=4, codec="int4",
                           fragment=call.fragment, **part)  # fmt: skip
            sent.append([bytes(frame) for frame in encode(answer)])
            mallory.publish(sent[-1], Plane.BULK)
        return run.merged_with("mallory") > 0

    sizes: dict[int, int] = {}

    def int4_bytes(fragment: int) -> int:
        """How large an answer for this fragment is: as large as the syncer's own step."""
        while (message := bulk.receive()) is not None:
            if isinstance(message, Update):
                sizes[message.fragment] = message.size
        return sizes.get(fragment, 0)

    bulk = SubscribeSocket(mallory.context, mallory.address.bulk_out, hwm_messages=1000, key=mallory.key)
    bulk.subscribe(prefix(RUN, "fragment"))
    wait_for(merged, "an answer of hers is merged", 60)
    bulk.close()
    times = run.merged_with("mallory")
    for _ in range(3):
        for frames in sent:
            mallory.publish(frames, Plane.BULK)
        tell()
        run.wait_for_merges(2, "all go on")
    assert run.merged_with("mallory") <= times + 1, "one that was open may have been taken meanwhile"
    rows = [row for row in run.events("rejected") if row["learner"] == "mallory"]
    assert {row["reason"] for row in rows} & {"late", "overlap", "duplicate", "attempt"}, rows


# --- the network -----------------------------------------------------------------------------------------------------
class Tap:
    """Passes a connection on to the broker and keeps what went there."""

    def __init__(self, to: tuple[str, int]) -> None:
        self.bytes_up = bytearray()
        self._to = to
        self._listener = network.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = network.create_connection(self._to)
                for source, target, keep in ((near, far, True), (far, near, False)):
                    self._threads.append(threading.Thread(target=self._pass, args=(source, target, keep), daemon=True))
                    self._threads[-1].start()

    def _pass(self, source: network.socket, target: network.socket, keep: bool) -> None:
        with contextlib.suppress(OSError), source, target:
            while received := source.recv(2**16):
                if keep:
                    self.bytes_up += received
                target.sendall(received)

    def close(self) -> None:
        self._listener.shutdown(network.SHUT_RDWR)
        self._listener.close()


def test_an_eavesdropper_who_reads_the_network_sees_no_word_and_what_it_plays_again_is_not_delivered(
    run: KeyedRun,
) -> None:
    taps = [Tap(("127.0.0.1", run.address.port + offset)) for offset in range(4)]
    try:
        with TappedInsider(run, taps) as mallory:
            mallory.join()
            for _ in range(20):
                mallory.send(mallory.alive(), Plane.CONTROL)
            wait_for(lambda: len(taps[0].bytes_up) > 3000, "all of it went through the tap")
            kept = [bytes(tap.bytes_up) for tap in taps]
    finally:
        for tap in taps:
            tap.close()
    for octets in kept:
        assert not any(word in octets for word in (b"it/", b"mallory", b"hello", b"alive", b"incarnation"))
    before = sum(row["learner"] == "mallory" for row in run.events("joined", "returned", "rejected", "left"))
    for offset, octets in enumerate(kept):
        with (
            contextlib.suppress(OSError),  # it is right to hang up
            network.create_connection((run.address.host, run.address.port + offset), timeout=5) as again,
        ):
            again.sendall(octets)
            while again.recv(2**16):
                pass
    run.wait_for_merges(4, "all go on")
    assert before == sum(row["learner"] == "mallory" for row in run.events("joined", "returned", "rejected", "left"))


class TappedInsider(Insider):
    """An insider whose every connection goes through a tap."""

    def __init__(self, run: KeyedRun, taps: list[Tap]) -> None:
        self._taps = {run.address.port + offset: tap.port for offset, tap in enumerate(taps)}
        super().__init__(run, run.files["mallory"])

    def socket(self, kind: int, endpoint: str) -> Any:
        place, _, port = endpoint.rpartition(":")
        return super().socket(kind, f"{place}:{self._taps[int(port)]}")

    def alive(self) -> Alive:
        spent: dict[str, Any] = dict.fromkeys(
            ("step_seconds", "last_step_age_seconds", "inner_seconds", "session_seconds", "since_first_step_seconds"),
            0.0,
        )
        return Alive(run=RUN, name="mallory", incarnation=self.incarnation, epoch=1, local_steps=0, tokens=0, **spent)


# --- too much --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("what", ["what nobody may send", "answers that are none", "requests", "signs of life"])
def test_while_one_key_holder_floods_the_others_train_on(run: KeyedRun, mallory: Insider, what: str) -> None:
    who: dict[str, Any] = {"run": RUN, "name": "mallory", "incarnation": 5}
    big = split(bytes(CHUNK_BYTES))[0]
    order: dict[str, Any] = {"slot": 1, "attempt": 1, "base_version": 1, "tokens_from": 0, "tokens_to": 1,
                             "steps_from": 0, "steps_to": 1, "codec": "f32", "fragment": 0, "epoch": 1}  # fmt: skip
    spent: dict[str, Any] = dict.fromkeys(
        ("step_seconds", "last_step_age_seconds", "inner_seconds", "session_seconds", "since_first_step_seconds"), 0.5
    )
    kinds: dict[str, tuple[Sequence[bytes | memoryview], Plane]] = {
        "what nobody may send": (encode(Delta(**(who | {"name": "a"}), **order, **big)), Plane.BULK),
        "answers that are none": (encode(Delta(**who, **order, **big)), Plane.BULK),
        "requests": ([f"{RUN}/fetch/mallory/".encode(), b"\x80"], Plane.CONTROL),
        "signs of life": (encode(Alive(**who, epoch=1, local_steps=1, tokens=1, **spent)), Plane.CONTROL),
    }
    frames, plane = kinds[what]
    before = run.memory_mib()
    with Meanwhile(lambda: mallory.publish(frames, plane)) as flood:
        run.wait_for_merges(10, "under the flood")
        wait_for(lambda: flood.times > (50 if plane is Plane.BULK else 1000), "it is a flood", START_SECONDS)
        run.wait_for_merges(2, "under the flood still")
    run.wait_for_merges(2, "after it")
    now = run.memory_mib()
    assert now["broker"] - before["broker"] < 2.5 * 256 + 64, "more than its queues hold"
    assert now["syncer"] - before["syncer"] < 2.5 * 256 + 64


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedRun]:
    with KeyedRun(tmp_path_factory.mktemp("limited"), "a", around=[sys.executable, "-S", "-c", LIMITING]) as run:
        run.key("learner", "mallory")
        yield run


def send_endlessly(mallory: Insider) -> None:
    """Twice as much as the limit, in one message. libzmq keeps its parts until the last one is there, and no water mark
    counts them. It is the same megabyte over and over: it costs her nothing.
    """
    part = bytes(2**20)
    for _ in range(2 * LIMIT_BYTES // 2**20):
        mallory.up[Plane.BULK].send(part, zmq.SNDMORE, copy=False)
    mallory.up[Plane.BULK].send(b"")


def test_an_endless_message_breaks_off_where_the_broker_may_have_no_more_and_the_others_train_on(
    limited: KeyedRun,
) -> None:
    broker, usual = limited.processes["broker"].pid, limited.memory_mib()["broker"]
    with Insider(limited, limited.files["mallory"]) as mallory:
        send_endlessly(mallory)
        wait_for(lambda: resident_mib(broker) > usual + 200, "the message fills the broker", 90)
        wait_for(lambda: resident_mib(broker) < usual + 100, "it breaks off, and its room is free again", 90)
        limited.wait_for_merges(4, "all go on")


def test_a_broker_that_is_killed_at_its_limit_serves_again_and_the_revoked_key_fills_it_no_more(
    limited: KeyedRun,
) -> None:
    """As the kernel kills a container that is at its limit."""
    broker = limited.processes.pop("broker")
    usual = resident_mib(broker.pid)
    with Insider(limited, limited.files["mallory"]) as mallory:
        send_endlessly(mallory)
        wait_for(lambda: resident_mib(broker.pid) > usual + 200, "the message fills the broker", 90)
        revoke(limited.keys, role="learner", run=RUN, name="mallory")
        broker.child.kill()
        broker.child.wait()
        limited.start_broker()
        limited.wait_for_merges(4, "with the broker that was started again")
    assert limited.memory_mib()["broker"] < usual + 100
