"""Wire format: every message as a frozen dataclass, with its encoding to frames. docs/protocol.md is tested against it.

Frames: [topic][header: one msgpack map][at most one payload frame]. The topic is RUN "/" KIND "/" DETAIL "/"; the last
delimiter matters, since subscriptions match prefixes. `decode` checks every field before any use and raises Malformed,
whose `reason` receivers count. No pickle, no extension types, no nesting deeper than 4.
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
"""Version of the wire format, in every header as `protocol`; both sides must use the same."""
MAX_COUNT = 2**53
"""Largest value of a counter: exact as a double, which some readers of Redis use for numbers."""
MAX_SECONDS = 1e12
MAX_LOSS = 1e15
"""Largest durations and losses in a message. Senders clamp their figures, so that none makes a message invalid."""
GOODBYE_REASONS = ("finished", "left", "stopped", "diverged", "failed")
MAX_CALLS = 1_000
"""Open calls in one Beat."""
LAYOUT_STEP_BYTES, LAYOUT_ROW_BYTES, LAYOUT_BYTES = 2**14, 2**16, 2**25
"""A Hello's layout is inflated in steps, with limits for one tensor with all its names and for the whole layout: zlib
can inflate a message to a thousand times its size."""
MAX_NAMES = 1024
"""Most names of one tensor (tied weights have several)."""
FETCH_WINDOW = 16
"""Most chunks of one Fetch, and in flight to one requester."""


class Plane(Enum):
    """Two planes, so that bulk never starves control; each is one XSUB/XPUB pair of ports in the broker."""

    CONTROL = 0
    BULK = 1


# --- checks of fields ------------------------------------------------------------------------------------------------
Check = Callable[[Any], Any]
"""Converts a value from msgpack to the field's value; raises ValueError if it is not permitted."""


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
                raise ValueError("has a text of more than 4096 characters")
        return value

    return check


def _part(cls: type[Any]) -> Check:
    """A message nested in another one as a map of its fields (open calls in a Beat)."""

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
    """Base of all messages. `sequence` numbers a publisher's messages of one KIND; receivers count the gaps."""

    KIND: ClassVar[str] = ""
    PLANE: ClassVar[Plane] = Plane.CONTROL
    HAS_PAYLOAD: ClassVar[bool] = False

    run: str = _f(_name)
    sequence: int = _f(_count, default=0)
    """0 = not numbered (Welcome, Keyframe: each goes to a part of the subscribers)."""

    def topic(self) -> bytes:
        """RUN/KIND/, then FRAGMENT/ and NAME/ where the message has them; a learner's topics end with its name."""
        parts = [self.run, self.KIND]
        parts += [str(self.fragment)] if self.KIND in FRAGMENT_KINDS else []  # type: ignore[attr-defined]
        parts += [self.name] if self.KIND in NAMED_KINDS else []  # type: ignore[attr-defined]
        return ("/".join(parts) + "/").encode()


@dataclass(frozen=True, kw_only=True)
class Chunked(Message):
    """Base of bulk messages: each carries one chunk, of at most CHUNK_BYTES, of a larger payload."""

    PLANE: ClassVar[Plane] = Plane.BULK
    HAS_PAYLOAD: ClassVar[bool] = True

    fragment: int = _f(_fragment)
    size: int = _f(_whole(0, 2**42))
    """Bytes of the whole payload, over all chunks."""
    chunk: int = _f(_whole(0, 2**22))
    chunks: int = _f(_whole(1, 2**22))
    crc: int = _f(_whole(0, 2**32 - 1))
    """CRC-32 of this chunk's payload."""
    payload: bytes | memoryview = b""
    """Sent as the third frame, not in the header."""


@dataclass(frozen=True, kw_only=True)
class Call(Message):
    """Syncer -> all: a request for a Delta from each learner that stepped since it last adopted or captured this
    fragment.
    """

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
    """(name, incarnation) of the learners merged into v. One of them must adopt v before it answers."""
    received: tuple[str, ...] = _f(_list(_name, 10_000), default=())
    """Learners whose answers to this attempt are complete; the others send theirs again."""


@dataclass(frozen=True, kw_only=True)
class Beat(Message):
    """Syncer -> all, each second, on both planes, under `_/beat/RUN/`: all that a joining process needs to know."""

    KIND: ClassVar[str] = "beat"

    epoch: int = _f(_epoch)
    state: str = _f(_one_of("waiting", "seeding", "running", "draining", "finished", "stopping"))
    t: int = _f(_count)
    steps: int = _f(_count)
    """T, the run's number of global steps."""
    step_seconds: float = _f(_seconds)
    """Typical seconds of an inner step: the lower median over live learners; 0 = not known yet."""
    versions: tuple[int, ...] = _f(_list(_version, MAX_FRAGMENTS), default=())
    """Current version of each fragment; empty until the run is seeded."""
    calls: tuple[Call, ...] = _f(_list(_part(Call), MAX_CALLS), default=())
    """All open calls, repeated for learners that missed a Call."""
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
    """(name, incarnation) of the learner requested to send its Buffers, after the end of the run."""
    buffers_held: bool = _f(_flag, default=False)
    """The final model has its buffers, so no learner needs to wait for a request."""
    syncer: int = _f(_whole(0))
    """Random number of the syncer process. A Beat with another number and a higher epoch supersedes this syncer."""

    def topic(self) -> bytes:
        return beat_topic(self.run)


@dataclass(frozen=True, kw_only=True)
class Hello(Message):
    """Learner or observer -> syncer: a request to join, repeated until a Welcome arrives. The payload is the model's
    layout (`pack_layout`).
    """

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
    """The sender has read the broker's subscription on its bulk socket, so that deltas will not be lost silently."""
    payload: bytes | memoryview = b""


@dataclass(frozen=True, kw_only=True)
class Welcome(Message):
    """Syncer -> one learner: the answer to its Hello, or at any time a command (reset) or a warning (notice)."""

    KIND: ClassVar[str] = "welcome"

    name: str = _f(_name)
    incarnation: int = _f(_incarnation)
    epoch: int = _f(_epoch)
    verdict: str = _f(_one_of("welcome", "wait", "seed", "refused", "finished", "reset", "notice"))
    """wait: say Hello again later, since the run is being seeded or the name's previous holder is not silent yet.
    seed: send version 0. reset: drop all pending work and fetch every fragment again. notice: `reason` says which
    messages are rejected and why; the learner only logs it."""
    reason: str = _f(_text(1000), default="")
    fragments: int = _f(_whole(0, MAX_FRAGMENTS), default=0)
    """P, the number of fragments."""
    plan_digest: str = _f(_digest, default="")
    missing: tuple[int, ...] = _f(_list(_fragment, MAX_FRAGMENTS), default=())
    """With verdict seed: fragments that are not complete yet (P = the static tensors)."""


@dataclass(frozen=True, kw_only=True)
class Alive(Message):
    """Learner -> syncer, each second: counters, cumulative since the learner's start."""

    KIND: ClassVar[str] = "alive"

    name: str = _f(_name)
    incarnation: int = _f(_incarnation)
    epoch: int = _f(_epoch)
    """Epoch of the versions below."""
    local_steps: int = _f(_count)
    tokens: int = _f(_count)
    step_seconds: float = _f(_seconds)
    """EMA of the duration of an inner step; 0 = no step timed yet (the first after a join is not timed)."""
    last_step_age_seconds: float = _f(_seconds)
    inner_seconds: float = _f(_seconds)
    """Time in inner steps since the first one began."""
    session_seconds: float = _f(_seconds)
    """Time in session calls since the first inner step began: the cost to the training thread."""
    since_first_step_seconds: float = _f(_seconds)
    loss: float | None = _f(_or_none(_real(-MAX_LOSS, MAX_LOSS)), default=None)
    versions: tuple[int, ...] = _f(_list(_version, MAX_FRAGMENTS), default=())
    """Adopted version of each fragment."""
    digests: tuple[str, ...] = _f(_list(_text(16), MAX_FRAGMENTS), default=())
    """First 16 hex digits of the sha256 of each received public fragment, at `digest_versions`."""
    digest_versions: tuple[int, ...] = _f(_list(_version, MAX_FRAGMENTS), default=())
    bytes_up: int = _f(_count, default=0)
    bytes_down: int = _f(_count, default=0)
    gaps: int = _f(_count, default=0)
    """Messages that did not arrive, counted by gaps in the sequence numbers."""


@dataclass(frozen=True, kw_only=True)
class Goodbye(Message):
    """Learner -> syncer: it leaves. After the end of the run it confirms that it holds the final model."""

    KIND: ClassVar[str] = "goodbye"

    name: str = _f(_name)
    incarnation: int = _f(_incarnation)
    reason: str = _f(_one_of(*GOODBYE_REASONS))
    local_steps: int = _f(_count)
    tokens: int = _f(_count)
    model_hash: str = _f(_digest, default="")
    buffers: int | None = _f(_or_none(_count), default=0)
    """After the end of a run: the number of static tensors that training has changed here; None = not known yet."""


@dataclass(frozen=True, kw_only=True)
class Fetch(Message):
    """Learner or observer -> syncer: a request for chunks, for the first time or again."""

    KIND: ClassVar[str] = "fetch"

    name: str = _f(_name)
    incarnation: int = _f(_incarnation)
    epoch: int = _f(_epoch)
    what: str = _f(_one_of("update", "keyframe", "initial"))
    """update: the last Update of the fragment. keyframe: its current f32 values. initial: version 0."""
    fragment: int = _f(_fragment)
    """P = the static tensors (what = keyframe)."""
    version: int = _f(_version)
    """The requested version; a keyframe of a newer version may be sent instead."""
    chunks: tuple[int, ...] = _f(_list(_whole(0, 2**22), FETCH_WINDOW))


@dataclass(frozen=True, kw_only=True)
class Delta(Chunked):
    """Learner -> syncer: the outer gradient of one fragment, and the interval of the learner's work that it covers."""

    KIND: ClassVar[str] = "delta"

    name: str = _f(_name)
    incarnation: int = _f(_incarnation)
    epoch: int = _f(_epoch)
    slot: int = _f(_count)
    attempt: int = _f(_whole(1))
    base_version: int = _f(_version)
    """The version from which the delta is measured."""
    tokens_from: int = _f(_count)
    tokens_to: int = _f(_count)
    """Interval [from, to) of the learner's cumulative tokens."""
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
    """(name, incarnation, steps_to, tokens_to) of each merged capture."""
    codec: str = _f(_one_of(*CODECS))
    digest: str = _f(_digest)
    """sha256 (hex) of the public fragment after this update."""


@dataclass(frozen=True, kw_only=True)
class Keyframe(Chunked):
    """Syncer -> one requester: a public fragment in f32 (fragment = P: the static tensors as raw bytes)."""

    KIND: ClassVar[str] = "keyframe"

    epoch: int = _f(_epoch)
    t: int = _f(_count)
    version: int = _f(_version)
    digest: str = _f(_digest)
    """sha256 (hex) of the whole payload."""


@dataclass(frozen=True, kw_only=True)
class Seed(Chunked):
    """Chosen learner -> syncer: version 0 of a fragment in f32 (fragment = P: the static tensors as raw bytes)."""

    KIND: ClassVar[str] = "seed"

    name: str = _f(_name)
    incarnation: int = _f(_incarnation)
    epoch: int = _f(_epoch)
    digest: str = _f(_digest)


@dataclass(frozen=True, kw_only=True)
class Buffers(Chunked):
    """Learner named by the Beat -> syncer: the static tensors that its training has changed (fragment = P)."""

    KIND: ClassVar[str] = "buffers"

    name: str = _f(_name)
    incarnation: int = _f(_incarnation)
    epoch: int = _f(_epoch)
    digest: str = _f(_digest)
    """sha256 (hex) of the whole payload, whose format is in common/static_tensor_format.py."""


@dataclass(frozen=True, kw_only=True)
class Ping(Message):
    """Any process -> itself, through the broker, on both planes: its return proves the path in both directions."""

    KIND: ClassVar[str] = "ping"

    name: str = _f(_name)
    nonce: int = _f(_whole(1))
    """Random number that distinguishes this ping from others of the same name."""


MESSAGES: dict[str, type[Message]] = {
    cls.KIND: cls
    for cls in (Beat, Call, Hello, Welcome, Alive, Goodbye, Fetch, Delta, Update, Keyframe, Seed, Buffers, Ping)
}
CHECKS: dict[type[Message], dict[str, Check]] = {
    cls: {f.name: f.metadata["check"] for f in fields(cls) if "check" in f.metadata} for cls in MESSAGES.values()
}
"""For each kind: the fields of its header, and the check of each."""
FRAGMENT_KINDS = frozenset({"call", "delta", "fragment", "keyframe", "seed", "buffers"})
NAMED_KINDS = frozenset({"hello", "welcome", "alive", "goodbye", "fetch", "delta", "seed", "buffers", "ping"})
BOTH_PLANES = frozenset({"beat", "ping"})
"""Kinds that are sent on both planes."""


def beat_topic(run: str = "") -> bytes:
    """The fixed topic of a run's beats; without a run, the prefix of the beats of all runs."""
    return f"_/beat/{run}/".encode() if run else b"_/beat/"


def prefix(run: str, kind: str, detail: str | int = "") -> bytes:
    """The prefix for a subscription: `RUN/KIND/` or `RUN/KIND/DETAIL/`."""
    return f"{run}/{kind}/{detail}/".encode() if detail != "" else f"{run}/{kind}/".encode()


# --- frames ----------------------------------------------------------------------------------------------------------
def encode(message: Message) -> list[bytes | memoryview]:
    """The frames of `message`: topic, header, and the payload if its kind has one."""
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
    """The message in `frames`, with every field checked and the topic equal to the header's; Malformed otherwise.

    Allocates no more memory than the frames take.
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
    """The msgpack value in `frame`; Malformed, with the reason `what`, if it is invalid or of a type that no message
    has.
    """

    def unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        rows = dict(pairs)
        if len(rows) != len(pairs):
            raise ValueError("a key occurs twice")
        return rows

    size = len(frame)
    try:
        scan = msgpack.Unpacker(read_size=max(1, size), max_buffer_size=max(1, size))
        scan.feed(frame)
        scan.skip()  # allocates nothing: a declared length beyond the frame's end fails here, before memory is taken
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
    if len(message.payload) != len(_chunk_range(message.size, message.chunk)):
        raise Malformed("chunk", f"{len(message.payload)} bytes in chunk {message.chunk} of {message.size} bytes")
    if zlib.crc32(message.payload) != message.crc:
        raise Malformed("checksum", f"chunk {message.chunk} of a {message.KIND}")


HEADER_BYTES = 8192
"""Upper bound of a header without the fields that grow with the run: fragments, learners, calls."""
CALL_BYTES, NAMED_IN_CALL_BYTES, NAMED_IN_UPDATE_BYTES = 256, 96, 72
"""Upper bounds: of a Call that names no learner, of a learner in a Call (twice), and of a learner in an Update."""


def most_calls(fragments: int, learners: int) -> int:
    """Most open calls that fit into a Beat of a run with `fragments`, if each call names `learners`."""
    room = MESSAGE_BYTES - HEADER_BYTES - 9 * fragments
    return max(0, min(MAX_CALLS, room // (CALL_BYTES + NAMED_IN_CALL_BYTES * learners)))


def most_learners(fragments: int, calls: int) -> int:
    """Most learners that fit into a Beat with `fragments` and `calls`, and into each chunk of an Update."""
    room = MESSAGE_BYTES - HEADER_BYTES - 9 * fragments
    in_update = (MESSAGE_BYTES - CHUNK_BYTES - HEADER_BYTES) // NAMED_IN_UPDATE_BYTES
    return max(1, min(in_update, (room // calls - CALL_BYTES) // NAMED_IN_CALL_BYTES))


def chunk_count(size: int) -> int:
    """Chunks of a payload of `size` bytes; an empty payload is sent as one empty chunk."""
    return max(1, -(-size // CHUNK_BYTES))


def _chunk_range(size: int, chunk: int) -> range:
    """The bytes of chunk number `chunk` in a payload of `size` bytes."""
    return range(chunk * CHUNK_BYTES, min(size, (chunk + 1) * CHUNK_BYTES))


def split(payload: bytes | memoryview, chunks: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """The chunk fields (size, chunk, chunks, crc, payload) of the messages that carry `payload`, or of those in
    `chunks` only.

    >>> [part["chunk"] for part in split(b"abc")]
    [0]
    """
    view = memoryview(payload).cast("B") if len(payload) else memoryview(b"")
    size, count = len(view), chunk_count(len(view))
    rows = []
    for chunk in range(count) if chunks is None else [c for c in chunks if c < count]:
        span = _chunk_range(size, chunk)
        part = view[span.start : span.stop]
        rows.append({"size": size, "chunk": chunk, "chunks": count, "crc": zlib.crc32(part), "payload": part})
    return rows


def pack_layout(layout: Layout) -> bytes:
    """A Hello's payload: the layout's rows, each in msgpack, concatenated and compressed with zlib."""
    return zlib.compress(b"".join(msgpack.packb(row) for row in layout.to_wire()))


def unpack_layout(payload: bytes | memoryview) -> Layout:
    """The layout in a Hello's payload; Malformed if it is invalid. Inflates no more than LAYOUT_BYTES."""
    try:
        return Layout.of_tensors(tuple(tensor_from_wire(row) for row in _layout_rows(payload)))
    except (zlib.error, ValueError, TypeError, msgpack.UnpackException, RecursionError) as wrong:
        raise Malformed("layout", f"{type(wrong).__name__}: {wrong}"[:200]) from wrong


def _layout_rows(payload: bytes | memoryview) -> Iterator[object]:
    """Yields each row as soon as it is inflated, so that the caller can stop at an invalid one."""
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
    """Collects the chunks of one payload, in any order. Its size is known beforehand, and memory is allocated once, at
    the first chunk.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.missing = set(range(chunk_count(size)))
        self._buffer = bytearray()

    def add(self, message: Chunked) -> bool:
        """Add a chunk; repeated ones are ignored. Returns whether all have arrived. Malformed if the size differs."""
        if message.size != self.size:
            raise Malformed("size", f"{message.size} bytes instead of {self.size}")
        if message.chunk in self.missing:
            span = _chunk_range(self.size, message.chunk)
            self._buffer = self._buffer or bytearray(self.size)
            self._buffer[span.start : span.stop] = message.payload
            self.missing.discard(message.chunk)
        return not self.missing

    @property
    def payload(self) -> memoryview:
        """The whole payload; valid only when no chunk is missing."""
        return memoryview(self._buffer)
