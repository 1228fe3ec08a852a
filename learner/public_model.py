"""Public model as one process holds it: which fragments are held, which are missing, what to fetch. Pure.

Vectors are replaced, never overwritten, so a caller may keep one. Everything missing, for whatever reason (a join, a
lost chunk, a gap, a reset), is repaired by the same Fetch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..common.codec import apply_step, digest, encoded_bytes
from ..common.errors import Malformed
from ..common.fragments import Fragment, Plan
from ..common.wire import FETCH_WINDOW, Assembly, Chunked, Keyframe, Update, chunk_count
from .counters import Counts

GAP_SECONDS = 1.5
"""A fragment that is behind the newest Beat, and of whose next version nothing came for this long, has a gap."""
RETRY_SECONDS = 1.0
"""A requested chunk is requested again when nothing came for this long; doubled each time, up to the longest."""
LONGEST_RETRY_SECONDS = 16.0
UPDATE_TRIES = 3
"""After this many requests without result, a keyframe is requested in place of an update."""
UPDATES_KEPT = 3
"""Updates of one fragment that are kept while an older one, or a keyframe, is missing."""


@dataclass(frozen=True)
class PublicFragment:
    """One fragment of the public model at one version; all processes that hold this version hold the same bits."""

    version: int
    vector: Tensor
    """Flat f32 in host memory."""
    digest: str
    contributors: tuple[tuple[str, int, int, int], ...] = ()
    """(name, incarnation, steps_to, tokens_to) of each merged delta; empty if it came as a keyframe."""

    def part_of(self, who: tuple[str, int]) -> Counts | None:
        """The counters up to which learner `who` is merged into it; None if it had no part in this merge."""
        marks = (Counts(steps, tokens) for *merged, steps, tokens in self.contributors if tuple(merged) == who)
        return next(marks, None)


@dataclass(frozen=True)
class Request:
    """Chunks to fetch; the fields of a Fetch."""

    what: str
    fragment: int
    version: int
    chunks: tuple[int, ...]


Payload = TypeVar("Payload", Update, Keyframe)


@dataclass
class _Incoming(Generic[Payload]):
    """A payload being received: the message of its first chunk, and the chunks so far."""

    first: Payload
    assembly: Assembly

    @property
    def complete(self) -> bool:
        return not self.assembly.missing


@dataclass
class _Track:
    """State of one fragment, or of the static part."""

    index: int
    keyframe_bytes: int
    fragment: Fragment | None
    held: PublicFragment | None = None
    latest: int = 0
    """Newest known version."""
    wants_keyframe: bool = True
    floor: int = 0
    """Keyframes below this version are obsolete."""
    keyframe: _Incoming[Keyframe] | None = None
    updates: dict[int, _Incoming[Update]] = field(default_factory=dict)
    """By base version."""
    quiet_since: float = 0.0
    """When a missing chunk last came, or when the fragment was first found to be incomplete."""
    requested: set[int] = field(default_factory=set)
    """Chunks in flight."""
    requested_at: float = 0.0
    timeout_seconds: float = RETRY_SECONDS
    tries: int = 0

    @property
    def behind(self) -> bool:
        return self.held is None or self.held.version < self.latest

    def forget_requests(self) -> None:
        self.requested.clear()
        self.timeout_seconds, self.tries = RETRY_SECONDS, 0

    def want_keyframe(self, floor: int) -> None:
        self.wants_keyframe, self.floor, self.keyframe = True, floor, None
        self.forget_requests()


class PublicModel:
    """The public model as one process holds it, under one epoch. At first nothing is held and everything is wanted.

    static_bytes: size of the static part, which is then fetched too; 0 = there is none, or it is held already.
    """

    def __init__(self, plan: Plan, codec_down: str, epoch: int, static_bytes: int = 0) -> None:
        self.plan, self.codec, self.epoch = plan, codec_down, epoch
        self.static: bytes | None = None if static_bytes else b""
        self._tracks = [_Track(f.index, f.length * 4, f) for f in plan.fragments]
        self._static = _Track(plan.static_index, static_bytes, None, wants_keyframe=bool(static_bytes))
        self._unsettled = {track.index for track in self._all() if track.wants_keyframe}
        """Fragments of which something is missing; only these are checked when requests are due."""

    # --- what is held ------------------------------------------------------------------------------------------------
    @property
    def held(self) -> list[PublicFragment | None]:
        return [track.held for track in self._tracks]

    @property
    def complete(self) -> bool:
        """Every fragment is held, at any version, and so is the static part."""
        return self.static is not None and all(t.held is not None and not t.wants_keyframe for t in self._tracks)

    @property
    def wants_keyframes(self) -> bool:
        return any(track.wants_keyframe for track in self._missing())

    def fragments(self) -> list[PublicFragment]:
        """All held fragments; call it when `complete`."""
        return [track.held for track in self._tracks if track.held is not None]

    # --- current versions --------------------------------------------------------------------------------------------
    def note_versions(self, versions: Sequence[int], now: float) -> None:
        """The current version of each fragment, from a Beat."""
        if len(versions) == len(self._tracks):
            for track, version in zip(self._tracks, versions, strict=True):
                self._note_version(track, version, now)

    def note_version(self, fragment: int, version: int, now: float) -> None:
        """The current version of one fragment, from a Call."""
        if fragment < len(self._tracks):
            self._note_version(self._tracks[fragment], version, now)

    def _note_version(self, track: _Track, version: int, now: float) -> None:
        if version > track.latest:
            if not track.behind:
                track.quiet_since = now
            track.latest = version
            self._unsettled.add(track.index)

    def want_all(self) -> None:
        """Drop everything held and fetch every fragment again (a reset)."""
        for track in self._tracks:
            track.held = None
            track.updates.clear()
            self._want_keyframe(track, track.latest)

    def want_final(self, versions: Sequence[int]) -> None:
        """The run is over: fetch each fragment that is not held at its final version."""
        if len(versions) != len(self._tracks):
            return
        for track, version in zip(self._tracks, versions, strict=True):
            track.latest = max(track.latest, version)
            at = -1 if track.held is None else track.held.version
            if at != version and not (track.wants_keyframe and track.floor == version):
                self._want_keyframe(track, version)

    # --- received payloads -------------------------------------------------------------------------------------------
    def take_update(self, message: Update, now: float) -> PublicFragment | None:
        """Take a chunk of an update. Returns the fragment's new public state if it changes. Raises Malformed."""
        if message.epoch != self.epoch or message.fragment >= len(self._tracks):
            return None
        track = self._tracks[message.fragment]
        fragment = self.plan.fragments[message.fragment]
        if message.codec != self.codec or message.version <= message.base_version:
            raise Malformed("update", f"codec {message.codec}, version {message.version} on {message.base_version}")
        size = encoded_bytes(self.codec, fragment.length)
        if message.size != size:
            raise Malformed("size", f"{message.size} bytes, expected {size}")
        self._note_version(track, message.version, now)
        if track.held is not None and message.base_version < track.held.version:
            return None
        incoming = track.updates.get(message.base_version)
        if incoming is None or not _same(incoming.first, message):
            incoming = track.updates[message.base_version] = _Incoming(message, Assembly(size))
            if track.keyframe is not None and len(track.updates) > UPDATES_KEPT:
                self._advance_keyframe(track, track.keyframe, message.base_version)
            for base in sorted(track.updates)[:-UPDATES_KEPT]:
                del track.updates[base]
        self._note_chunk(track, message, now, of_request=not track.wants_keyframe)
        incoming.assembly.add(message)
        return self._advance(track, now)

    def take_keyframe(self, message: Keyframe, now: float) -> PublicFragment | None:
        """Take a chunk of a wanted keyframe. Returns the fragment's new public state once it is complete."""
        if message.epoch != self.epoch or message.fragment > len(self._tracks):
            return None
        track = self._tracks[message.fragment] if message.fragment < len(self._tracks) else self._static
        if not track.wants_keyframe or message.version < track.floor:
            return None
        if message.size != track.keyframe_bytes:
            raise Malformed("size", f"{message.size} bytes, expected {track.keyframe_bytes}")
        incoming = track.keyframe
        if incoming is not None:
            self._advance_keyframe(track, incoming, message.version)
            if message.version < incoming.first.version:
                return None
        if incoming is None or not _same(incoming.first, message):
            incoming = track.keyframe = _Incoming(message, Assembly(message.size))
        self._note_chunk(track, message, now, of_request=True)
        if not incoming.assembly.add(message):
            return None
        return self._finish_keyframe(track, incoming, now)

    def _advance_keyframe(self, track: _Track, keyframe: _Incoming[Keyframe], to_version: int) -> None:
        """Apply the complete updates to a partly received keyframe, so that its remaining chunks may be newer.

        Otherwise no keyframe would ever be complete if a fragment is merged faster than it can be fetched. The codec's
        blocks are independent, so chunks that are still missing may hold any values meanwhile.
        """
        while keyframe.first.version < to_version and track.fragment is not None:
            update = track.updates.get(keyframe.first.version)
            if update is None or not update.complete:
                return
            del track.updates[keyframe.first.version]
            values = torch.frombuffer(keyframe.assembly.payload, dtype=torch.float32)
            values.copy_(apply_step(self.codec, values, update.assembly.payload))
            keyframe.first = replace(keyframe.first, version=update.first.version, digest=update.first.digest)

    def _finish_keyframe(self, track: _Track, incoming: _Incoming[Keyframe], now: float) -> PublicFragment | None:
        content, first = incoming.assembly.payload, incoming.first
        track.keyframe = None
        if digest(content) != first.digest:
            track.forget_requests()
            raise Malformed("digest", f"keyframe {first.version} of fragment {track.index}")
        if track.fragment is None:
            self.static = bytes(content)
            track.wants_keyframe = False
            return None
        vector = torch.frombuffer(content, dtype=torch.float32)
        if not torch.isfinite(vector).all():
            track.forget_requests()
            raise Malformed("nonfinite", f"keyframe {first.version} of fragment {track.index}")
        track.wants_keyframe = False
        track.forget_requests()
        track.held = PublicFragment(first.version, vector, first.digest)
        track.latest = max(track.latest, first.version)
        track.quiet_since = now
        return self._advance(track, now) or track.held

    def _note_chunk(self, track: _Track, message: Chunked, now: float, *, of_request: bool) -> None:
        if of_request and message.chunk in track.requested:
            track.requested.discard(message.chunk)
            waited = now - max(track.quiet_since, track.requested_at)
            track.timeout_seconds = min(LONGEST_RETRY_SECONDS, max(RETRY_SECONDS, 2 * waited))
        track.quiet_since = now

    def _advance(self, track: _Track, now: float) -> PublicFragment | None:
        """Apply the complete updates that follow the held version. Returns the newest state if there were any."""
        moved: PublicFragment | None = None
        while track.held is not None and not track.wants_keyframe:
            incoming = track.updates.get(track.held.version)
            if incoming is None or not incoming.complete:
                break
            moved = self._apply(track, track.held, incoming)
            track.forget_requests()
            track.quiet_since = now
        if track.held is not None:
            for base in [base for base in track.updates if base < track.held.version]:
                del track.updates[base]
        return moved

    def _apply(self, track: _Track, held: PublicFragment, incoming: _Incoming[Update]) -> PublicFragment:
        update = incoming.first
        del track.updates[held.version]
        try:
            vector = apply_step(self.codec, held.vector, incoming.assembly.payload)
            if digest(vector) != update.digest:
                raise Malformed("digest", f"update {update.version} of fragment {track.index}")
        except Malformed:
            self._want_keyframe(track, update.version)
            raise
        track.held = PublicFragment(update.version, vector, update.digest, update.contributors)
        return track.held

    # --- requests ----------------------------------------------------------------------------------------------------
    def requests(self, now: float) -> Iterator[Request]:
        """The chunks to fetch now, within the window of chunks that may be in flight. Send each at once."""
        missing_of = self._missing()
        for track in missing_of:
            self._expire(track, now)
        room = FETCH_WINDOW - sum(len(track.requested) for track in missing_of)
        for track in missing_of:
            if room <= 0:
                return
            what, version, missing = self._lacking(track, now)
            chunks = tuple(sorted(missing - track.requested)[:room])
            if chunks:
                room -= len(chunks)
                track.requested.update(chunks)
                track.requested_at = now
                if track.keyframe is None:
                    track.floor = max(track.floor, version)
                yield Request(what, track.index, version, chunks)

    def _expire(self, track: _Track, now: float) -> None:
        if track.requested and now - max(track.requested_at, track.quiet_since) >= track.timeout_seconds:
            track.requested.clear()
            track.timeout_seconds = min(LONGEST_RETRY_SECONDS, 2 * track.timeout_seconds)
            track.tries += 1

    def _lacking(self, track: _Track, now: float) -> tuple[str, int, set[int]]:
        """(what, version, chunks) to fetch; no chunks if nothing is missing or it may still come unrequested."""
        held = track.held
        if not track.wants_keyframe and held is not None and track.behind:
            if not track.requested and now - track.quiet_since < GAP_SECONDS:
                return "update", track.latest, set()
            if held.version + 1 == track.latest and track.tries < UPDATE_TRIES:
                incoming = track.updates.get(held.version)
                size = encoded_bytes(self.codec, self.plan.fragments[track.index].length)
                missing = set(range(chunk_count(size))) if incoming is None else incoming.assembly.missing
                return "update", track.latest, missing
            self._want_keyframe(track, track.latest)
        if not track.wants_keyframe:
            return "keyframe", 0, set()
        every = set(range(chunk_count(track.keyframe_bytes)))
        missing = every if track.keyframe is None else track.keyframe.assembly.missing
        return "keyframe", max(track.floor, track.latest), missing

    def _want_keyframe(self, track: _Track, floor: int) -> None:
        track.want_keyframe(floor)
        self._unsettled.add(track.index)

    def _missing(self) -> list[_Track]:
        """Tracks of which something is missing, in order of the fragments."""
        tracks = [self._tracks[p] if p < len(self._tracks) else self._static for p in sorted(self._unsettled)]
        settled = {t.index for t in tracks if not t.wants_keyframe and (t.held is None or not t.behind)}
        self._unsettled -= settled
        return [track for track in tracks if track.index not in settled]

    def _all(self) -> list[_Track]:
        return [*self._tracks, self._static]


def _same(first: Update | Keyframe, other: Update | Keyframe) -> bool:
    return (first.version, first.digest) == (other.version, other.digest)
