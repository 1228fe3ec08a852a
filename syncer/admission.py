"""Admission of learners and observers: the answer to a Hello (seed, wait, welcome, refused or finished). Pure.

No learner is welcome until version 0 is complete on the syncer's disk. It comes from a file, or from ONE learner
chosen here; the choice lapses when that learner is silent for 3 beats. After that no new learner can replace the model:
another layout is refused, and the same layout fetches the run's values.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from ..common.config import RunSettings
from ..common.errors import Malformed, SettingError
from ..common.fragments import Layout, Plan, balanced_plan, default_fragments
from ..common.wire import Assembly, Hello, Seed, most_learners, unpack_layout
from .ledger import Who
from .membership import SILENCE_SECONDS, Membership

STUCK_SECONDS = 60.0
"""A chosen learner that sends Hellos, but no chunk of version 0 for this time, is replaced for good."""
STUCK_NAMES = 1000
COPIES = 3
"""Least number of f32 copies of the model in the syncer: the received one, Theta, and the error feedback."""

Verdict = Literal["welcome", "wait", "seed", "refused", "finished", "reset", "notice"]


@dataclass(frozen=True)
class Reply:
    verdict: Verdict
    reason: str = ""
    missing: tuple[int, ...] = ()


@dataclass
class SeedAssembly:
    """Version 0 as received so far from the chosen learner."""

    who: Who
    plan: Plan
    heard_at: float
    progress_at: float
    """Time of the last chunk, or of the choice."""
    assemblies: dict[int, Assembly] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.assemblies:
            sizes = [f.length * 4 for f in self.plan.fragments] + [self.plan.layout.static_bytes]
            self.assemblies = {p: Assembly(size) for p, size in enumerate(sizes)}

    def missing(self) -> tuple[int, ...]:
        return tuple(p for p, a in self.assemblies.items() if a.missing)


def layout_of(hello: Hello) -> Layout:
    """The layout in a Hello's payload; Malformed if it is invalid or does not match the Hello's fingerprint."""
    layout = _layout_in(bytes(hello.payload))
    if layout.fingerprint != hello.fingerprint:
        raise Malformed("layout", "the fingerprint does not match the layout")
    return layout


@lru_cache(maxsize=2)
def _layout_in(payload: bytes) -> Layout:
    """Cached: a Hello is repeated until it is answered, and a layout of many tensors takes a while to decode."""
    return unpack_layout(payload)


def plan_for(layout: Layout, settings: RunSettings) -> Plan:
    """The run's plan; SettingError if the settings cannot cut this layout."""
    return balanced_plan(layout, settings.fragments or default_fragments(layout, settings.sync_every))


def most_members(fragments: int, calls: int) -> int:
    """Most learners that may be live at once; a tenth is reserved for learners replaced while a call is open."""
    return max(1, most_learners(fragments, calls) * 9 // 10)


def _check_memory(plan: Plan) -> None:
    """SettingError if the run does not fit into this machine's memory. Checked before any memory is allocated."""
    needed = COPIES * 4 * sum(f.length for f in plan.fragments) + plan.layout.static_bytes
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise SettingError(
            f"the run of a model of {plan.parameters:,} parameters takes {needed / 2**30:,.0f} GiB of memory, "
            f"and the syncer's machine has {there / 2**30:,.0f} GiB"
        )


class Admission:
    """Answers Hellos. `plan` is None until version 0 is complete."""

    def __init__(self, settings: RunSettings, plan: Plan | None = None) -> None:
        self.settings = settings
        self.plan = plan
        self.seeding: SeedAssembly | None = None
        self.finished = False
        self._stuck: set[str] = set()
        """Names of learners that were chosen to send version 0 and stopped sending."""

    def reply(self, hello: Hello, members: Membership, now: float) -> Reply:
        """The answer to `hello`; Malformed if its layout is invalid."""
        if self.plan is None:
            return self._before_seed(hello, now)
        if hello.fingerprint != self.plan.layout.fingerprint:
            difference = self.plan.layout.difference(layout_of(hello))
            return Reply("refused", f"your model is not the run's: {difference}; build the same model")
        if self.finished:
            return Reply("finished") if hello.role == "observer" else self._admit(hello, members, now, "finished")
        if not hello.bulk_proven:
            return Reply("wait", "your bulk uplink is not proven yet")
        if hello.role == "observer":
            return Reply("welcome")
        most = most_members(self.plan.P, self.settings.resolved_overlap(self.plan.P))
        if members.get((hello.name, hello.incarnation)) is None and len(members.live()) >= most:
            return Reply("refused", f"the run has {most} learners, as many as its messages can name; begin another run")
        return self._admit(hello, members, now, "welcome")

    def _admit(self, hello: Hello, members: Membership, now: float, welcome: Verdict) -> Reply:
        """The answer `welcome`, unless another live learner holds the name."""
        verdict = members.admit(hello.name, hello.incarnation, now)
        if verdict == "refused":
            return Reply("refused", f"the name {hello.name} is in use by a learner that is alive; take another --name")
        return Reply("wait", "the name's former holder is not silent yet") if verdict == "wait" else Reply(welcome)

    def _before_seed(self, hello: Hello, now: float) -> Reply:
        if hello.role == "observer" or not hello.bulk_proven:
            return Reply("wait", "the run has no version 0 yet")
        who = (hello.name, hello.incarnation)
        if self.seeding is not None and self._lapses(self.seeding, now):
            self.seeding = None
        if self.seeding is None and hello.name in self._stuck:
            return Reply("wait", "you were chosen to send version 0, and did not: another learner is to send it")
        if self.seeding is None:
            try:
                plan = plan_for(layout_of(hello), self.settings)
                _check_memory(plan)
            except SettingError as wrong:
                return Reply("refused", str(wrong))
            self.seeding = SeedAssembly(who, plan, heard_at=now, progress_at=now)
        if self.seeding.who != who:
            return Reply("wait", f"{self.seeding.who[0]} is sending version 0")
        self.seeding.heard_at = now
        return Reply("seed", missing=self.seeding.missing())

    def _lapses(self, seeding: SeedAssembly, now: float) -> bool:
        """Whether the chosen learner is replaced: it is silent, or it sends Hellos but no chunk."""
        if now - seeding.progress_at >= STUCK_SECONDS and len(self._stuck) < STUCK_NAMES:
            self._stuck.add(seeding.who[0])
            return True
        return now - seeding.heard_at >= SILENCE_SECONDS

    def seed(self, message: Seed, now: float) -> SeedAssembly | None:
        """Take one chunk of version 0; returns the assembly when it is complete. Malformed if the chunk is invalid."""
        seeding = self.seeding
        if seeding is None or seeding.who != (message.name, message.incarnation):
            raise Malformed("stranger", "not chosen to send version 0")
        seeding.heard_at = now
        assembly = seeding.assemblies.get(message.fragment)
        if assembly is None:
            raise Malformed("fragment", f"{message.fragment}")
        seeding.progress_at = now
        if assembly.missing and assembly.add(message) and _sha256(assembly.payload) != message.digest:
            seeding.assemblies[message.fragment] = Assembly(assembly.size)
            raise Malformed("digest", f"version 0 of fragment {message.fragment}")
        return None if seeding.missing() else seeding


def _sha256(payload: memoryview) -> str:
    return hashlib.sha256(payload).hexdigest()
