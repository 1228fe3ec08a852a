"""A minute of frames that nobody should send, at a broker, a syncer and learners that train meanwhile.

Who sends them: a learner with a key of its own (anything at all), a holder of the syncer's key (what no decoder may
take: what it may take, a syncer may say), an observer (subscriptions), and a stranger (bytes at the ports). All is made
by hypothesis; the seed of each batch is printed when something ends.
"""

from __future__ import annotations

import contextlib
import random
import socket as network
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
import msgpack
import pytest
import zmq
from decoupled_diloco.common.errors import Malformed
from decoupled_diloco.common.wire import (
    CHECKS,
    MESSAGES,
    Alive,
    Beat,
    Call,
    Delta,
    Fetch,
    Goodbye,
    Hello,
    Keyframe,
    Message,
    Ping,
    Seed,
    Update,
    Welcome,
    decode,
    encode,
    split,
)
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st
from keyed import RUN, Insider, KeyedRun

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(600)]

SHARES = {"learner": 26, "syncer": 16, "subscriptions": 8, "bytes": 10}
"""Seconds."""
BATCH = 200
GROWTH_MIB = {"broker": 64, "syncer": 96, "a": 96, "b": 96}
"""What each process may have more than before: caches fill up, and merging takes room now and then."""
Frames = Sequence[bytes]


def test_the_shares_make_a_minute() -> None:
    assert sum(SHARES.values()) >= 60


@dataclass
class Live:
    run: KeyedRun
    before: dict[str, float]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with KeyedRun(tmp_path_factory.mktemp("fuzz")) as run:
        run.key("learner", "mallory")
        run.key("observer", "nosy")
        run.wait_for_merges(20, "all that grows at first has grown")
        yield Live(run, run.memory_mib())


@pytest.fixture(autouse=True)
def unharmed(live: Live) -> Iterator[None]:
    """Whatever a test sent: everybody lives, everybody's work is merged, and nobody's memory has grown."""
    yield
    live.run.wait_for_merges(6, "after it")
    now = live.run.memory_mib()
    grown = {name: round(now[name] - live.before[name], 1) for name in now}
    assert all(grown[name] <= most for name, most in GROWTH_MIB.items()), grown
    print("grown by MiB", grown)


def for_seconds(seconds: float, live: Live, strategy: st.SearchStrategy[Any], send: Callable[[Any], None]) -> int:
    """How many examples of `strategy` were sent."""
    sent, due = 0, time.monotonic() + seconds
    while time.monotonic() < due:
        number = random.SystemRandom().randrange(2**32)

        @hypothesis.seed(number)
        @hypothesis.settings(
            max_examples=BATCH, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(strategy)
        def batch(example: Any) -> None:
            nonlocal sent
            if time.monotonic() < due:
                sent += 1
                send(example)

        batch()
        try:
            live.run.check_alive()
        except AssertionError as ended:
            raise AssertionError(f"in or after the batch with seed {number}") from ended
    print(f"{sent} sent in {seconds} s")
    return sent


# --- frames ----------------------------------------------------------------------------------------------------------
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=50),
    st.binary(max_size=50), st.sampled_from(["a", "b", "mallory", RUN, "f32", "int4", "finished", "reset", ""]),
    st.sampled_from([0, 1, 2**53, 2**53 + 1, -1, 10**6, 99_999, 1e15, 1e300, -0.0]),
    st.builds(lambda n: "x" * n, st.integers(60, 5000)),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=8), st.dictionaries(st.text(max_size=10), inner, max_size=5)),
    max_leaves=20,
)
DEEP = st.builds(lambda open_, depth: open_ * depth + b"\xc0", st.sampled_from([b"\x91", b"\x81\xa1a"]),
                 st.integers(5, 60_000))  # fmt: skip
HUGE = st.builds(
    lambda code, count, rest: code + count + rest,
    st.sampled_from([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"]),
    st.sampled_from([b"\xff\xff\xff\xff", b"\x00\x10\x00\x00", b"\x7f\xff\xff\xff"]),
    st.binary(max_size=100),
)
LONG = st.builds(lambda n: msgpack.packb([0] * n), st.integers(1000, 200_000))
HEADERS = st.one_of(st.binary(max_size=300), DEEP, HUGE, LONG, st.builds(msgpack.packb, VALUES))
PAYLOADS = st.one_of(
    st.binary(max_size=2000), st.builds(bytes, st.integers(0, 2**20 + 100)),
    st.binary(min_size=64, max_size=64),  # as long as the one in its place, and another
)  # fmt: skip


def templates(name: str, heard: Sequence[Message], incarnation: int) -> dict[str, Message]:
    """One message of every kind, as fits the run now as can be."""
    beats = [m for m in heard if isinstance(m, Beat)]
    calls = [m for m in heard if isinstance(m, Call)]
    epoch = beats[-1].epoch if beats else 1
    call = calls[-1] if calls else Call(run=RUN, epoch=epoch, slot=1, t=1, fragment=0, version=1, attempt=1)
    who: dict[str, Any] = {"run": RUN, "name": name, "incarnation": incarnation}
    part = split(b"\0" * 64)[0]
    update: dict[str, Any] = {"run": RUN, "epoch": epoch, "slot": call.slot, "t": call.t, "version": call.version + 1,
                              "fragment": call.fragment, "codec": "int4", "digest": "ab" * 32}  # fmt: skip
    alive: dict[str, Any] = dict.fromkeys(
        ("step_seconds", "last_step_age_seconds", "inner_seconds", "session_seconds", "since_first_step_seconds"), 0.5
    )
    made = [
        beats[-1] if beats else Beat(run=RUN, epoch=epoch, state="running", t=1, steps=9, step_seconds=0.1, syncer=1),
        call,
        Hello(**who, role="learner", fingerprint="cd" * 32, bulk_proven=True, payload=b"\x90"),
        Welcome(**who, epoch=epoch, verdict="reset"),
        Alive(**who, epoch=epoch, local_steps=10, tokens=1280, **alive),
        Goodbye(**who, reason="left", local_steps=10, tokens=1280),
        Fetch(**who, epoch=epoch, what="keyframe", fragment=call.fragment, version=call.version, chunks=(0,)),
        Delta(**who, epoch=epoch, slot=call.slot, attempt=call.attempt, base_version=call.version, tokens_from=0,
              tokens_to=128, steps_from=0, steps_to=1, codec="int4", fragment=call.fragment, **part),
        Update(**update, base_version=call.version, **part),
        Keyframe(run=RUN, epoch=epoch, t=call.t, version=call.version, digest="ab" * 32, fragment=call.fragment,
                 **part),
        Seed(**who, epoch=epoch, digest="ab" * 32, fragment=call.fragment, **part),
        Ping(run=RUN, name=name, nonce=1),
    ]  # fmt: skip
    return {message.KIND: replace(message, sequence=0) for message in made}


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, Any]:
    """What to do to a valid message; it is done to one of each kind, since inventing is slower than sending."""
    what = draw(st.sampled_from(
        ["field", "field", "field", "fields", "more", "less", "header", "cut", "flip", "topic", "payload", "frames",
         "valid"]
    ))  # fmt: skip
    field = st.integers(0, 30)
    made: dict[str, st.SearchStrategy[Any]] = {
        "field": st.tuples(field, VALUES), "fields": st.lists(st.tuples(field, VALUES), min_size=2, max_size=6),
        "more": st.tuples(st.text(max_size=20), VALUES), "less": field, "header": HEADERS, "cut": st.integers(0, 400),
        "flip": st.lists(st.tuples(st.integers(0, 400), st.integers(1, 255)), min_size=1, max_size=5),
        "topic": st.one_of(
            st.binary(max_size=260),
            st.builds(lambda *parts: "/".join(parts).encode(), st.sampled_from([RUN, "other", "_", ""]),
                      st.sampled_from([*MESSAGES, "x"]), st.sampled_from(["a", "b", "mallory", "1", "99999999", ""]),
                      st.sampled_from(["", "a/", "mallory/", "mallory-2/"])),
        ),
        "payload": PAYLOADS, "frames": st.lists(st.binary(max_size=100), max_size=6), "valid": st.none(),
    }  # fmt: skip
    return what, draw(made[what])


def altered(message: Message, what: str, how: Any) -> Frames:
    topic, header, *rest = (bytes(frame) for frame in encode(message))
    rows, names = msgpack.unpackb(header), sorted(CHECKS[type(message)])
    if what in ("field", "fields"):
        rows |= {names[number % len(names)]: value for number, value in ([how] if what == "field" else how)}
    elif what == "more":
        rows[how[0]] = how[1]
    elif what == "less":
        rows.pop(names[how % len(names)])
    if what in ("field", "fields", "more", "less"):
        header = msgpack.packb(rows)
        with contextlib.suppress(Exception):  # where the topic can follow, it does, and the header is looked into
            if what in ("field", "fields"):
                topic = replace(message, **{k: v for k, v in rows.items() if k in ("run", "name", "fragment")}).topic()
    elif what == "header":
        header = how
    elif what == "cut":
        header = header[:how]
    elif what == "flip":
        octets = bytearray(header)
        for place, bits in how:
            octets[place % len(octets)] ^= bits
        header = bytes(octets)
    elif what == "topic":
        topic = how
    elif what == "payload":
        rest = [how]
    elif what == "frames":
        return [topic, header, *rest, *how] if how else [topic]
    return [topic, header, *rest]


# --- who sends -------------------------------------------------------------------------------------------------------
def test_a_learner_that_sends_anything_does_no_harm(live: Live) -> None:
    with Insider(live.run, live.run.files["mallory"]) as mallory:
        mallory.join()

        def send(example: tuple[str, Any]) -> None:
            mallory.listen()
            for message in templates("mallory", list(mallory.heard), mallory.incarnation).values():
                mallory.publish(altered(message, *example), message.PLANE)

        assert for_seconds(SHARES["learner"], live, changes(), send) > 100
    reasons = {row["reason"] for row in live.run.events("rejected")}
    assert {"header", "field", "frames", "checksum"} <= reasons, "hardly anything reached the syncer"


def test_what_no_decoder_takes_does_no_harm_even_from_the_syncer(live: Live) -> None:
    with Insider(live.run, live.run.files["syncer"]) as twin:
        kinds = ["beat", "call", "welcome", "fragment", "keyframe"]

        def send(example: tuple[str, Any]) -> None:
            twin.listen()
            made = templates("a", list(twin.heard), 1)
            for message in (made[kind] for kind in kinds):
                frames = altered(message, *example)
                try:
                    decode(frames)
                except Malformed:
                    twin.publish(frames, message.PLANE)
                # else a syncer may say so

        assert for_seconds(SHARES["syncer"], live, changes(), send) > 100


def test_subscriptions_of_any_kind_do_no_harm(live: Live) -> None:
    with Insider(live.run, live.run.files["nosy"]) as nosy:
        sockets = [nosy.socket(zmq.XSUB, nosy.address.control_out), nosy.socket(zmq.XSUB, nosy.address.bulk_out)]
        whole = [f"{RUN}/call/", "_/beat/", "", f"{RUN}/", f"{RUN}/delta/", "other/beat/", f"{RUN}/welcome/nosy/"]
        prefixes = st.one_of(st.binary(max_size=300), st.sampled_from([text.encode() for text in whole]))
        frames = st.builds(
            lambda code, prefix: code + prefix, st.sampled_from([b"\1", b"\0", b"\2", b"", b"\xff"]), prefixes
        )

        def send(example: bytes) -> None:
            for socket in sockets:
                with contextlib.suppress(zmq.Again):  # by now it is barred, and nobody takes what it says
                    socket.send(example, zmq.NOBLOCK)

        for_seconds(SHARES["subscriptions"], live, frames, send)
        for socket in sockets:
            socket.close()


def test_a_stranger_s_bytes_at_the_ports_do_no_harm(live: Live) -> None:
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01"
    curve, null = (name.ljust(20, b"\0") + b"\0" * 32 for name in (b"CURVE", b"NULL"))
    hello = b"\x04\xc8\x05HELLO\x01\x00" + b"\0" * 72
    begins = st.sampled_from([b"", greeting, greeting + curve, greeting + null, greeting + curve + hello,
                              b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00"])  # fmt: skip
    rests = st.one_of(st.binary(max_size=400), st.builds(bytes, st.integers(1000, 100_000)),
                      st.builds(lambda code, size: code + b"\xff" * size, st.sampled_from([b"\x02", b"\x03", b"\x06"]),
                                st.integers(8, 64)))  # fmt: skip
    address = live.run.address

    def send(example: tuple[bytes, bytes, int]) -> None:
        begin, rest, offset = example
        with (
            contextlib.suppress(OSError),  # it is right to hang up
            network.create_connection((address.host, address.port + offset), timeout=5) as connection,
        ):
            connection.sendall(begin + rest)

    for_seconds(SHARES["bytes"], live, st.tuples(begins, rests, st.integers(0, 3)), send)


def test_everything_that_is_sent_has_a_valid_origin(tmp_path: Path) -> None:
    """What is altered is a message that passes as it is: otherwise nothing behind the first check is tried."""
    for message in templates("mallory", [], 7).values():
        assert type(decode(encode(message))) is type(message)
        assert altered(message, "valid", None)[1:2] == [bytes(encode(message)[1])]
