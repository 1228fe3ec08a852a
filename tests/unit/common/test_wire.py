"""Every message comes back as it was sent, and whatever else arrives gives Malformed and nothing else."""

from __future__ import annotations

import pickle
import struct
import tracemalloc
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgpack
import pytest
from decoupled_diloco.common.config import (
    CHUNK_BYTES,
    CODECS,
    MAX_FRAGMENTS,
    MESSAGE_BYTES,
    NAME_PATTERN,
    RunSettings,
    TaskSettings,
)
from decoupled_diloco.common.errors import Malformed
from decoupled_diloco.common.wire import (
    FETCH_WINDOW,
    FRAGMENT_KINDS,
    MAX_COUNT,
    MESSAGES,
    NAMED_KINDS,
    PROTOCOL,
    Alive,
    Assembly,
    Beat,
    Call,
    Chunked,
    Delta,
    Fetch,
    Hello,
    Message,
    Update,
    beat_topic,
    chunk_count,
    decode,
    encode,
    most_calls,
    most_learners,
    prefix,
    split,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from searching import examples
from transport import delta

# --- any message at all ----------------------------------------------------------------------------------------------
NAMES = st.from_regex(NAME_PATTERN, fullmatch=True)
COUNTS = st.integers(0, MAX_COUNT)
INCARNATIONS = st.integers(1, MAX_COUNT)
FRAGMENTS = st.integers(0, MAX_FRAGMENTS)
SECONDS = st.floats(0, 1e12)
PRINTABLE = st.characters(exclude_categories=["Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"])


def text(limit: int) -> st.SearchStrategy[str]:
    return st.text(PRINTABLE, max_size=limit)


def tuples(inner: st.SearchStrategy[Any], limit: int = 5) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(inner, max_size=limit).map(tuple)


SCALARS = st.dictionaries(
    text(20), st.one_of(st.booleans(), st.integers(-(2**63), 2**63), st.floats(allow_nan=False), text(30)), max_size=5
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "run": NAMES, "name": NAMES, "sequence": COUNTS, "epoch": COUNTS, "slot": COUNTS, "t": COUNTS, "steps": COUNTS,
    "fragment": FRAGMENTS, "version": COUNTS, "base_version": COUNTS, "attempt": INCARNATIONS,
    "incarnation": INCARNATIONS, "received": tuples(NAMES), "versions": tuples(COUNTS), "step_seconds": SECONDS,
    "settings": SCALARS, "task": SCALARS, "fingerprint": text(64), "data_hash": text(64), "model_hash": text(64),
    "syncer": COUNTS, "role": st.sampled_from(["learner", "observer"]), "device": text(64), "host": text(255),
    "pid": st.integers(0, 2**31), "bulk_proven": st.booleans(), "fragments": FRAGMENTS, "plan_digest": text(64),
    "state": st.sampled_from(["waiting", "seeding", "running", "draining", "finished", "stopping"]),
    "verdict": st.sampled_from(["welcome", "wait", "seed", "refused", "finished", "reset", "notice"]),
    "missing": tuples(FRAGMENTS), "local_steps": COUNTS, "tokens": COUNTS, "last_step_age_seconds": SECONDS,
    "inner_seconds": SECONDS, "session_seconds": SECONDS, "since_first_step_seconds": SECONDS,
    "loss": st.none() | st.floats(-1e15, 1e15), "digests": tuples(text(16)), "digest_versions": tuples(COUNTS),
    "bytes_up": COUNTS, "bytes_down": COUNTS, "gaps": COUNTS, "digest": text(64), "tokens_from": COUNTS,
    "what": st.sampled_from(["update", "keyframe", "initial"]), "chunks": tuples(st.integers(0, 2**22), FETCH_WINDOW),
    "tokens_to": COUNTS, "steps_from": COUNTS, "steps_to": COUNTS, "codec": st.sampled_from(CODECS),
    "nonce": INCARNATIONS, "buffer_source": st.none() | st.tuples(NAMES, INCARNATIONS), "buffers_held": st.booleans(),
    "buffers": st.none() | COUNTS,
}  # fmt: skip
PARTICULAR: dict[tuple[str, str], st.SearchStrategy[Any]] = {
    ("call", "contributors"): tuples(st.tuples(NAMES, INCARNATIONS)),
    ("fragment", "contributors"): tuples(st.tuples(NAMES, INCARNATIONS, COUNTS, COUNTS)),
    ("goodbye", "reason"): st.sampled_from(["finished", "left", "stopped", "diverged", "failed"]),
    ("welcome", "reason"): text(1000),
}
CHUNK_FIELDS = {"size", "chunk", "chunks", "crc", "payload"}
PAYLOADS = st.binary(max_size=300) | st.integers(1, 2 * CHUNK_BYTES + 5).map(bytes)


@st.composite
def messages(draw: st.DrawFn, kind: str) -> Message:
    cls = MESSAGES[kind]
    values: dict[str, Any] = {}
    for field in fields(cls):
        if field.name == "calls":
            values["calls"] = draw(tuples(messages("call"), 3))
        elif field.name == "payload" and kind == "hello":
            values["payload"] = draw(st.binary(max_size=300))
        elif not (issubclass(cls, Chunked) and field.name in CHUNK_FIELDS):
            values[field.name] = draw(
                PARTICULAR[of] if (of := (kind, field.name)) in PARTICULAR else FIELDS[field.name]
            )
    if issubclass(cls, Chunked):
        values |= draw(st.sampled_from(split(draw(PAYLOADS))))
    return cls(**values)


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", sorted(MESSAGES))
def test_every_message_comes_back_as_it_was_sent_under_a_topic_that_ends_in_a_delimiter(kind: str) -> None:
    @settings(max_examples=examples(20), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(messages(kind))
    def comes_back(message: Message) -> None:
        frames = encode(message)
        assert decode(frames) == message
        assert decode([memoryview(frame) for frame in frames]) == message, "views of received frames do as well"
        topic = message.topic()
        assert topic.startswith(beat_topic(message.run) if kind == "beat" else prefix(message.run, kind))
        assert topic.endswith(b"/")
        assert topic.count(b"/") == 2 + (kind in FRAGMENT_KINDS) + (kind in NAMED_KINDS) + (kind == "beat")

    comes_back()


@settings(max_examples=examples(200))
@given(st.lists(st.binary(max_size=200), max_size=5), st.sampled_from(sorted(MESSAGES)), st.booleans())
def test_random_frames_are_malformed_and_nothing_else(frames: list[bytes], kind: str, under_a_topic: bool) -> None:
    if under_a_topic and frames:
        frames[0] = f"run/{kind}/3/a/".encode()
    with pytest.raises(Malformed):
        decode(frames)


@settings(max_examples=examples(200))
@given(st.data())
def test_a_genuine_message_with_a_few_bytes_changed_is_malformed_or_still_whole(data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in encode(delta(payload=b"\x01" * 50))]
    for _ in range(data.draw(st.integers(1, 3))):
        frame = data.draw(st.sampled_from(frames))
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert isinstance(decode([bytes(frame) for frame in frames]), Delta)
    except Malformed as wrong:
        assert wrong.reason  # noqa: PT017 - either outcome is right


# --- hostile frames --------------------------------------------------------------------------------------------------
def header_of(message: Message) -> dict[str, Any]:
    rows: dict[str, Any] = msgpack.unpackb(encode(message)[1])
    return rows


def with_header(**changed: Any) -> list[bytes]:
    """The frames of a genuine delta whose header says something else."""
    return raw_header(msgpack.packb(header_of(delta()) | changed))


def raw_header(header: bytes) -> list[bytes]:
    topic, _, payload = encode(delta())
    return [bytes(topic), header, bytes(payload)]


class Opener:
    """What runs when somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


GENUINE = [bytes(frame) for frame in encode(delta())]
HEADER = GENUINE[1]
HOSTILE: dict[str, list[bytes]] = {
    "no frames": [],
    "one empty frame": [b""],
    "empty frames only": [b"", b"", b""],
    "one frame too few": GENUINE[:2],
    "one frame too many": [*GENUINE, b""],
    "a topic alone": GENUINE[:1],
    "4 KiB of noise in the header": raw_header(bytes(range(256)) * 16),
    "200 000 nested arrays": raw_header(b"\x91" * 200_000 + b"\xc0"),
    "200 000 nested maps": raw_header(b"\x81\xa1a" * 200_000 + b"\xc0"),
    "nested arrays in a field": raw_header(msgpack.packb(header_of(delta()))[:-1] + b"\x91" * 300 + b"\xc0"),
    "an array said to have 2^32-1 entries": raw_header(b"\xdd\xff\xff\xff\xff"),
    "a map said to have 2^32-1 entries": raw_header(b"\xdf\xff\xff\xff\xff"),
    "text said to have 2^32-1 bytes": raw_header(b"\x81\xa3run\xdb\xff\xff\xff\xff"),
    "bytes said to have 2^32-1 bytes": raw_header(b"\x81\xa3run\xc6\xff\xff\xff\xff"),
    "an extension said to have 2^32-1 bytes": raw_header(b"\x81\xa3run\xc9\xff\xff\xff\xff\x05"),
    "arrays within arrays, each said to be long": raw_header(
        b"\x81\xa3run" + (b"\xdd" + struct.pack(">I", 100_000)) * 500 + b"\xc0" * 200_000
    ),
    "nothing in the header": raw_header(b""),
    "a header cut short": raw_header(HEADER[:-3]),
    "bytes behind the header": raw_header(HEADER + b"\xc0"),
    "a second header behind the first": raw_header(HEADER + HEADER),
    "a key that stands twice": raw_header(
        bytes([HEADER[0], HEADER[1], HEADER[2] + 1]) + HEADER[3:] + msgpack.packb("epoch") + b"\x02"
    ),
    "a bare integer": raw_header(b"\x07"),
    "a list instead of a map": raw_header(msgpack.packb([1, 2])),
    "a key that is no text": raw_header(msgpack.packb({1: 2})),
    "an extension type": raw_header(msgpack.packb({"run": msgpack.ExtType(5, b"x" * 16)})),
    "an empty extension type": with_header(epoch=msgpack.ExtType(5, b"")),
    "a time stamp": with_header(epoch=msgpack.Timestamp(1, 0)),
    "bytes in place of text": with_header(name=b"node1"),
    "bad UTF-8 in a name": raw_header(HEADER.replace(b"\xa5node1", b"\xa5nod\xff\xfe")),
    "a name with a newline": with_header(name="node\n1"),
    "a name with a colon": with_header(name="node:1"),
    "a name with an asterisk": with_header(name="node*"),
    "an empty name": with_header(name=""),
    "a name of 41 letters": with_header(name="n" * 41),
    "a name ending in a newline": with_header(name="node1\n"),
    "another name in the header than in the topic": with_header(name="node10"),
    "another run in the header than in the topic": with_header(run="run1"),
    "another fragment in the header than in the topic": with_header(fragment=30),
    "a negative fragment": with_header(fragment=-1),
    "a fragment number that is a float": with_header(fragment=3.0),
    "a fragment number that is true": with_header(fragment=True),
    "a counter above 2^53": with_header(tokens_to=2**53 + 1),
    "a counter of 2^64-1": with_header(tokens_to=2**64 - 1),
    "incarnation 0": with_header(incarnation=0),
    "a missing field": raw_header(msgpack.packb({k: v for k, v in header_of(delta()).items() if k != "codec"})),
    "an unknown field": with_header(shape=[10**12]),
    "an unknown codec": with_header(codec="object"),
    "another protocol": with_header(protocol=PROTOCOL + 1),
    "no protocol": raw_header(msgpack.packb({k: v for k, v in header_of(delta()).items() if k != "protocol"})),
    "10^12 elements declared with a few bytes": with_header(size=10**12, chunks=chunk_count(10**12)),
    "a size that its chunks do not have": with_header(size=10**12),
    "a chunk beyond the last": with_header(chunk=1),
    "a payload longer than declared": [*GENUINE[:2], b"123456789"],
    "a payload shorter than declared": [*GENUINE[:2], b""],
    "a payload with one bit changed": [*GENUINE[:2], b"12345679"],
    "an unknown kind": [b"run/eval/", *GENUINE[1:]],
    "a topic without its last delimiter": [b"run/delta/3/node1", *GENUINE[1:]],
    "a topic that is no text": [b"run/\xff\xfe/3/node1/", *GENUINE[1:]],
    "a topic of a MiB": [b"run/" * 2**18, *GENUINE[1:]],
    "the topic of another kind": [b"run/seed/3/node1/", *GENUINE[1:]],
    "a header above the largest message": [GENUINE[0], b"\xc0" * (MESSAGE_BYTES + 1), GENUINE[2]],
}  # fmt: skip


@pytest.mark.parametrize("frames", HOSTILE.values(), ids=HOSTILE)
def test_what_is_not_a_message_is_malformed_and_takes_no_more_memory_than_itself(frames: list[bytes]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Malformed) as caught:
            decode(frames)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = sum(len(frame) for frame in frames)
    assert caught.value.reason.isidentifier(), "the reason is a word that counters and Redis fields can carry"
    assert str(caught.value).isprintable(), "what the peer wrote cannot forge a line in the log"
    assert len(str(caught.value)) < 1000
    assert peak < 200_000 + 12 * size, f"{peak} bytes taken for a message of {size}"


def test_a_pickle_inside_a_message_is_never_opened(tmp_path: Path) -> None:
    bomb, trace = pickle.dumps(Opener(tmp_path / "was-here")), tmp_path / "was-here"
    with pytest.raises(Malformed):
        decode(raw_header(bomb))
    with pytest.raises(Malformed):
        decode(with_header(codec=bomb.decode("latin-1")))
    message = decode(encode(delta(bomb)))
    assert isinstance(message, Delta)
    assert bytes(message.payload) == bomb, "as a payload it is bytes like any others"
    assert not trace.exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e16, "1", None, True])
def test_seconds_that_are_no_finite_number_are_malformed(value: Any) -> None:
    alive = Alive(
        run="run", name="a", incarnation=1, epoch=1, local_steps=0, tokens=0, step_seconds=0, last_step_age_seconds=0,
        inner_seconds=0, session_seconds=0, since_first_step_seconds=0,
    )  # fmt: skip
    with pytest.raises(Malformed, match="step_seconds"):
        decode([alive.topic(), msgpack.packb(header_of(alive) | {"step_seconds": value})])


def test_a_call_inside_a_beat_is_checked_like_any_other() -> None:
    call = Call(run="run", epoch=1, slot=1, t=1, fragment=1, version=1, attempt=1)
    beat = Beat(run="run", epoch=1, state="running", t=1, steps=9, step_seconds=0.1, syncer=1, calls=(call,))
    rows = header_of(beat)
    for changed in ({"attempt": 0}, {"received": ["A:*"]}, {"more": 1}):
        with pytest.raises(Malformed):
            decode([beat.topic(), msgpack.packb(rows | {"calls": [rows["calls"][0] | changed]})])
    not_calls: list[Any] = [[1], [None], [[]], {}, "calls"]
    for calls in not_calls:
        with pytest.raises(Malformed):
            decode([beat.topic(), msgpack.packb(rows | {"calls": calls})])


def test_a_fetch_asks_for_no_more_chunks_than_may_be_in_flight() -> None:
    def fetch(chunks: int) -> Fetch:
        asked = tuple(range(chunks))
        return Fetch(run="run", name="a", incarnation=1, epoch=1, what="keyframe", fragment=1, version=2, chunks=asked)

    decode(encode(fetch(FETCH_WINDOW)))
    with pytest.raises(Malformed, match="chunks"):
        decode(encode(fetch(FETCH_WINDOW + 1)))


# --- topics and chunks -----------------------------------------------------------------------------------------------
def test_no_run_fragment_or_learner_is_a_prefix_of_another() -> None:
    assert not delta(run="a2").topic().startswith(prefix("a", "delta"))
    assert not delta(fragment=10).topic().startswith(prefix("run", "delta", 1))
    assert (
        not Hello(run="run", name="node10", incarnation=1, role="learner", fingerprint="", bulk_proven=True)
        .topic()
        .startswith(prefix("run", "hello", "node1"))
    )
    assert not beat_topic("a2").startswith(beat_topic("a"))


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_chunks_in_any_order_and_repeated_make_the_payload_again(size: int) -> None:
    payload = bytes(i * 31 % 251 for i in range(1000)) * (size // 1000 + 1)
    parts = [
        Update(run="r", epoch=1, slot=1, t=1, fragment=1, version=1, base_version=0, codec="f32", digest="", **part)
        for part in split(payload[:size])
    ]
    assembly = Assembly(size)
    done = [assembly.add(part) for part in [*reversed(parts), parts[0]]]
    assert done[len(parts) - 1 :] == [True, True]
    assert not any(done[: len(parts) - 1])
    assert bytes(assembly.payload) == payload[:size]
    assert [row["chunk"] for row in split(payload[:size], [0, len(parts), 10**6])] == [0], "chunks beyond are left out"


def test_a_chunk_of_another_size_does_not_enter_an_assembly() -> None:
    with pytest.raises(Malformed, match="size"):
        Assembly(7).add(delta())


@pytest.mark.parametrize(("fragments", "calls"), [(24, 2), (24, 24), (2000, 1000), (MAX_FRAGMENTS, 2)])
def test_the_largest_beat_and_update_of_the_most_learners_and_calls_can_be_sent(fragments: int, calls: int) -> None:
    def named(learners: int) -> list[tuple[str, int]]:
        return [(f"{number:040}", MAX_COUNT) for number in range(learners)]

    def size(message: Message) -> int:
        decode(encode(message))
        return sum(len(frame) for frame in encode(message))

    learners = most_learners(fragments, calls)
    assert most_calls(fragments, learners) >= calls
    names = named(learners)
    far: dict[str, Any] = dict.fromkeys(("epoch", "slot", "t", "version"), MAX_COUNT) | {"run": "r" * 40}
    asked = Call(**far, fragment=MAX_FRAGMENTS, attempt=MAX_COUNT, contributors=tuple(names),
                 received=tuple(name for name, _ in names))  # fmt: skip
    beat = Beat(run="r" * 40, epoch=MAX_COUNT, state="running", t=MAX_COUNT, steps=MAX_COUNT, step_seconds=1e12,
                versions=(MAX_COUNT,) * fragments, calls=(asked,) * calls, settings=RunSettings().to_map(),
                task=TaskSettings().to_map(), fingerprint="f" * 64, syncer=MAX_COUNT)  # fmt: skip
    assert size(beat) <= MESSAGE_BYTES
    merged = tuple((*pair, MAX_COUNT, MAX_COUNT) for pair in names)
    update = Update(**far, base_version=MAX_COUNT, fragment=MAX_FRAGMENTS, contributors=merged, codec="int8",
                    digest="d" * 64, **split(bytes(CHUNK_BYTES))[0])  # fmt: skip
    assert size(update) <= MESSAGE_BYTES
