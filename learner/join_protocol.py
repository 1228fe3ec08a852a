"""Join protocol of a learner or observer: Hello until a Welcome comes, at the start and again under each new epoch; the
learner that the syncer chooses sends version 0. No socket, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..common.codec import digest
from ..common.config import RunSettings, TaskSettings
from ..common.errors import Malformed, Refused
from ..common.fragments import Fragment, Plan, balanced_plan
from ..common.log import get_logger
from ..common.wire import Beat, Hello, Seed, Welcome, split
from .identity import Identity
from .mailbox import Mailbox

SEED_PATIENCE = 3
"""After this many answers in a row that list the same fragments as missing, these are sent again."""


class SeedSource(Protocol):
    """A model that is not being trained yet."""

    def vector(self, fragment: Fragment) -> Tensor:
        """Flat f32 in host memory."""
        ...

    def static_bytes(self) -> bytes: ...


class SeedSender:
    """Sends the requested parts of version 0. `source` is None for an observer, which cannot send any."""

    def __init__(self, me: Identity, source: Callable[[Plan], SeedSource] | None) -> None:
        self._me, self._source = me, source
        self._messages: Iterator[Seed] | None = None
        self._missing: tuple[int, ...] = ()
        self._repeats = 0

    @property
    def chosen(self) -> bool:
        """The syncer has chosen this learner."""
        return bool(self._missing)

    @property
    def sending(self) -> bool:
        return self._messages is not None

    def drop(self) -> None:
        """Another syncer process serves the run; it will choose a learner again."""
        self._messages, self._missing, self._repeats = None, (), 0

    def request(self, plan: Plan, missing: tuple[int, ...], epoch: int) -> bool:
        """The syncer lacks these parts. Returns True if they are sent now, False if they may still be in flight.

        Raises Malformed if this process is an observer.
        """
        if self._source is None:
            raise Malformed("verdict", "an observer cannot send version 0")
        self._repeats = self._repeats + 1 if missing == self._missing else 0
        in_flight = self.chosen and self._repeats < SEED_PATIENCE
        self._missing = missing
        if self.sending or in_flight:
            return False
        self._repeats = 0
        self._messages = self._parts(self._source(plan), plan, missing, epoch)
        return True

    def next(self) -> Seed | None:
        """The next chunk to send. Each fragment is copied out of the model only when it is due."""
        message = next(self._messages, None) if self._messages is not None else None
        if message is None:
            self._messages = None
        return message

    def _parts(self, source: SeedSource, plan: Plan, missing: Sequence[int], epoch: int) -> Iterator[Seed]:
        for index in missing:
            if index > plan.static_index:
                continue
            static = index == plan.static_index
            content = source.static_bytes() if static else source.vector(plan.fragments[index]).numpy().data.cast("B")
            content_digest = digest(content)
            for part in split(content):
                yield Seed(
                    run=self._me.run, name=self._me.name, incarnation=self._me.incarnation, epoch=epoch,
                    fragment=index, digest=content_digest, **part,
                )  # fmt: skip


log = get_logger("learner")

HELLO_SECONDS = 0.5


@dataclass(frozen=True)
class Admitted:
    """The run's parameters, from a Welcome and the Beat before it."""

    plan: Plan
    settings: RunSettings
    task: TaskSettings | None


class JoinRequest:
    """Requests membership, and sends version 0 if the syncer requests it."""

    def __init__(self, me: Identity, mailbox: Mailbox, seed_sender: SeedSender) -> None:
        self.me, self.mailbox, self.seed_sender = me, mailbox, seed_sender
        self.plan: Plan | None = None
        """The plan with which this process was admitted; it stays the same under later epochs."""
        self._due = 0.0

    def restart(self) -> None:
        """Another syncer process serves the run."""
        self.seed_sender.drop()
        self._due = 0.0

    def hello(self, now: float) -> Iterator[Hello]:
        """The Hello, if it is due; at a lower rate while version 0 is being sent."""
        if now >= self._due:
            self._due = now + (2 * HELLO_SECONDS if self.seed_sender.chosen else HELLO_SECONDS)
            yield self.me.hello()

    def receive(self, welcome: Welcome, beat: Beat) -> Admitted | None:
        """Take the syncer's answer. Returns the run's parameters once admitted. Raises Refused."""
        if welcome.verdict == "wait":
            self.mailbox.waits_for = f"its turn ({welcome.reason})" if welcome.reason else "its turn"
        elif welcome.verdict == "refused":
            raise Refused(f"run {self.me.run} rejects {self.me.name}: {welcome.reason}")
        elif welcome.verdict == "seed" and self.plan is not None:
            raise Refused(  # once the model trains, the network thread must not read it
                f"run {self.me.run} starts again from version 0, without the state that {self.me.name} had joined; "
                "restart the learner"
            )
        elif welcome.verdict == "seed":
            self.mailbox.waits_for = "its version 0 to be stored by the syncer"
            if self.seed_sender.request(self._plan_of(welcome), welcome.missing, welcome.epoch):
                log.info("seeding", parts=len(welcome.missing))
        elif welcome.verdict in ("welcome", "finished"):
            self.seed_sender.drop()
            self.plan = self._plan_of(welcome)
            return self._admitted(self.plan, beat)
        return None

    def _plan_of(self, welcome: Welcome) -> Plan:
        """The plan of the welcome. Raises Refused if this side derives or uses a different one."""
        plan = balanced_plan(self.me.layout, welcome.fragments)
        if plan.digest != welcome.plan_digest or (self.plan is not None and self.plan.digest != plan.digest):
            raise Refused(
                f"run {self.me.run} splits the model into {welcome.fragments} fragments differently from "
                f"{self.me.name}; use the same version of this package on both sides, and restart the learner"
            )
        return self.plan or plan

    def _admitted(self, plan: Plan, beat: Beat) -> Admitted:
        try:
            settings = RunSettings.from_map(beat.settings)
            return Admitted(plan, settings, TaskSettings.from_map(beat.task) if beat.task else None)
        except Malformed as wrong:
            raise Refused(
                f"the settings of run {self.me.run} are not valid for this version ({wrong}); "
                "use the same version of this package on both sides"
            ) from wrong
