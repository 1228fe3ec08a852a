"""A whole run in virtual time, in one process: learners, the way between, and the syncer's production parts.

Rounds, pace, ledger, merge, outer step and codec are the syncer's, sessions the learners' own; only what stands between
them is virtual. Events happen in order of their time, and at the same time in the order in which they were arranged:
the same seed gives the same run, tape and bits.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from ..common.codec import digest
from ..common.config import BEAT_SECONDS, RunSettings, TaskSettings
from ..common.errors import Malformed, SettingError
from ..common.fragments import Plan, balanced_plan, default_fragments
from ..common.wire import Beat, Call, Delta
from ..learner.answers import Answers
from ..learner.desk import Counters, Joined
from ..learner.follower import Public
from ..learner.pace import Pace
from ..learner.replica import Replica, layout_of
from ..learner.reports import Traffic, alive
from ..learner.text import Corpus, generator
from ..learner.transformer import Transformer
from ..syncer.figures import Figures
from ..syncer.merging import book_merge, merge_answers
from ..syncer.parts import Served
from ..syncer.recording import recorded
from ..syncer.rounds import Called, Drained, Lost, Merge, Rounds, Unmet
from ..syncer.state import GlobalState
from ..syncer.telling import learner_rows, run_figures
from .failures import Stretch
from .trainee import Trainee

EPOCH = 1
MERGE_SECONDS = 0.001
"""What a merge is said to take: a figure of its own, since virtual time does not know how fast this machine is."""
Life = Iterator[Stretch]
"""One learner's inner steps, each with its share of the batch; what lies between two of them is a pause."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """Between each learner and the syncer."""

    latency_seconds: float = 0.01
    """One way."""
    megabit: float = 0.0
    """Mbit/s in each direction of a learner's link; 0 = no limit."""

    def seconds(self, octets: int) -> float:
        return octets * 8 / (self.megabit * 1e6) if self.megabit else 0.0


@dataclass(frozen=True)
class Member:
    """One learner of the cluster: `lives` are what it does from one start to its next death, each begins at its first
    stretch and ends `dies_at`.
    """

    name: str
    lives: Sequence[tuple[Life, float]]
    """(steps, when it dies); the last one usually never does."""


@dataclass
class Outcome:
    """What became of a virtual run."""

    figures: dict[str, Any]
    """As summary.json has them."""
    learners: list[dict[str, Any]]
    model_hash: str
    state: GlobalState
    virtual_seconds: float
    model_seconds: float
    """Real seconds inside the models' forward and backward passes and optimizer steps."""
    real_seconds: float


@dataclass
class _Present:
    """A learner while it lives."""

    name: str
    trainee: Trainee
    answers: Answers
    pace: Pace
    up_free_at: float = 0.0
    down_free_at: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    timed: bool = False
    loss: float | None = None
    gone: bool = False


@dataclass
class Cluster:
    """The world of one virtual run."""

    settings: RunSettings
    task: TaskSettings
    corpus: Corpus
    members: Sequence[Member]
    way: Way = field(default_factory=Way)
    tape: Path | None = None
    watch: Callable[[int, GlobalState], None] | None = None
    """Called with the global step and the state after each merge."""

    def __post_init__(self) -> None:
        if self.settings.quorum > len(self.members):
            raise SettingError(
                f"--quorum {self.settings.quorum} is more than the {len(self.members)} learners: nothing would ever be "
                "merged; lower --quorum or raise --learners"
            )
        self.now = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._present: dict[str, _Present] = {}
        self._over = False
        self._tick_at = math.inf
        self._model_seconds = 0.0
        model = Transformer(self.task, self.settings.seed)
        self.plan = plan_of(model, self.settings)
        replica = Replica(model, self.plan)
        vectors = [replica.vector(f) for f in self.plan.fragments]
        state = GlobalState.from_version_zero(self.plan, self.settings, vectors, replica.static_bytes())
        sizes = [f.parameters for f in self.plan.fragments]
        if self.tape is None:
            rounds = Rounds(self.settings, sizes, EPOCH)
        else:
            rounds = recorded(self.tape, self.settings, self.task, self.plan, epoch=EPOCH, data_hash=self.corpus.sha256)
        self.served = Served(state, rounds, Figures(self.plan.parameters, rounds.schedule.steps_between))
        self._whole = [Public(0, vector, digest(vector)) for vector in vectors]

    # --- events ------------------------------------------------------------------------------------------------------
    def run(self) -> Outcome:
        """Until every fragment has had its last round. SettingError if nobody is left who could bring that about."""
        began = time.perf_counter()
        for member in self.members:
            for number, (life, dies_at) in enumerate(member.lives, 1):
                self._arrange_life(member.name, number, life, dies_at)
        self._at(0.0, self._beat)
        while not self._over:
            if not self._events:
                raise SettingError("all learners of the virtual cluster are gone for good before its last step")
            self.now, _, happens = heapq.heappop(self._events)
            happens()
        return self._outcome(time.perf_counter() - began)

    def _at(self, when: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._order), happens))

    def _arrange_life(self, name: str, number: int, life: Life, dies_at: float) -> None:
        first = next(life, None)
        if first is None or first.start >= dies_at:
            return

        def begin() -> None:
            present = self._join(name, number)
            self._start_step(present, first, life, dies_at)
            self._alive(present)

        self._at(first.start, begin)

    def _join(self, name: str, number: int) -> _Present:
        """A new incarnation, with the public model of this moment: what it takes to fetch it is part of its life."""
        if name in self._present:
            self._present[name].gone = True
        rounds, state = self.served.rounds, self.served.state
        incarnation = 1 + int(generator("incarnation", self.settings.seed, name, number).integers(2**52))
        joined = Joined(
            self.plan, self.settings, self.task, EPOCH, rounds.step(self.now), tuple(self._whole), state.static
        )
        trainee = Trainee(joined, self.corpus, name, incarnation, tape=self.tape)
        rounds.join(name, incarnation, self.now)
        present = _Present(name, trainee, Answers(trainee.me), Pace(self.now))
        self._present[name] = present
        self._hear_beat(present)
        self._tick()
        return present

    # --- a learner ---------------------------------------------------------------------------------------------------
    def _start_step(self, present: _Present, stretch: Stretch, life: Life, dies_at: float) -> None:
        present.pace.leave(stretch.start)
        desk = present.trainee.desk
        desk.progress_told = desk.progress_at_time(stretch.start)
        present.trainee.share = stretch.share

        def ends() -> None:
            if not present.gone:
                self._boundary(present)
                following = next(life, None)
                if following is not None:
                    self._at(following.start, lambda: self._start_step(present, following, life, dies_at))

        if stretch.end < dies_at:
            self._at(stretch.end, ends)
        else:
            self._at(dies_at, lambda: self._die(present))

    def _die(self, present: _Present) -> None:
        present.gone = True
        present.trainee.session.close("failed")

    def _boundary(self, present: _Present) -> None:
        """An inner step has ended."""
        trainee = present.trainee
        trainee.open_calls([*present.answers.calls.values()])
        began = time.perf_counter()
        present.loss = trainee.step()
        self._model_seconds += time.perf_counter() - began
        present.pace.enter(self.now)
        for capture in trainee.captures():
            try:
                self._send(present, trainee.encode(capture))
            except Malformed:
                trainee.desk.found_nonfinite()
        if present.pace.step_seconds and not present.timed:
            present.timed = True
            self._report(present)

    def _send(self, present: _Present, deltas: list[Delta]) -> None:
        """An answer is on its way; it counts when its last chunk is there."""
        for chunk in deltas:
            present.bytes_up += len(chunk.payload)
            begins = max(self.now, present.up_free_at)
            present.up_free_at = begins + self.way.seconds(len(chunk.payload))
            self._at(present.up_free_at + self.way.latency_seconds, partial(self._take, chunk))

    def _alive(self, present: _Present) -> None:
        """Each second, until it dies."""
        if not present.gone:
            self._report(present)
            self._at(self.now + BEAT_SECONDS, lambda: self._alive(present))

    def _report(self, present: _Present) -> None:
        pace, session = present.pace, present.trainee.session
        counters = Counters(
            books=present.trainee.done, step_seconds=pace.step_seconds, last_step_at=pace.last_step_at,
            inner_seconds=pace.inner_seconds, session_seconds=pace.session_seconds, started_at=pace.started_at,
            loss=present.loss, versions=session.versions, versions_epoch=EPOCH,
        )  # fmt: skip
        traffic = Traffic(present.bytes_up, present.bytes_down)
        report = alive(present.trainee.me, EPOCH, counters, (), traffic=traffic, now=self.now)

        def arrives() -> None:
            if self.served.rounds.heard(report, self.now) is not None:
                self.served.figures.stepped(self.now, report.since_first_step_seconds)
                self._tick()

        self._at(self.now + self.way.latency_seconds, arrives)

    # --- the syncer --------------------------------------------------------------------------------------------------
    def _take(self, chunk: Delta) -> None:
        """A chunk of an answer is here."""
        try:
            answer = self.served.intake.take(chunk)
        except Malformed:
            return  # late, or of an older attempt: as the syncer's own loop, it is only counted
        if answer is not None and not self.served.rounds.answer(answer):
            self._tick()

    def _tick(self) -> None:
        if self._over:
            return
        for action in self.served.rounds.tick(self.now):
            match action:
                case Called(call):
                    self._call(self.served.rounds.wire_call(call))
                case Merge():
                    self._merge(action)
                case Drained():
                    self._finish()
                    return
                case Lost() | Unmet():
                    pass
        self._tick_again()

    def _tick_again(self) -> None:
        """Have the machine looked at when it has something to do next."""
        due = self.served.rounds.next_deadline(self.now)
        if due <= self.now:
            due = math.nextafter(self.now, math.inf)
        if not self.now < self._tick_at <= due:
            self._tick_at = due
            self._at(due, lambda: self._tick() if self._tick_at <= self.now else None)

    def _merge(self, merge: Merge) -> None:
        served, call = self.served, merge.call
        try:
            merged = merge_answers(served, merge)
        except Malformed:
            self._call(served.rounds.wire_call(served.rounds.failed(merge, self.now).call))
            return
        contributors = tuple((*a.who, a.steps_to, a.tokens_to) for a in merge.answers)
        public = Public(merged.version, served.state.public[call.fragment], merged.digest, contributors)
        book_merge(served, merge, merged, self.now, MERGE_SECONDS)
        self._whole[call.fragment] = public
        for present in self._living():
            self._publish(present, call, public, len(merged.payload))
        if self.watch is not None:
            self.watch(served.rounds.step(self.now), served.state)
        self._at(self.now, self._tick)  # the call's place may be another's now

    def _publish(self, present: _Present, call: Call | Any, public: Public, octets: int) -> None:
        present.bytes_down += octets
        present.down_free_at = max(self.now, present.down_free_at) + self.way.seconds(octets)
        arrival = present.trainee.arrival(call.fragment, EPOCH, public)
        slot = call.slot

        def arrives() -> None:
            present.trainee.deliver([arrival])
            present.answers.calls.pop(slot, None)

        self._at(present.down_free_at + self.way.latency_seconds, arrives)

    def _call(self, call: Call) -> None:
        for present in self._living():
            self._at(self.now + self.way.latency_seconds, partial(present.answers.heard_call, call))

    def _beat(self) -> None:
        for present in self._living():
            self._hear_beat(present)
        self._tick()
        if not self._over:
            self._at(self.now + BEAT_SECONDS, self._beat)

    def _hear_beat(self, present: _Present) -> None:
        rounds = self.served.rounds
        beat = Beat(
            run=self.settings.run, epoch=EPOCH, state="running", t=rounds.step(self.now), steps=self.settings.steps,
            step_seconds=rounds.members.typical_step_seconds(), versions=tuple(rounds.versions),
            calls=rounds.wire_calls(), syncer=1,
        )  # fmt: skip

        def arrives() -> None:
            present.trainee.desk.heard(beat, self.now)
            for _ in present.answers.heard_open(beat.calls, self.now):
                pass  # nothing is lost here, so nothing is sent again

        self._at(self.now + self.way.latency_seconds, arrives)

    def _living(self) -> list[_Present]:
        return [present for _, present in sorted(self._present.items()) if not present.gone]

    def _finish(self) -> None:
        served = self.served
        served.state.finalize()
        served.rounds.ledger.close_all()
        served.rounds.ended(served.state.model_hash())
        for present in self._living():
            present.trainee.session.close("stopped")
        self._over = True

    def _outcome(self, real_seconds: float) -> Outcome:
        served = self.served
        return Outcome(
            figures=run_figures(served.rounds, served.figures, "finished", self.now),
            learners=learner_rows(served.rounds),
            model_hash=served.state.model_hash(),
            state=served.state,
            virtual_seconds=self.now,
            model_seconds=self._model_seconds,
            real_seconds=real_seconds,
        )


def plan_of(model: Transformer, settings: RunSettings) -> Plan:
    """How a run with these settings cuts the model."""
    layout = layout_of(model)
    return balanced_plan(layout, settings.fragments or default_fragments(layout, settings.sync_every))


def steady(step_seconds: float, *, begins: float = 0.0) -> Life:
    """A learner that steps for ever, and never pauses."""
    for number in count():
        start = begins + number * step_seconds
        yield Stretch(start, start + step_seconds, 1.0, step_seconds)
