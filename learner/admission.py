"""Being let in: Hello until a Welcome comes, at the start and again under each new epoch. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..common.config import RunSettings, TaskSettings
from ..common.errors import Malformed, Refused
from ..common.fragments import Plan, balanced_plan
from ..common.log import get_logger
from ..common.wire import Beat, Hello, Welcome
from .desk import Desk
from .identity import Identity
from .seeding import Seeding

log = get_logger("learner")

HELLO_SECONDS = 0.5


@dataclass(frozen=True)
class Admitted:
    """What a Welcome and the Beat before it say of the run."""

    plan: Plan
    settings: RunSettings
    task: TaskSettings | None


class Admission:
    """Asks to be let in, and gives version 0 if it is asked for that."""

    def __init__(self, me: Identity, desk: Desk, seeding: Seeding) -> None:
        self.me, self.desk, self.seeding = me, desk, seeding
        self.plan: Plan | None = None
        """The plan by which this process was let in; it stays the same under later epochs."""
        self._due = 0.0

    def ask_anew(self) -> None:
        """Another syncer process serves the run."""
        self.seeding.drop()
        self._due = 0.0

    def hello(self, now: float) -> Iterator[Hello]:
        """The Hello, if it is due; seldom while version 0 is on its way."""
        if now >= self._due:
            self._due = now + (2 * HELLO_SECONDS if self.seeding.chosen else HELLO_SECONDS)
            yield self.me.hello()

    def answered(self, welcome: Welcome, beat: Beat) -> Admitted | None:
        """Take the syncer's answer; what it says of the run once we are in. Refused if that will not be."""
        if welcome.verdict == "wait":
            self.desk.waits_for = f"its turn ({welcome.reason})" if welcome.reason else "its turn"
        elif welcome.verdict == "refused":
            raise Refused(f"run {self.me.run} does not take {self.me.name}: {welcome.reason}")
        elif welcome.verdict == "seed" and self.plan is not None:
            raise Refused(  # and the model is not the link's to read once it trains
                f"run {self.me.run} begins anew and has nothing of what {self.me.name} was part of; start it again"
            )
        elif welcome.verdict == "seed":
            self.desk.waits_for = "its version 0 to be stored by the syncer"
            if self.seeding.asked(self._plan_of(welcome), welcome.missing, welcome.epoch):
                log.info("seeding", parts=len(welcome.missing))
        elif welcome.verdict in ("welcome", "finished"):
            self.seeding.drop()
            self.plan = self._plan_of(welcome)
            return self._admitted(self.plan, beat)
        return None

    def _plan_of(self, welcome: Welcome) -> Plan:
        """The plan that the welcome speaks of; Refused if this side derives another one, or trains by another one."""
        plan = balanced_plan(self.me.layout, welcome.fragments)
        if plan.digest != welcome.plan_digest or (self.plan is not None and self.plan.digest != plan.digest):
            raise Refused(
                f"run {self.me.run} cuts the model into {welcome.fragments} fragments otherwise than {self.me.name} "
                "does; use the same version of this package on both sides, and start the learner again"
            )
        return self.plan or plan

    def _admitted(self, plan: Plan, beat: Beat) -> Admitted:
        try:
            settings = RunSettings.from_map(beat.settings)
            return Admitted(plan, settings, TaskSettings.from_map(beat.task) if beat.task else None)
        except Malformed as wrong:
            raise Refused(
                f"the settings of run {self.me.run} are not understood here ({wrong}); "
                "use the same version of this package on both sides"
            ) from wrong
