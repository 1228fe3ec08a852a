"""Every message that travels, as a frozen dataclass with its frames beside it. docs/protocol.md is tested against this.

Frames: [topic][header: one msgpack map][at most one payload frame]. The topic is RUN "/" KIND "/" DETAIL "/"; the last
delimiter matters, since subscriptions match prefixes. Everything is checked by `decode` before anybody uses it; what
does not pass raises Malformed, whose `reason` is counted. No pickle, no extension types, no nesting deeper than 4.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar

import msgpack

from .config import CHUNK_BYTES, CODECS, MAX_FRAGMENTS, MAX_TENSORS, MESSAGE_BYTES, NAME_PATTERN
from .errors import Malformed
from .fragments import Layout, tensor_from_wire

PROTOCOL = 2
"""Both sides must speak the same; it stands in every header as `protocol`."""
MAX_COUNT = 2**53
"""Largest integer any counter may have: exact in every language that reads Redis."""
MAX_SECONDS = 1e12
MAX_LOSS = 1e15
"""Largest seconds and losses that travel. Senders bring their own figures into these ranges: none costs a message."""
GOODBYE_REASONS = ("finished", "left", "stopped", "diverged", "failed")
MAX_CALLS = 1_000
"""Open calls in one Beat."""
LAYOUT_STEP_BYTES, LAYOUT_ROW_BYTES, LAYOUT_BYTES = 2**14, 2**16, 2**25
"""A Hello's layout is inflated in steps; one tensor with all its names takes no more than a row's bytes, and the whole
no more than the last figure: a message may inflate to a thousand times its size."""
MAX_NAMES = 1024
"""Under so many names one tensor may stand."""
FETCH_WINDOW = 16
"""Chunks that one asker may have in flight."""


class Plane(Enum):
    """Two planes, so that bulk never starves control; each is one XSUB/XPUB pair of ports in the broker."""

    CONTROL = 0
    BULK = 1


# --- what a field may hold -------------------------------------------------------------------------------------------
Check = Callable[[Any], Any]
"""Takes what msgpack gave, returns what the dataclass holds, raises ValueError."""


def _whole(low: int = 0, high: int = MAX_COUNT) -> Check:
    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return check


def _real(low: float = 0.0, high: float = 1e15) -> Check:
    def check(value: Any) -> float:
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            raise ValueError(f"must be a finite number from {low} to {high}")
        return float(value)

    return check


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("must be true or false")
    return value


def _text(limit: int) -> Check:
    def check(value: Any) -> str:
        if type(value) is not str or len(value) > limit or not (value.isprintable() or value == ""):
            raise ValueError(f"must be printable text of at most {limit} characters")
        return value

    return check


def _one_of(*allowed: str) -> Check:
    def check(value: Any) -> str:
        if type(value) is not str or value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return value

    return check


def _name(value: Any) -> str:
    if type(value) is not str or not NAME_PATTERN.fullmatch(value):
        raise ValueError(f"must match {NAME_PATTERN.pattern}")
    return value


def _or_none(inner: Check) -> Check:
    return lambda value: None if value is None else inner(value)


def _list(inner: Check, limit: int) -> Check:
    def check(value: Any) -> tuple[Any, ...]:
        if type(value) not in (list, tuple) or len(value) > limit:
            raise ValueError(f"must be a list of at most {limit}")
        return tuple(inner(v) for v in value)

    return check


def _tuple(*inner: Check) -> Check:
    def check(value: Any) -> tuple[Any, ...]:
        if type(value) not in (list, tuple) or len(value) != len(inner):
            raise ValueError(f"must be a list of {len(inner)}")
        return tuple(c(v) for c, v in zip(inner, value, strict=True))

    return check


def _scalars(limit: int) -> Check:
    """A flat map of text to scalars (settings; their meaning is checked by config)."""

    def check(value: Any) -> dict[str, Any]:
        if type(value) is not dict or len(value) > limit:
            raise ValueError(f"must be a map of at most {limit} entries")
        for key, v in value.items():
            if type(key) is not str or len(key) > 64 or type(v) not in (str, int, float, bool):
                raise ValueError("must map short text to scalars")
            if type(v) is str and len(v) > 4096:
                raise ValueError("has a text that is too long")
        return value

    return check


def _part(cls: type[Any]) -> Check:
    """A message inside another one (open calls inside a Beat), as its map of fields."""

    def check(value: Any) -> Any:
        if isinstance(value, cls):
            return value
        if type(value) is not dict:
            raise ValueError("must be a map")
        return _build(cls, value)

    return check


_epoch, _version, _count = _whole(0), _whole(0), _whole(0)
_fragment, _incarnation = _whole(0, MAX_FRAGMENTS), _whole(1)
_digest = _text(64)
_seconds = _real(0, MAX_SECONDS)


def _f(check: Check, **more: Any) -> Any:
    return field(metadata={"check": check}, **more)


# --- messages --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Message:
    """What all messages share. `sequence` numbers a publisher's messages of one KIND; receivers count the gaps."""

    KIND: ClassVar[str] = ""
    PLANE: ClassVar[Plane] = Plane.CONTROL
    HAS_PAYLOAD: ClassVar[bool] = False

    run: str = _f(_name)
    sequence: int = _f(_count, default=0)
    """0 = not numbered (Welcome, Keyframe: not everybody receives every one)."""

    def topic(self) -> bytes:
        """RUN/KIND/, then FRAGMENT/ and NAME/ where the message has them; a learner's topics end with its name."""
        parts = [self.run, self.KIND]
        parts += [str(self.fragment)] if self.KIND in FRAGMENT_KINDS else []  # type: ignore[attr-defined]
        parts += [self.name] if self.KIND in NAMED_KINDS else []  # type: ignore[attr-defined]
        return ("/".join(parts) + "/").encode()


@dataclass(frozen=True, kw_only=True)
class Chunked(Message):
    """A bulk message: one chunk of at most CHUNK_BYTES of a larger payload."""

    PLANE: ClassVar[Plane] = Plane.BULK
    HAS_PAYLOAD: ClassVar[bool] = True

    fragment: int = _f(_fragment)
    size: int = _f(_whole(0, 2**42))
    """Bytes of the whole payload, all chunks together."""
    chunk: int = _f(_whole(0, 2**22))
    chunks: int = _f(_whole(1, 2**22))
    crc: int = _f(_whole(0, 2**32 - 1))
    """CRC-32 of this chunk's payload."""
    payload: bytes | memoryview = b""
    """Travels as the third frame, not in the header."""


@dataclass(frozen=True, kw_only=True)
class Call(Message):
    """Syncer -> all: whoever has stepped since it last adopted or captured this fragment, answer with a Delta."""

    KIND: ClassVar[str] = "call"

    epoch: int = _f(_epoch)
    slot: int = _f(_count)
    t: int = _f(_count)
    """Global step at which the slot opened."""
    fragment: int = _f(_fragment)
    version: int = _f(_version)
    """The fragment's current version, v; the merge will make v + 1."""
    attempt: int = _f(_whole(1))
    contributors: tuple[tuple[str, int], ...] = _f(_list(_tuple(_name, _incarnation), 10_000), default=())
    """(name, incarnation) of those merged into v: one that has not adopted v must fetch it before it answers."""
    received: tuple[str, ...] = _f(_list(_name, 10_000), default=())
    """Whose answers to this attempt are complete; the others resend theirs."""


@dataclass(frozen=True, kw_only=True)
class Beat(Message):
    """Syncer -> all, each second, on both planes, under `_/beat/RUN/`: all that a joiner must know."""

    KIND: ClassVar[str] = "beat"

    epoch: int = _f(_epoch)
    state: str = _f(_one_of("waiting", "seeding", "running", "draining", "finished", "stopping"))
    t: int = _f(_count)
    steps: int = _f(_count)
    """T."""
    step_seconds: float = _f(_seconds)
    """Typical seconds of an inner step (lower median over live learners); 0 = not known yet."""
    versions: tuple[int, ...] = _f(_list(_version, MAX_FRAGMENTS), default=())
    """Current version of each fragment; empty until the run is seeded."""
    calls: tuple[Call, ...] = _f(_list(_part(Call), MAX_CALLS), default=())
    """Every open call, again."""
    settings: dict[str, Any] = _f(_scalars(64), default_factory=dict)
    """RunSettings."""
    task: dict[str, Any] = _f(_scalars(64), default_factory=dict)
    """TaskSettings; empty where learners bring their own model."""
    fingerprint: str = _f(_digest, default="")
    """The run's layout; empty until the run is seeded."""
    data_hash: str = _f(_digest, default="")
    model_hash: str = _f(_digest, default="")
    """sha256 over all final fragments; set when finished."""
    buffer_source: tuple[str, int] | None = _f(_or_none(_tuple(_name, _incarnation)), default=None)
    """(name, incarnation) of the learner that is asked for its Buffers, once finished."""
    buffers_held: bool = _f(_flag, default=False)
    """The final model has its buffers: no learner need wait to be asked."""
    syncer: int = _f(_whole(0))
    """Random number of the syncer process: a Beat of another one with a higher epoch supersedes it."""

    def topic(self) -> bytes:
        return beat_topic(self.run)


@dataclass(frozen=True, kw_only=True)
class Hello(Message):
    """Learner or observer -> syncer, repeated until a Welcome comes. The payload is the layout, as msgpack."""

    KIND: ClassVar[str] = "hello"
    HAS_PAYLOAD: ClassVar[bool] = True

    name: str = _f(_name)
    incarnation: int = _f(_incarnation)
    role: str = _f(_one_of("learner", "observer"))
    fingerprint: str = _f(_digest)
    data_hash: str = _f(_digest, default="")
    device: str = _f(_text(64), default="")
    host: str = _f(_text(255), default="")
    pid: int = _f(_whole(0, 2**31), default=0)
    bulk_proven: bool = _f(_flag)
    """The broker's subscription was read on the bulk uplink: deltas will not be lost silently."""
    payload: bytes | memoryview = b""


@dataclass(frozen=True, kw_only=True)
class Welcome(Message):
    """Syncer -> one learner: the answer to its Hello, and at any time an order (reset) or a warning (notice)."""

    KIND: ClassVar[str] = "welcome"

    name: str = _f(_name)
    incarnation: int = _f(_incarnation)
    epoch: int = _f(_epoch)
    verdict: str = _f(_one_of("welcome", "wait", "seed", "refused", "finished", "reset", "notice"))
    """wait: ask again (being seeded, or the name's old holder is not silent yet). seed: send version 0.
    reset: drop what waits and fetch every fragment anew. notice: `reason` says which messages are rejected and why;
    nothing is to be done by the program."""
    reason: str = _f(_text(1000), default="")
    fragments: int = _f(_whole(0, MAX_FRAGMENTS), default=0)
    """P."""
    plan_digest: str = _f(_digest, default="")
    missing: tuple[int, ...] = _f(_list(_fragment, MAX_FRAGMENTS), default=())
    """With verdict seed: fragments (P = the static part) that are not complete yet."""


@dataclass(frozen=True, kw_only=True)
class Alive(Message):
    """Learner -> syncer, each second: cumulative counters since its own start."""

    KIND: ClassVar[str] = "alive"

    name: str = _f(_name)
    incarnation: int = _f(_incarnation)
    epoch: int = _f(_epoch)
    """Of the versions below."""
    local_steps: int = _f(_count)
    tokens: int = _f(_count)
    step_seconds: float = _f(_seconds)
    """EMA of the inner step; 0 = no step timed yet (the first after a join is left out)."""
    last_step_age_seconds: float = _f(_seconds)
    inner_seconds: float = _f(_seconds)
    """Inside inner steps, since the first one began."""
    session_seconds: float = _f(_seconds)
    """Inside session calls, since the first inner step began: what the product costs the training thread."""
    since_first_step_seconds: float = _f(_seconds)
    loss: float | None = _f(_or_none(_real(-MAX_LOSS, MAX_LOSS)), default=None)
    versions: tuple[int, ...] = _f(_list(_version, MAX_FRAGMENTS), default=())
    """Adopted version of each fragment."""
    digests: tuple[str, ...] = _f(_list(_text(16), MAX_FRAGMENTS), default=())
    """First 16 hex digits of sha256 of each received public fragment, at `digest_versions`."""
    digest_versions: tuple[int, ...] = _f(_list(_version, MAX_FRAGMENTS), default=())
    bytes_up: int = _f(_count, default=0)
    bytes_down: int = _f(_count, default=0)
    gaps: int = _f(_count, default=0)
    """Messages that did not arrive, by the numbers of those that did."""


@dataclass(frozen=True, kw_only=True)
class Goodbye(Message):
    """Learner -> syncer: it leaves. After Finished this is the acknowledgement."""

    KIND: ClassVar[str] = "goodbye"

    name: str = _f(_name)
    incarnation: int = _f(_incarnation)
    reason: str = _f(_one_of(*GOODBYE_REASONS))
    local_steps: int = _f(_count)
    tokens: int = _f(_count)
    model_hash: str = _f(_digest, default="")
    buffers: int | None = _f(_or_none(_count), default=0)
    """After the end of a run: static tensors that training has changed here; None = not known yet."""


@dataclass(frozen=True, kw_only=True)
class Fetch(Message):
    """Learner or observer -> syncer: send these chunks (again)."""

    KIND: ClassVar[str] = "fetch"

    name: str = _f(_name)
    incarnation: int = _f(_incarnation)
    epoch: int = _f(_epoch)
    what: str = _f(_one_of("update", "keyframe", "initial"))
    """update: the last Update of the fragment. keyframe: its current f32 values. initial: version 0."""
    fragment: int = _f(_fragment)
    """P = the static part (what = keyframe)."""
    version: int = _f(_version)
    """The version wanted; a keyframe of a newer one may come instead."""
    chunks: tuple[int, ...] = _f(_list(_whole(0, 2**22), FETCH_WINDOW))


@dataclass(frozen=True, kw_only=True)
class Delta(Chunked):
    """Learner -> syncer: the outer gradient of one fragment, and which of the learner's own work it covers."""

    KIND: ClassVar[str] = "delta"

    name: str = _f(_name)
    incarnation: int = _f(_incarnation)
    epoch: int = _f(_epoch)
    slot: int = _f(_count)
    attempt: int = _f(_whole(1))
    base_version: int = _f(_version)
    """The version whose anchor the delta is measured from."""
    tokens_from: int = _f(_count)
    tokens_to: int = _f(_count)
    """[from, to) of the learner's cumulative tokens."""
    steps_from: int = _f(_count)
    steps_to: int = _f(_count)
    codec: str = _f(_one_of(*CODECS))


@dataclass(frozen=True, kw_only=True)
class Update(Chunked):
    """Syncer -> all: a merged fragment, as the quantized step from version `base_version` to `version`."""

    KIND: ClassVar[str] = "fragment"

    epoch: int = _f(_epoch)
    slot: int = _f(_count)
    t: int = _f(_count)
    """Global step at the merge."""
    version: int = _f(_version)
    base_version: int = _f(_version)
    contributors: tuple[tuple[str, int, int, int], ...] = _f(
        _list(_tuple(_name, _incarnation, _count, _count), 10_000), default=()
    )
    """(name, incarnation, steps_to, tokens_to) of each capture that was merged."""
    codec: str = _f(_one_of(*CODECS))
    digest: str = _f(_digest)
    """sha256 (hex) of the public fragment after this update."""


@dataclass(frozen=True, kw_only=True)
class Keyframe(Chunked):
    """Syncer -> who asked: the public fragment itself in f32 (fragment = P: the static part, raw bytes)."""

    KIND: ClassVar[str] = "keyframe"

    epoch: int = _f(_epoch)
    t: int = _f(_count)
    version: int = _f(_version)
    digest: str = _f(_digest)
    """sha256 (hex) of the whole payload."""


@dataclass(frozen=True, kw_only=True)
class Seed(Chunked):
    """The chosen learner -> syncer: version 0 of a fragment in f32 (fragment = P: the static part, raw bytes)."""

    KIND: ClassVar[str] = "seed"

    name: str = _f(_name)
    incarnation: int = _f(_incarnation)
    epoch: int = _f(_epoch)
    digest: str = _f(_digest)


@dataclass(frozen=True, kw_only=True)
class Buffers(Chunked):
    """The learner that the Beat asks -> syncer: the static tensors that its training has changed (fragment = P)."""

    KIND: ClassVar[str] = "buffers"

    name: str = _f(_name)
    incarnation: int = _f(_incarnation)
    epoch: int = _f(_epoch)
    digest: str = _f(_digest)
    """sha256 (hex) of the whole payload, which is as `common.static_tensors` has it."""


@dataclass(frozen=True, kw_only=True)
class Ping(Message):
    """Anybody -> itself, through the broker, on both planes: what comes back proves the way there and back."""

    KIND: ClassVar[str] = "ping"

    name: str = _f(_name)
    nonce: int = _f(_whole(1))
    """Random: tells this ping from every other of the same name."""


MESSAGES: dict[str, type[Message]] = {
    cls.KIND: cls
    for cls in (Beat, Call, Hello, Welcome, Alive, Goodbye, Fetch, Delta, Update, Keyframe, Seed, Buffers, Ping)
}
CHECKS: dict[type[Message], dict[str, Check]] = {
    cls: {f.name: f.metadata["check"] for f in fields(cls) if "check" in f.metadata} for cls in MESSAGES.values()
}
"""Of each kind: the fields that its header has, and what each may hold."""
FRAGMENT_KINDS = frozenset({"call", "delta", "fragment", "keyframe", "seed", "buffers"})
NAMED_KINDS = frozenset({"hello", "welcome", "alive", "goodbye", "fetch", "delta", "seed", "buffers", "ping"})
BOTH_PLANES = frozenset({"beat", "ping"})
"""Kinds that travel on either plane."""


def beat_topic(run: str = "") -> bytes:
    """The fixed topic of beats; without a run, the prefix under which the beats of all runs are heard."""
    return f"_/beat/{run}/".encode() if run else b"_/beat/"


def prefix(run: str, kind: str, detail: str | int = "") -> bytes:
    """What to subscribe to: `RUN/KIND/` or `RUN/KIND/DETAIL/`."""
    return f"{run}/{kind}/{detail}/".encode() if detail != "" else f"{run}/{kind}/".encode()


# --- frames ----------------------------------------------------------------------------------------------------------
def encode(message: Message) -> list[bytes | memoryview]:
    """The frames of `message`: topic, header, and the payload where its kind has one."""
    header = _to_map(message)
    header["protocol"] = PROTOCOL
    frames: list[bytes | memoryview] = [message.topic(), msgpack.packb(header)]
    if message.HAS_PAYLOAD:
        frames.append(message.payload)  # type: ignore[attr-defined]
    return frames


def _to_map(message: Message) -> dict[str, Any]:
    rows = {name: getattr(message, name) for name in CHECKS[type(message)]}
    if "calls" in rows:
        rows["calls"] = [_to_map(call) for call in rows["calls"]]
    return rows


def decode(frames: Sequence[bytes | memoryview]) -> Message:
    """The message in `frames`, every field checked, topic and header in agreement; Malformed otherwise.

    Allocates no more than the frames themselves hold.
    """
    if not 2 <= len(frames) <= 3:
        raise Malformed("frames", f"{len(frames)} frames")
    if len(frames[0]) > 256 or len(frames[1]) > MESSAGE_BYTES:
        raise Malformed("frames", "a frame is too long")
    topic = bytes(frames[0])
    parts = topic.split(b"/")
    cls = MESSAGES.get(parts[1].decode("ascii", "replace")) if len(parts) > 2 else None
    if cls is None:
        raise Malformed("topic", repr(topic[:80]))
    if (len(frames) == 3) != cls.HAS_PAYLOAD:
        raise Malformed("frames", f"{len(frames)} frames in a {cls.KIND}")
    rows = unpack(frames[1], "header")
    if type(rows) is not dict:
        raise Malformed("header", "not a map")
    message = _build(cls, rows, protocol=True, payload=frames[2] if cls.HAS_PAYLOAD else None)
    if message.topic() != topic:
        raise Malformed("topic", f"{topic[:80]!r} does not fit the {cls.KIND}'s header")
    if isinstance(message, Chunked):
        _check_chunk(message)
    return message


def unpack(frame: bytes | memoryview, what: str) -> Any:
    """The value that `frame` holds in msgpack; Malformed, with the reason `what`, if it is not one, or an odd one."""

    def unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        rows = dict(pairs)
        if len(rows) != len(pairs):
            raise ValueError("a key stands twice")
        return rows

    size = len(frame)
    try:
        scan = msgpack.Unpacker(read_size=max(1, size), max_buffer_size=max(1, size))
        scan.feed(frame)
        scan.skip()  # allocates nothing: room that is declared and not there fails here, before anybody makes it
        return msgpack.unpackb(
            frame, raw=False, strict_map_key=True, object_pairs_hook=unique, max_ext_len=0,
            max_str_len=size, max_bin_len=0, max_array_len=min(size, MAX_FRAGMENTS), max_map_len=min(size, 256),
        )  # fmt: skip
    except (ValueError, TypeError, msgpack.UnpackException, UnicodeDecodeError, RecursionError) as wrong:
        raise Malformed(what, f"{type(wrong).__name__}: {wrong}"[:200]) from wrong


def _build(cls: type[Message], rows: dict[str, Any], *, protocol: bool = False, payload: Any = None) -> Message:
    if protocol and rows.pop("protocol", None) != PROTOCOL:
        raise Malformed("protocol", f"this side speaks protocol {PROTOCOL}; install the same version on both sides")
    checks = CHECKS[cls]
    if rows.keys() != checks.keys():
        odd = sorted(str(k)[:40] for k in rows.keys() ^ checks.keys())
        raise Malformed("header", f"missing or unknown in a {cls.KIND}: {', '.join(odd[:5])}")
    values = {}
    for name, check in checks.items():
        try:
            values[name] = check(rows[name])
        except ValueError as wrong:
            raise Malformed("field", f"{name} of a {cls.KIND} {wrong}") from None
    if payload is not None:
        values["payload"] = payload
    return cls(**values)


def _check_chunk(message: Chunked) -> None:
    if message.chunks != chunk_count(message.size) or message.chunk >= message.chunks:
        raise Malformed("chunk", f"chunk {message.chunk} of {message.chunks} does not fit {message.size} bytes")
    if len(message.payload) != len(chunk_range(message.size, message.chunk)):
        raise Malformed("chunk", f"{len(message.payload)} bytes in chunk {message.chunk} of {message.size} bytes")
    if zlib.crc32(message.payload) != message.crc:
        raise Malformed("checksum", f"chunk {message.chunk} of a {message.KIND}")


HEADER_BYTES = 8192
"""At most, of any header without what grows with the run: fragments, learners, calls."""
CALL_BYTES, NAMED_IN_CALL_BYTES, NAMED_IN_UPDATE_BYTES = 256, 96, 72
"""At most, of a Call that names no learner, and of each learner in a Call (twice) and in an Update."""


def most_calls(fragments: int, learners: int) -> int:
    """How many open calls fit into a Beat of a run of so many fragments, if each names so many learners."""
    room = MESSAGE_BYTES - HEADER_BYTES - 9 * fragments
    return max(0, min(MAX_CALLS, room // (CALL_BYTES + NAMED_IN_CALL_BYTES * learners)))


def most_learners(fragments: int, calls: int) -> int:
    """How many learners fit into a Beat of so many fragments and open calls, and into each chunk of an Update."""
    room = MESSAGE_BYTES - HEADER_BYTES - 9 * fragments
    in_update = (MESSAGE_BYTES - CHUNK_BYTES - HEADER_BYTES) // NAMED_IN_UPDATE_BYTES
    return max(1, min(in_update, (room // calls - CALL_BYTES) // NAMED_IN_CALL_BYTES))


def chunk_count(size: int) -> int:
    """Chunks in a payload of `size` bytes; an empty payload travels as one empty chunk."""
    return max(1, -(-size // CHUNK_BYTES))


def chunk_range(size: int, chunk: int) -> range:
    """Which bytes of a payload of `size` bytes are in chunk number `chunk`."""
    return range(chunk * CHUNK_BYTES, min(size, (chunk + 1) * CHUNK_BYTES))


def split(payload: bytes | memoryview, chunks: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """The chunk fields (size, chunk, chunks, crc, payload) of each message that carries `payload`, or of some of them.

    >>> [part["chunk"] for part in split(b"abc")]
    [0]
    """
    view = memoryview(payload).cast("B") if len(payload) else memoryview(b"")
    size, count = len(view), chunk_count(len(view))
    rows = []
    for chunk in range(count) if chunks is None else [c for c in chunks if c < count]:
        span = chunk_range(size, chunk)
        part = view[span.start : span.stop]
        rows.append({"size": size, "chunk": chunk, "chunks": count, "crc": zlib.crc32(part), "payload": part})
    return rows


def pack_layout(layout: Layout) -> bytes:
    """A Hello's payload: the layout's rows in msgpack, one after the other, in zlib."""
    return zlib.compress(b"".join(msgpack.packb(row) for row in layout.to_wire()))


def unpack_layout(payload: bytes | memoryview) -> Layout:
    """The layout in a Hello's payload; Malformed if it is none. Inflates no more than LAYOUT_BYTES."""
    try:
        return Layout.of_tensors(tuple(tensor_from_wire(row) for row in _layout_rows(payload)))
    except (zlib.error, ValueError, TypeError, msgpack.UnpackException, RecursionError) as wrong:
        raise Malformed("layout", f"{type(wrong).__name__}: {wrong}"[:200]) from wrong


def _layout_rows(payload: bytes | memoryview) -> Iterator[object]:
    """Each row as soon as it is inflated, so that the caller can end a flood of others."""
    inflate, rest, rows = zlib.decompressobj(), bytes(payload), 0
    scan = msgpack.Unpacker(raw=False, strict_map_key=True, max_ext_len=0, max_bin_len=0, max_map_len=0,
                            max_str_len=LAYOUT_ROW_BYTES, max_array_len=MAX_NAMES)  # fmt: skip
    row_began = fed = 0
    while not inflate.eof:
        part = inflate.decompress(rest, LAYOUT_STEP_BYTES)
        rest = inflate.unconsumed_tail
        if not part and not rest:
            raise Malformed("layout", "it ends early")
        scan.feed(part)
        fed += len(part)
        if fed > LAYOUT_BYTES:
            raise Malformed("layout", f"its names and shapes take more than {LAYOUT_BYTES} bytes")
        for row in scan:
            yield row
            row_began, rows = scan.tell(), rows + 1
            if rows > MAX_TENSORS:
                raise Malformed("layout", f"more than {MAX_TENSORS} tensors")
        if fed - row_began > LAYOUT_ROW_BYTES:
            raise Malformed("layout", "a tensor takes too much room")
    if fed > row_began or inflate.unused_data:
        raise Malformed("layout", "bytes follow after its end")


class Assembly:
    """Chunks of one payload, in any order, until it is complete. Memory is taken once, when the first one comes, for a
    size known beforehand.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.missing = set(range(chunk_count(size)))
        self._buffer = bytearray()

    def add(self, message: Chunked) -> bool:
        """Take a chunk (a repeated one changes nothing); True when all are there. Malformed if the size differs."""
        if message.size != self.size:
            raise Malformed("size", f"{message.size} bytes where {self.size} belong")
        if message.chunk in self.missing:
            span = chunk_range(self.size, message.chunk)
            self._buffer = self._buffer or bytearray(self.size)
            self._buffer[span.start : span.stop] = message.payload
            self.missing.discard(message.chunk)
        return not self.missing

    @property
    def payload(self) -> memoryview:
        """The whole payload; only meaningful when nothing is missing."""
        return memoryview(self._buffer)
