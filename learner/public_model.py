"""Follows the public model: what of it is held, what is missing, what to ask for. Pure: no socket, no clock, no thread.

Vectors are replaced, never overwritten, so that whoever got one may keep it. Everything that is missing, for whatever
reason (a join, a lost chunk, a gap, a reset), is repaired by the same Fetch.
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
"""A fragment that is behind what a Beat tells, and of whose next version nothing came for so long, has a gap."""
RETRY_SECONDS = 1.0
"""A chunk that was asked for is asked for again when nothing came for so long; doubled each time, up to the longest."""
LONGEST_RETRY_SECONDS = 16.0
UPDATE_TRIES = 3
"""An update that was asked for so often in vain is given up for a keyframe."""
UPDATES_KEPT = 3
"""Updates of one fragment that are kept while an older one, or a keyframe, is still missing."""


@dataclass(frozen=True)
class PublicFragment:
    """One fragment of the public model at one version; all who hold the version hold the same bits."""

    version: int
    vector: Tensor
    """Flat f32 in host memory."""
    digest: str
    contributors: tuple[tuple[str, int, int, int], ...] = ()
    """(name, incarnation, steps_to, tokens_to) of what was merged into it; empty if it came as a keyframe."""

    def part_of(self, who: tuple[str, int]) -> Counts | None:
        """The counters up to which that learner's work is in it; None if none of this merge is."""
        marks = (Counts(steps, tokens) for *merged, steps, tokens in self.contributors if tuple(merged) == who)
        return next(marks, None)


@dataclass(frozen=True)
class Request:
    """Chunks to ask for; the fields of a Fetch."""

    what: str
    fragment: int
    version: int
    chunks: tuple[int, ...]


Told = TypeVar("Told", Update, Keyframe)


@dataclass
class _Incoming(Generic[Told]):
    """A payload on its way: the first chunk's message tells what it is."""

    first: Told
    assembly: Assembly

    @property
    def complete(self) -> bool:
        return not self.assembly.missing


@dataclass
class _Track:
    """What is known of one fragment, or of the static part."""

    index: int
    keyframe_bytes: int
    fragment: Fragment | None
    held: PublicFragment | None = None
    latest: int = 0
    """Newest version heard of."""
    wants_keyframe: bool = True
    floor: int = 0
    """Keyframes below this version are of no use."""
    keyframe: _Incoming[Keyframe] | None = None
    updates: dict[int, _Incoming[Update]] = field(default_factory=dict)
    """By base version."""
    quiet_since: float = 0.0
    """When a missing chunk last came, or when it was first noticed that something is missing."""
    asked: set[int] = field(default_factory=set)
    """Chunks in flight."""
    asked_at: float = 0.0
    patience_seconds: float = RETRY_SECONDS
    tries: int = 0

    @property
    def behind(self) -> bool:
        return self.held is None or self.held.version < self.latest

    def forget_requests(self) -> None:
        self.asked.clear()
        self.patience_seconds, self.tries = RETRY_SECONDS, 0

    def want_keyframe(self, floor: int) -> None:
        self.wants_keyframe, self.floor, self.keyframe = True, floor, None
        self.forget_requests()


class PublicModel:
    """The public model as one process holds it, under one epoch. At first nothing is held and all is wanted.

    static_bytes: size of the static part that is to be fetched too; 0 = it has none, or is here already.
    """

    def __init__(self, plan: Plan, codec_down: str, epoch: int, static_bytes: int = 0) -> None:
        self.plan, self.codec, self.epoch = plan, codec_down, epoch
        self.static: bytes | None = None if static_bytes else b""
        self._tracks = [_Track(f.index, f.length * 4, f) for f in plan.fragments]
        self._static = _Track(plan.static_index, static_bytes, None, wants_keyframe=bool(static_bytes))
        self._unsettled = {track.index for track in self._all() if track.wants_keyframe}
        """Of which something is missing; only these are looked through when requests are due."""

    # --- what is held ------------------------------------------------------------------------------------------------
    @property
    def held(self) -> list[PublicFragment | None]:
        return [track.held for track in self._tracks]

    @property
    def complete(self) -> bool:
        """Every fragment is here (at whatever version), and the static part."""
        return self.static is not None and all(t.held is not None and not t.wants_keyframe for t in self._tracks)

    @property
    def wants_keyframes(self) -> bool:
        return any(track.wants_keyframe for track in self._missing())

    def fragments(self) -> list[PublicFragment]:
        """All fragments; to be called when `complete`."""
        return [track.held for track in self._tracks if track.held is not None]

    # --- what is heard -----------------------------------------------------------------------------------------------
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
        """Drop what is held and ask for every fragment anew (a reset)."""
        for track in self._tracks:
            track.held = None
            track.updates.clear()
            self._want_keyframe(track, track.latest)

    def want_final(self, versions: Sequence[int]) -> None:
        """The run is over: ask for each fragment that is not held at its final version."""
        if len(versions) != len(self._tracks):
            return
        for track, version in zip(self._tracks, versions, strict=True):
            track.latest = max(track.latest, version)
            at = -1 if track.held is None else track.held.version
            if at != version and not (track.wants_keyframe and track.floor == version):
                self._want_keyframe(track, version)

    # --- what arrives ------------------------------------------------------------------------------------------------
    def take_update(self, message: Update, now: float) -> PublicFragment | None:
        """Take a chunk of an update; the fragment's new public state if it has moved on. Malformed if it cannot be."""
        if message.epoch != self.epoch or message.fragment >= len(self._tracks):
            return None
        track = self._tracks[message.fragment]
        fragment = self.plan.fragments[message.fragment]
        if message.codec != self.codec or message.version <= message.base_version:
            raise Malformed("update", f"codec {message.codec}, version {message.version} on {message.base_version}")
        size = encoded_bytes(self.codec, fragment.length)
        if message.size != size:
            raise Malformed("size", f"{message.size} bytes where {size} belong")
        self._note_version(track, message.version, now)
        if track.held is not None and message.base_version < track.held.version:
            return None
        incoming = track.updates.get(message.base_version)
        if incoming is None or not _same(incoming.first, message):
            incoming = track.updates[message.base_version] = _Incoming(message, Assembly(size))
            if track.keyframe is not None and len(track.updates) > UPDATES_KEPT:
                self._carry(track, track.keyframe, message.base_version)
            for base in sorted(track.updates)[:-UPDATES_KEPT]:
                del track.updates[base]
        self._came(track, message, now, of_request=not track.wants_keyframe)
        incoming.assembly.add(message)
        return self._advance(track, now)

    def take_keyframe(self, message: Keyframe, now: float) -> PublicFragment | None:
        """Take a chunk of a keyframe that is wanted; the fragment's new public state when it is complete."""
        if message.epoch != self.epoch or message.fragment > len(self._tracks):
            return None
        track = self._tracks[message.fragment] if message.fragment < len(self._tracks) else self._static
        if not track.wants_keyframe or message.version < track.floor:
            return None
        if message.size != track.keyframe_bytes:
            raise Malformed("size", f"{message.size} bytes where {track.keyframe_bytes} belong")
        incoming = track.keyframe
        if incoming is not None:
            self._carry(track, incoming, message.version)
            if message.version < incoming.first.version:
                return None
        if incoming is None or not _same(incoming.first, message):
            incoming = track.keyframe = _Incoming(message, Assembly(message.size))
        self._came(track, message, now, of_request=True)
        if not incoming.assembly.add(message):
            return None
        return self._take_whole(track, incoming, now)

    def _carry(self, track: _Track, keyframe: _Incoming[Keyframe], to_version: int) -> None:
        """Move on, by the updates that are here, what has come of a keyframe, so that the rest of it may be newer.

        Otherwise no keyframe would ever be complete where a fragment is merged more often than it can be fetched. The
        codec's blocks do not depend on one another, so that what has not come yet may hold anything meanwhile.
        """
        while keyframe.first.version < to_version and track.fragment is not None:
            update = track.updates.get(keyframe.first.version)
            if update is None or not update.complete:
                return
            del track.updates[keyframe.first.version]
            values = torch.frombuffer(keyframe.assembly.payload, dtype=torch.float32)
            values.copy_(apply_step(self.codec, values, update.assembly.payload))
            keyframe.first = replace(keyframe.first, version=update.first.version, digest=update.first.digest)

    def _take_whole(self, track: _Track, incoming: _Incoming[Keyframe], now: float) -> PublicFragment | None:
        content, told = incoming.assembly.payload, incoming.first
        track.keyframe = None
        if digest(content) != told.digest:
            track.forget_requests()
            raise Malformed("digest", f"keyframe {told.version} of fragment {track.index}")
        if track.fragment is None:
            self.static = bytes(content)
            track.wants_keyframe = False
            return None
        vector = torch.frombuffer(content, dtype=torch.float32)
        if not torch.isfinite(vector).all():
            track.forget_requests()
            raise Malformed("nonfinite", f"keyframe {told.version} of fragment {track.index}")
        track.wants_keyframe = False
        track.forget_requests()
        track.held = PublicFragment(told.version, vector, told.digest)
        track.latest = max(track.latest, told.version)
        track.quiet_since = now
        return self._advance(track, now) or track.held

    def _came(self, track: _Track, message: Chunked, now: float, *, of_request: bool) -> None:
        if of_request and message.chunk in track.asked:
            track.asked.discard(message.chunk)
            waited = now - max(track.quiet_since, track.asked_at)
            track.patience_seconds = min(LONGEST_RETRY_SECONDS, max(RETRY_SECONDS, 2 * waited))
        track.quiet_since = now

    def _advance(self, track: _Track, now: float) -> PublicFragment | None:
        """Apply what is complete and fits on what is held; the newest state if there was any."""
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

    # --- what to ask for ---------------------------------------------------------------------------------------------
    def requests(self, now: float) -> Iterator[Request]:
        """What to ask for now, within the window of chunks that may be in flight. Each is to be sent at once."""
        missing_of = self._missing()
        for track in missing_of:
            self._expire(track, now)
        room = FETCH_WINDOW - sum(len(track.asked) for track in missing_of)
        for track in missing_of:
            if room <= 0:
                return
            what, version, missing = self._lacking(track, now)
            chunks = tuple(sorted(missing - track.asked)[:room])
            if chunks:
                room -= len(chunks)
                track.asked.update(chunks)
                track.asked_at = now
                if track.keyframe is None:
                    track.floor = max(track.floor, version)
                yield Request(what, track.index, version, chunks)

    def _expire(self, track: _Track, now: float) -> None:
        if track.asked and now - max(track.asked_at, track.quiet_since) >= track.patience_seconds:
            track.asked.clear()
            track.patience_seconds = min(LONGEST_RETRY_SECONDS, 2 * track.patience_seconds)
            track.tries += 1

    def _lacking(self, track: _Track, now: float) -> tuple[str, int, set[int]]:
        """(what, version, chunks) to ask for; no chunks where nothing is missing or it may still come by itself."""
        held = track.held
        if not track.wants_keyframe and held is not None and track.behind:
            if not track.asked and now - track.quiet_since < GAP_SECONDS:
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
        """Tracks of which something is missing, in order."""
        tracks = [self._tracks[p] if p < len(self._tracks) else self._static for p in sorted(self._unsettled)]
        settled = {t.index for t in tracks if not t.wants_keyframe and (t.held is None or not t.behind)}
        self._unsettled -= settled
        return [track for track in tracks if track.index not in settled]

    def _all(self) -> list[_Track]:
        return [*self._tracks, self._static]


def _same(first: Update | Keyframe, other: Update | Keyframe) -> bool:
    return (first.version, first.digest) == (other.version, other.digest)
