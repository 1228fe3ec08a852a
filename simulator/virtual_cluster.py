"""Virtual cluster: a whole run in virtual time, in one process, with virtual learners, network and syncer.

Rounds, schedule, ledger, aggregation, outer step and codec are the syncer's production code; sessions or counters are
the learners' own; only the network between them is virtual. Events happen in order of their time, and at equal times in
the order in which they were scheduled: the same seed gives the same run, tape and bits.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from ..common.config import BEAT_SECONDS, RunSettings
from ..common.errors import SettingError
from ..common.wire import Beat, Call
from ..learner.mailbox import TrainingStatus
from ..learner.outbox import Outbox
from ..learner.public_model import PublicFragment
from ..learner.status_messages import ByteCounts, alive
from ..learner.task.text import generator
from ..learner.timing import StepTimer
from ..syncer.ledger import Who
from ..syncer.round_events import Called, Drained, Lost, Merge, Unmet
from ..syncer.telemetry import learner_rows, run_figures
from .backend import EPOCH, LearnerBackend, ModelBackend, Sent
from .failures import Stretch

Life = Iterator[Stretch]
"""A learner's inner steps from its start on, each with its share of the batch; what lies between two is a pause."""


@dataclass(frozen=True, kw_only=True)
class NetworkPath:
    """Between each learner and the syncer."""

    latency_seconds: float = 0.01
    """One way."""
    megabit: float = 0.0
    """Mbit/s in each direction of a learner's link; 0 = no limit."""

    def seconds(self, octets: int) -> float:
        return octets * 8 / (self.megabit * 1e6) if self.megabit else 0.0


@dataclass(frozen=True)
class VirtualMember:
    """One learner: what it does from each of its starts on, and when that life ends by its death."""

    name: str
    lives: Iterable[tuple[Life, float]]
    """(steps, when it dies, in virtual seconds), in order of their beginnings; infinity where it never does."""
    comes_at: float = 0.0
    """Since when it is allocated, dead or alive."""


@dataclass(frozen=True)
class RunOutcome:
    """What became of a virtual run."""

    figures: dict[str, Any]
    """As a run's summary.json has them."""
    learners: list[dict[str, Any]]
    model_hash: str
    virtual_seconds: float
    goodput: float
    """Share of the time for which learners are allocated, from the first step on, in which they made steps with all
    they have.
    """
    worked_seconds: float
    """Real seconds inside inner steps."""
    real_seconds: float


@dataclass
class _Present:
    """A learner while it lives."""

    name: str
    worker: LearnerBackend
    answers: Outbox
    pace: StepTimer
    dies_at: float
    held: list[int]
    """The newest version of each fragment that was delivered."""
    up_free_at: float = 0.0
    down_free_at: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    timed: bool = False
    loss: float | None = None
    gone: bool = False


@dataclass
class VirtualCluster:
    """The world of one virtual run."""

    settings: RunSettings
    substance: ModelBackend
    members: Sequence[VirtualMember]
    way: NetworkPath = field(default_factory=NetworkPath)
    tape: Path | None = None
    """Where learners write theirs; the syncer's belongs to the substance."""
    beat_seconds: float = BEAT_SECONDS
    horizon_seconds: float = math.inf
    """Virtual time after which a run that is not over is given up."""
    watch: Callable[[int], None] = lambda _: None
    """Called with the global step at each beat."""

    def __post_init__(self) -> None:
        check_quorum(self.settings, len(self.members))
        self.now = 0.0
        self._rounds, self._figures = self.substance.rounds, self.substance.figures
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._present: dict[str, _Present] = {}
        self._to_come = 0
        self._over = False
        self._tick_at = math.inf
        self._worked_seconds = self._useful_seconds = 0.0
        self._began_at = math.inf
        self._model_hash = ""

    def run(self) -> RunOutcome:
        """Until every fragment has had its last round. SettingError if nobody is left who could bring that about;
        Diverged if a learner's model is not finite again and again.
        """
        began = time.perf_counter()
        for member in self.members:
            self._arrange_next_life(member.name, enumerate(member.lives, 1))
        self._at(0.0, self._beat)
        try:
            while not self._over:
                self.now, _, happens = heapq.heappop(self._events)
                happens()
        finally:
            for present in self._living():
                self._die(present)
            self._rounds.close()
        return RunOutcome(
            figures=run_figures(self._rounds, self._figures, "finished", self.now),
            learners=learner_rows(self._rounds),
            model_hash=self._model_hash,
            virtual_seconds=self.now,
            goodput=round(self._useful_seconds / self._allocated_seconds(), 4),
            worked_seconds=self._worked_seconds,
            real_seconds=time.perf_counter() - began,
        )

    def _allocated_seconds(self) -> float:
        """Of all learners together, up to now."""
        return sum(max(0.0, self.now - max(self._began_at, member.comes_at)) for member in self.members)

    def _at(self, when: float, happens: Callable[[], object]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._order), happens))

    def _after(self, seconds: float, happens: Callable[[], object]) -> None:
        self._at(self.now + seconds, happens)

    # --- a learner ---------------------------------------------------------------------------------------------------
    def _arrange_next_life(self, name: str, lives: Iterator[tuple[int, tuple[Life, float]]]) -> None:
        """The next one with a step in it; when it begins, the one after it is arranged."""
        begun = ((number, next(life, None), life, dies_at) for number, (life, dies_at) in lives)
        found = next(((n, first, life, dies) for n, first, life, dies in begun if first and first.start < dies), None)
        if found is None:
            return
        number, first, life, dies_at = found
        self._to_come += 1

        def begin() -> None:
            self._to_come -= 1
            self._arrange_next_life(name, lives)
            present = self._join(name, number, dies_at)
            self._start_step(present, first, life)
            self._report_each_second(present)

        self._at(first.start, begin)

    def _join(self, name: str, number: int, dies_at: float) -> _Present:
        """A new incarnation that has just fetched everything."""
        if name in self._present:
            self._die(self._present[name])
        incarnation = incarnation_of(self.settings.seed, name, number)
        worker = self.substance.worker(name, incarnation, self.tape)
        self._rounds.join(name, incarnation, self.now)
        present = _Present(
            name, worker, Outbox(worker.me), StepTimer(self.now), dies_at, held=list(self._rounds.versions)
        )  # fmt: skip
        self._present[name] = present
        self._tick()
        beat = self._beat_message()
        worker.hear(beat, self.now)  # nobody joins without one
        for call in beat.calls:
            present.answers.add_call(call)
        return present

    def _start_step(self, present: _Present, stretch: Stretch, life: Life) -> None:
        if present.gone:
            return
        self._began_at = min(self._began_at, self.now)
        present.worker.begin_step(self.now)
        present.worker.share = stretch.share
        if stretch.end < present.dies_at:
            self._at(stretch.end, lambda: self._end_step(present, stretch, life))
        else:
            self._at(present.dies_at, lambda: self._die(present))

    def _end_step(self, present: _Present, stretch: Stretch, life: Life) -> None:
        if present.gone:
            return
        self._useful_seconds += stretch.share * stretch.useful_seconds
        worker, began = present.worker, time.perf_counter()
        present.loss = worker.step([*present.answers.calls.values()])
        if worker.wants_reset():
            self._reset(present)
        self._worked_seconds += time.perf_counter() - began
        present.pace.enter(self.now)
        present.pace.leave(self.now)  # at once: a pause before the next step is a part of that, as in a real loop
        for sent in worker.sent():
            self._send(present, sent)
        if present.pace.step_seconds and not present.timed:
            present.timed = True
            self._report(present)
        following = next(life, None)
        if following is None:
            self._die(present)
        else:
            self._at(following.start, lambda: self._start_step(present, following, life))

    def _send(self, present: _Present, sent: Sent) -> None:
        """An answer is on its way; it counts when all of it is there."""
        present.bytes_up += sent.octets
        present.up_free_at = max(self.now, present.up_free_at) + self.way.seconds(sent.octets)
        leaves_at = present.up_free_at
        self._at(leaves_at + self.way.latency_seconds, partial(self._take, present, sent, leaves_at))
        if not present.timed:
            self._report(present)  # the syncer does not know its pace yet, and so not that it can have done this

    def _take(self, present: _Present, sent: Sent, left_at: float) -> None:
        """An answer is here, unless its sender died before all of it had left. The machine looks after all that arrives
        at this moment, as the syncer's own loop does.
        """
        if present.gone and present.dies_at < left_at:
            return
        refused = self.substance.take(sent)
        if refused:
            self._reject(present.worker.me.pair, refused)
            return
        member = self._rounds.members.get(present.worker.me.pair)
        if member is not None:
            member.rejected_in_a_row = 0
        self._at(self.now, self._tick)

    def _reject(self, who: Who, reason: str) -> None:
        """As the syncer does: who is refused too often for what it sends starts over."""
        member, present = self._rounds.members.get(who), self._present.get(who[0])
        if member is not None and present is not None and member.reject(reason) and member.order_reset(self.now):
            self._after(self.way.latency_seconds, partial(self._reset, present))

    def _reset(self, present: _Present) -> None:
        """Everything anew, and nothing of what it did since."""
        if present.gone:
            return
        present.answers.drop()
        for fragment, public in enumerate(self.substance.whole()):
            present.held[fragment] = public.version
            present.worker.deliver(fragment, public, reset=True)

    def _die(self, present: _Present) -> None:
        if not present.gone:
            present.gone, present.dies_at = True, self.now
            present.worker.close()

    def _report_each_second(self, present: _Present) -> None:
        if not present.gone:
            self._report(present)
            self._after(self.beat_seconds, lambda: self._report_each_second(present))

    def _report(self, present: _Present) -> None:
        pace, worker = present.pace, present.worker
        counters = TrainingStatus(
            counts=worker.done, step_seconds=pace.step_seconds, last_step_at=pace.last_step_at,
            inner_seconds=pace.inner_seconds, session_seconds=pace.session_seconds, started_at=pace.started_at,
            loss=present.loss, versions=worker.versions, versions_epoch=EPOCH,
        )  # fmt: skip
        traffic = ByteCounts(present.bytes_up, present.bytes_down)
        report = alive(worker.me, EPOCH, counters, (), traffic=traffic, now=self.now)

        def arrives() -> None:
            if self._rounds.heard(report, self.now) is not None:
                self._figures.record_first_step(self.now, report.since_first_step_seconds)
                self._at(self.now, self._tick)

        self._after(self.way.latency_seconds, arrives)

    # --- the syncer --------------------------------------------------------------------------------------------------
    def _tick(self) -> None:
        if self._over:
            return
        for action in self._rounds.tick(self.now):
            match action:
                case Called(call):
                    self._call(self._rounds.wire_call(call))
                case Merge():
                    self._merge(action)
                case Drained():
                    self._finish()
                    return
                case Lost() | Unmet():
                    pass
        self._arrange_tick(max(self._rounds.next_deadline(self.now), math.nextafter(self.now, math.inf)))

    def _arrange_tick(self, due: float) -> None:
        """The machine looks again at `due`, if it does not before. One look is arranged at a time: an earlier one takes
        its place, and the later event then does nothing.
        """
        if self.now < self._tick_at <= due:
            return
        self._tick_at = due
        self._at(due, lambda: self._tick() if self._tick_at <= self.now else None)

    def _merge(self, merge: Merge) -> None:
        for answer in merge.unreported:
            self._reject(answer.who, "unreported")
        made = self.substance.merge(merge, self.now)
        if made is None:
            self._call(self._rounds.wire_call(self._rounds.failed(merge, self.now).call))
            return
        public, octets = made
        for present in self._living():
            present.bytes_down += octets
            present.down_free_at = max(self.now, present.down_free_at) + self.way.seconds(octets)
            arrives = present.down_free_at + self.way.latency_seconds
            self._at(arrives, partial(self._deliver, present, merge, public))
        self._at(self.now, self._tick)  # the call's place may be another's now

    def _deliver(self, present: _Present, merge: Merge, public: PublicFragment) -> None:
        fragment = merge.call.fragment
        if public.version > present.held[fragment]:  # else it was under way when all was fetched anew
            present.held[fragment] = public.version
            present.worker.deliver(fragment, public)
        present.answers.calls.pop(merge.call.slot, None)

    def _call(self, call: Call) -> None:
        for present in self._living():
            self._after(self.way.latency_seconds, partial(present.answers.add_call, call))

    def _beat(self) -> None:
        living = self._living()
        if not living and not self._to_come:
            in_time = (
                f" within {self.horizon_seconds:,.0f} virtual seconds" if math.isfinite(self.horizon_seconds) else ""
            )
            raise SettingError(
                f"all learners are gone at step {self._rounds.t} of {self.settings.steps}, "
                f"and nobody comes back{in_time}"
            )
        if self.now > self.horizon_seconds:
            raise SettingError(
                f"given up at step {self._rounds.t} of {self.settings.steps}, after {self.now:,.0f} virtual seconds: "
                "learners are too rarely there (--absent, --quorum), or their way is too long or narrow "
                "(--latency-seconds, --megabit)"
            )
        self.watch(self._rounds.t)
        beat = self._beat_message()
        for present in living:
            self._hear_beat(present, beat)
        self._tick()
        self._after(self.beat_seconds, self._beat)

    def _beat_message(self) -> Beat:
        rounds = self._rounds
        return Beat(
            run=self.settings.run, epoch=EPOCH, state="running", t=rounds.step(self.now), steps=self.settings.steps,
            step_seconds=rounds.members.typical_step_seconds(), versions=tuple(rounds.versions),
            calls=rounds.wire_calls(), syncer=1,
        )  # fmt: skip

    def _hear_beat(self, present: _Present, beat: Beat) -> None:
        def arrives() -> None:
            present.worker.hear(beat, self.now)
            for _ in present.answers.update_open_calls(beat.calls, self.now):
                pass  # nothing is lost here, so nothing is sent again

        self._after(self.way.latency_seconds, arrives)

    def _living(self) -> list[_Present]:
        return [present for _, present in sorted(self._present.items()) if not present.gone]

    def _finish(self) -> None:
        self._model_hash = self.substance.finish()
        self._rounds.ledger.close_all()
        self._over = True


def check_quorum(settings: RunSettings, learners: int) -> None:
    """SettingError if so many learners never meet it."""
    if settings.quorum > learners:
        raise SettingError(
            f"--quorum {settings.quorum} is more than the {learners} learners: nothing would ever be merged; "
            "lower --quorum or raise --learners"
        )


def incarnation_of(seed: int, name: str, life: int) -> int:
    """The incarnation of a learner's life number `life`, from 1 on: its data's order depends on it."""
    return 1 + int(generator("incarnation", seed, name, life).integers(2**52))


def steady(step_seconds: float, *, begins: float = 0.0) -> Life:
    """Steps of equal length for ever, without a pause."""
    for number in count():
        start = begins + number * step_seconds
        yield Stretch(start, start + step_seconds, 1.0, step_seconds)
