"""Virtual cluster: a whole run in virtual time, in one process, with virtual learners, network and syncer.

Rounds, schedule, ledger, aggregation, outer step and codec are the syncer's production code; sessions or counters are
the learners' own; only the network between them is virtual. Events happen in order of their time, and at equal times in
the order in which they were scheduled: the same seed gives the same run, tape and bits.
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

from ..common.config import BEAT_SECONDS, RunSettings
from ..common.errors import SettingError
from ..common.wire import Beat, Call
from ..learner.alive_and_goodbye import ByteCounts, alive
from ..learner.mailbox import TrainingStatus
from ..learner.outbox import Outbox
from ..learner.public_model import PublicFragment
from ..learner.task.text import generator
from ..learner.timing import StepTimer
from ..syncer.ledger import Who
from ..syncer.round_events import Called, Drained, Lost, Merge, Unmet
from ..syncer.telemetry import learner_rows, run_figures
from .availability import StepStream, VirtualMember
from .backend import EPOCH, LearnerBackend, ModelBackend, SentAnswer
from .failures import Stretch
from .network_path import NetworkPath


@dataclass(frozen=True)
class RunOutcome:
    """Result of a virtual run."""

    figures: dict[str, Any]
    """Same keys as in a run's summary.json."""
    learners: list[dict[str, Any]]
    model_hash: str
    virtual_seconds: float
    goodput: float
    """Share of the learners' allocated time, from the first step on, spent in useful steps at full size."""
    worked_seconds: float
    """Real seconds spent in inner steps."""
    real_seconds: float


@dataclass
class _LiveLearner:
    """State of one learner incarnation."""

    name: str
    worker: LearnerBackend
    outbox: Outbox
    timer: StepTimer
    dies_at: float
    versions: list[int]
    """Newest delivered version of each fragment."""
    up_free_at: float = 0.0
    down_free_at: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    timed: bool = False
    loss: float | None = None
    ended: bool = False


@dataclass
class VirtualCluster:
    """Event loop of one virtual run."""

    settings: RunSettings
    backend: ModelBackend
    members: Sequence[VirtualMember]
    network: NetworkPath = field(default_factory=NetworkPath)
    tape: Path | None = None
    """Folder of the learners' tapes; the syncer's tape belongs to the backend."""
    beat_seconds: float = BEAT_SECONDS
    horizon_seconds: float = math.inf
    """Virtual time after which an unfinished run fails."""
    on_progress: Callable[[int], None] = lambda _: None
    """Called with the global step at each beat."""

    def __post_init__(self) -> None:
        check_quorum(self.settings, len(self.members))
        self.now = 0.0
        self._rounds, self._metrics = self.backend.rounds, self.backend.figures
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._live: dict[str, _LiveLearner] = {}
        self._pending_joins = 0
        self._ended = False
        self._tick_at = math.inf
        self._worked_seconds = self._useful_seconds = 0.0
        self._began_at = math.inf
        self._model_hash = ""

    def run(self) -> RunOutcome:
        """Run until every fragment has had its last round. SettingError if no learner is left to finish it;
        Diverged if a learner's model is repeatedly not finite.
        """
        began = time.perf_counter()
        for member in self.members:
            self._schedule_next_incarnation(member.name, enumerate(member.incarnations, 1))
        self._schedule_at(0.0, self._beat)
        try:
            while not self._ended:
                self.now, _, action = heapq.heappop(self._events)
                action()
        finally:
            for learner in self._live_learners():
                self._die(learner)
            self._rounds.close()
        return RunOutcome(
            figures=run_figures(self._rounds, self._metrics, "finished", self.now),
            learners=learner_rows(self._rounds),
            model_hash=self._model_hash,
            virtual_seconds=self.now,
            goodput=round(self._useful_seconds / self._allocated_seconds(), 4),
            worked_seconds=self._worked_seconds,
            real_seconds=time.perf_counter() - began,
        )

    def _allocated_seconds(self) -> float:
        """Allocated time of all learners together, up to now."""
        return sum(max(0.0, self.now - max(self._began_at, member.joins_at)) for member in self.members)

    def _schedule_at(self, when: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._order), action))

    def _schedule_after(self, seconds: float, action: Callable[[], object]) -> None:
        self._schedule_at(self.now + seconds, action)

    # --- a learner ---------------------------------------------------------------------------------------------------
    def _schedule_next_incarnation(
        self, name: str, incarnations: Iterator[tuple[int, tuple[StepStream, float]]]
    ) -> None:
        """Schedule the next incarnation that has a step; its start schedules the one after it."""
        begun = ((number, next(life, None), life, dies_at) for number, (life, dies_at) in incarnations)
        found = next(((n, first, life, dies) for n, first, life, dies in begun if first and first.start < dies), None)
        if found is None:
            return
        number, first, life, dies_at = found
        self._pending_joins += 1

        def begin() -> None:
            self._pending_joins -= 1
            self._schedule_next_incarnation(name, incarnations)
            learner = self._join(name, number, dies_at)
            self._start_step(learner, first, life)
            self._report_each_second(learner)

        self._schedule_at(first.start, begin)

    def _join(self, name: str, number: int, dies_at: float) -> _LiveLearner:
        """Join a new incarnation that has just fetched the whole model."""
        if name in self._live:
            self._die(self._live[name])
        incarnation = incarnation_of(self.settings.seed, name, number)
        worker = self.backend.new_learner(name, incarnation, self.tape)
        self._rounds.join(name, incarnation, self.now)
        learner = _LiveLearner(
            name, worker, Outbox(worker.me), StepTimer(self.now), dies_at, versions=list(self._rounds.versions)
        )  # fmt: skip
        self._live[name] = learner
        self._tick()
        beat = self._beat_message()
        worker.receive_beat(beat, self.now)  # a learner joins only after a beat
        for call in beat.calls:
            learner.outbox.add_call(call)
        return learner

    def _start_step(self, learner: _LiveLearner, stretch: Stretch, life: StepStream) -> None:
        if learner.ended:
            return
        self._began_at = min(self._began_at, self.now)
        learner.worker.begin_step(self.now)
        learner.worker.share = stretch.share
        if stretch.end < learner.dies_at:
            self._schedule_at(stretch.end, lambda: self._end_step(learner, stretch, life))
        else:
            self._schedule_at(learner.dies_at, lambda: self._die(learner))

    def _end_step(self, learner: _LiveLearner, stretch: Stretch, life: StepStream) -> None:
        if learner.ended:
            return
        self._useful_seconds += stretch.share * stretch.useful_seconds
        worker, began = learner.worker, time.perf_counter()
        learner.loss = worker.step([*learner.outbox.calls.values()])
        if worker.wants_reset():
            self._reset(learner)
        self._worked_seconds += time.perf_counter() - began
        learner.timer.enter(self.now)
        learner.timer.leave(self.now)  # at once: a pause counts as part of the next step, as in a real loop
        for sent in worker.answers():
            self._send(learner, sent)
        if learner.timer.step_seconds and not learner.timed:
            learner.timed = True
            self._report(learner)
        following = next(life, None)
        if following is None:
            self._die(learner)
        else:
            self._schedule_at(following.start, lambda: self._start_step(learner, following, life))

    def _send(self, learner: _LiveLearner, sent: SentAnswer) -> None:
        """Send an answer; it counts once all of it has arrived."""
        learner.bytes_up += sent.payload_bytes
        learner.up_free_at = max(self.now, learner.up_free_at) + self.network.seconds(sent.payload_bytes)
        leaves_at = learner.up_free_at
        self._schedule_at(
            leaves_at + self.network.latency_seconds, partial(self._receive_answer, learner, sent, leaves_at)
        )
        if not learner.timed:
            self._report(learner)  # before it knows the step time, the syncer cannot tell that this answer is plausible

    def _receive_answer(self, learner: _LiveLearner, sent: SentAnswer, left_at: float) -> None:
        """Receive an answer, unless its sender died before all of it was sent. The tick comes after everything that
        arrives at this moment, as in the syncer's own loop.
        """
        if learner.ended and learner.dies_at < left_at:
            return
        reason = self.backend.take(sent)
        if reason:
            self._reject(learner.worker.me.pair, reason)
            return
        member = self._rounds.members.get(learner.worker.me.pair)
        if member is not None:
            member.rejected_in_a_row = 0
        self._schedule_at(self.now, self._tick)

    def _reject(self, who: Who, reason: str) -> None:
        """As the syncer does: a learner whose answers are rejected too often is reset."""
        member, learner = self._rounds.members.get(who), self._live.get(who[0])
        if member is not None and learner is not None and member.reject(reason) and member.order_reset(self.now):
            self._schedule_after(self.network.latency_seconds, partial(self._reset, learner))

    def _reset(self, learner: _LiveLearner) -> None:
        """Deliver the whole model and discard the learner's own progress."""
        if learner.ended:
            return
        learner.outbox.drop()
        for fragment, public in enumerate(self.backend.public_model()):
            learner.versions[fragment] = public.version
            learner.worker.deliver(fragment, public, reset=True)

    def _die(self, learner: _LiveLearner) -> None:
        if not learner.ended:
            learner.ended, learner.dies_at = True, self.now
            learner.worker.close()

    def _report_each_second(self, learner: _LiveLearner) -> None:
        if not learner.ended:
            self._report(learner)
            self._schedule_after(self.beat_seconds, lambda: self._report_each_second(learner))

    def _report(self, learner: _LiveLearner) -> None:
        timer, worker = learner.timer, learner.worker
        counters = TrainingStatus(
            counts=worker.done, step_seconds=timer.step_seconds, last_step_at=timer.last_step_at,
            inner_seconds=timer.inner_seconds, session_seconds=timer.session_seconds, started_at=timer.started_at,
            loss=learner.loss, versions=worker.versions, versions_epoch=EPOCH,
        )  # fmt: skip
        traffic = ByteCounts(learner.bytes_up, learner.bytes_down)
        report = alive(worker.me, EPOCH, counters, (), traffic=traffic, now=self.now)

        def arrives() -> None:
            if self._rounds.alive(report, self.now) is not None:
                self._metrics.record_first_step(self.now, report.since_first_step_seconds)
                self._schedule_at(self.now, self._tick)

        self._schedule_after(self.network.latency_seconds, arrives)

    # --- the syncer --------------------------------------------------------------------------------------------------
    def _tick(self) -> None:
        if self._ended:
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
        self._schedule_tick(max(self._rounds.next_deadline(self.now), math.nextafter(self.now, math.inf)))

    def _schedule_tick(self, due: float) -> None:
        """Tick again at `due` at the latest. One tick is scheduled at a time: an earlier one replaces it, and the
        later event then does nothing.
        """
        if self.now < self._tick_at <= due:
            return
        self._tick_at = due
        self._schedule_at(due, lambda: self._tick() if self._tick_at <= self.now else None)

    def _merge(self, merge: Merge) -> None:
        for answer in merge.unreported:
            self._reject(answer.who, "unreported")
        made = self.backend.merge(merge, self.now)
        if made is None:
            self._call(self._rounds.wire_call(self._rounds.failed(merge, self.now).call))
            return
        public, payload_bytes = made
        for learner in self._live_learners():
            learner.bytes_down += payload_bytes
            learner.down_free_at = max(self.now, learner.down_free_at) + self.network.seconds(payload_bytes)
            arrives = learner.down_free_at + self.network.latency_seconds
            self._schedule_at(arrives, partial(self._deliver, learner, merge, public))
        self._schedule_at(self.now, self._tick)  # the slot is free for another call now

    def _deliver(self, learner: _LiveLearner, merge: Merge, public: PublicFragment) -> None:
        fragment = merge.call.fragment
        if public.version > learner.versions[fragment]:  # else it was in transit when the whole model was fetched again
            learner.versions[fragment] = public.version
            learner.worker.deliver(fragment, public)
        learner.outbox.calls.pop(merge.call.slot, None)

    def _call(self, call: Call) -> None:
        for learner in self._live_learners():
            self._schedule_after(self.network.latency_seconds, partial(learner.outbox.add_call, call))

    def _beat(self) -> None:
        live = self._live_learners()
        if not live and not self._pending_joins:
            time_limit = (
                f" within {self.horizon_seconds:,.0f} virtual seconds" if math.isfinite(self.horizon_seconds) else ""
            )
            raise SettingError(
                f"all learners have left at step {self._rounds.t} of {self.settings.steps}, "
                f"and none returns{time_limit}"
            )
        if self.now > self.horizon_seconds:
            raise SettingError(
                f"stopped at step {self._rounds.t} of {self.settings.steps}, after {self.now:,.0f} virtual seconds: "
                "learners are absent too often (--absent, --quorum), or their network is too slow "
                "(--latency-seconds, --megabit)"
            )
        self.on_progress(self._rounds.t)
        beat = self._beat_message()
        for learner in live:
            self._send_beat(learner, beat)
        self._tick()
        self._schedule_after(self.beat_seconds, self._beat)

    def _beat_message(self) -> Beat:
        rounds = self._rounds
        return Beat(
            run=self.settings.run, epoch=EPOCH, state="running", t=rounds.step(self.now), steps=self.settings.steps,
            step_seconds=rounds.members.typical_step_seconds(), versions=tuple(rounds.versions),
            calls=rounds.wire_calls(), syncer=1,
        )  # fmt: skip

    def _send_beat(self, learner: _LiveLearner, beat: Beat) -> None:
        def arrives() -> None:
            learner.worker.receive_beat(beat, self.now)
            for _ in learner.outbox.update_open_calls(beat.calls, self.now):
                pass  # nothing is lost here, so nothing is resent

        self._schedule_after(self.network.latency_seconds, arrives)

    def _live_learners(self) -> list[_LiveLearner]:
        return [learner for _, learner in sorted(self._live.items()) if not learner.ended]

    def _finish(self) -> None:
        self._model_hash = self.backend.finish()
        self._rounds.ledger.close_all()
        self._ended = True


def check_quorum(settings: RunSettings, learners: int) -> None:
    """SettingError if this number of learners can never meet the quorum."""
    if settings.quorum > learners:
        raise SettingError(
            f"--quorum {settings.quorum} is more than the {learners} learners, so nothing would ever be merged; "
            "lower --quorum or raise --learners"
        )


def incarnation_of(seed: int, name: str, life: int) -> int:
    """Incarnation number of a learner's start number `life` (from 1); it determines the order of its data."""
    return 1 + int(generator("incarnation", seed, name, life).integers(2**52))
