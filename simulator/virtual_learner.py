"""Virtual learner: the built-in training loop and a production Session, without a network. Messages are handed over in
this process; the caller fills its mailbox at each step boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..common.config import LearnerConfig
from ..common.errors import Malformed
from ..common.wire import Beat, Call, Delta
from ..learner.boundary import ModelExchange
from ..learner.counters import Counts
from ..learner.identity import Identity
from ..learner.mailbox import Arrival, Joined, Mailbox
from ..learner.outbox import encode_answer
from ..learner.public_model import PublicFragment
from ..learner.replica import Replica, layout_of
from ..learner.session import Session
from ..learner.task.loop import make_optimizer, train_on
from ..learner.task.text import Corpus, batches
from ..learner.task.transformer import Transformer
from ..learner.timing import Progress
from .backend import EPOCH, SentAnswer


class VirtualMailbox(Mailbox):
    """Mailbox whose progress is set by its owner instead of a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed_progress = Progress(0.0, 0)

    def progress(self, now: float) -> Progress:
        del now
        return self.fixed_progress

    def progress_from_beats(self, now: float) -> Progress:
        """Progress that a learner would compute from the beats received so far."""
        return super().progress(now)


@dataclass
class VirtualLink:
    """Link stub for a session; sends nothing."""

    config: LearnerConfig
    me: Identity
    mailbox: Mailbox

    def wake(self) -> None: ...

    def leave(self, reason: str) -> None: ...

    def abandon(self) -> None: ...

    def join_thread(self, seconds: float) -> bool:
        del seconds
        return True


class _RetainingExchange(ModelExchange):
    """Ablation: keeps a fragment's progress since its last adoption if this learner did not contribute to a merge."""

    def _write(self, arrival: Arrival, how: str) -> Counts | None:
        if how != "rebase" or arrival.own is not None:
            return super()._write(arrival, how)
        fragment = arrival.fragment
        self._captures.pop(fragment, None)
        self.replica.rebase(self.plan.fragments[fragment], arrival.public.vector, self.public[fragment].vector)
        return self.counters.accounts[fragment].since


class _RetainingSession(Session):
    exchange_kind = _RetainingExchange


class VirtualLearner:
    """One incarnation of a learner, from the public model it starts with."""

    def __init__(
        self,
        joined: Joined,
        corpus: Corpus,
        name: str,
        incarnation: int,
        *,
        pending: Sequence[tuple[int, PublicFragment]] = (),
        tape: Path | None = None,
        retain_progress: bool = False,
    ) -> None:
        """pending: fragments that arrived after the welcome and are adopted before the first step.
        retain_progress: see `keeps` in simulator/ablation.py.
        """
        settings, task = joined.settings, joined.task
        assert task is not None  # noqa: S101 the caller sets what is trained
        self.task = task
        self.share = 1.0
        """Share of each batch that is trained on; smaller after losing slices."""
        self._remainder = 0.0
        """Sequences omitted by rounding so far; carried over so that the share is exact on average."""
        self.model = Transformer(task, settings.seed)
        self.optimizer = make_optimizer(self.model)
        self.me = Identity(
            run=settings.run, name=name, incarnation=incarnation, layout=layout_of(self.model), data_hash=corpus.sha256
        )
        self.mailbox = VirtualMailbox()
        self.plan, self.codec = joined.plan, settings.codec_up
        self.mailbox.deliver([self.arrival(fragment, joined.epoch, public) for fragment, public in pending])
        link = VirtualLink(LearnerConfig(broker="tcp://nowhere:1", name=name, tape=tape), self.me, self.mailbox)
        kind = _RetainingSession if retain_progress else Session
        self.session = kind(link, joined, Replica(self.model, joined.plan), self.optimizer)
        self._batches = batches(
            corpus.train, task.batch_sequences, task.sequence_length,
            seed=settings.seed, name=name, incarnation=incarnation,
        )  # fmt: skip

    @property
    def done(self) -> Counts:
        return Counts(self.session.local_steps, self.session.tokens)

    @property
    def versions(self) -> tuple[int, ...]:
        return self.session.versions

    def receive_beat(self, beat: Beat, now: float) -> None:
        self.mailbox.post_beat(beat, now)

    def begin_step(self, now: float) -> None:
        self.mailbox.fixed_progress = self.mailbox.progress_from_beats(now)

    def step(self, calls: Sequence[Call]) -> float:
        self.mailbox.open_calls(calls)
        inputs, targets = next(self._batches)
        self._remainder += self.share * len(inputs)
        rows = min(len(inputs), max(1, round(self._remainder)))
        self._remainder -= rows
        return train_on(
            self.session, self.model, self.optimizer, inputs[:rows], targets[:rows],
            local_step=self.session.local_steps, inner_lr=self.task.inner_lr,
        )  # fmt: skip

    def captured(self) -> list[list[Delta]]:
        """Answers of the last boundary, each as the chunks to send. Reports values that are not finite."""
        answers = []
        for capture in self.mailbox.take_captures():
            fragment = self.plan.fragments[capture.call.fragment]
            try:
                answers.append(encode_answer(self.me, fragment, self.codec, capture))
            except Malformed:
                self.mailbox.report_nonfinite()
            self.mailbox.recycle(capture)
        return answers

    def answers(self) -> list[SentAnswer]:
        return [SentAnswer(sum(len(chunk.payload) for chunk in chunks), chunks) for chunks in self.captured()]

    def deliver(self, fragment: int, public: PublicFragment, *, reset: bool = False) -> None:
        self.mailbox.deliver([self.arrival(fragment, EPOCH, public)], reset=reset)

    def wants_reset(self) -> bool:
        return self.mailbox.take_reset_request()

    def arrival(self, fragment: int, epoch: int, public: PublicFragment, *, include_own: bool = True) -> Arrival:
        """A fragment as the link delivers it; `include_own`: with this learner's own contribution."""
        return Arrival(fragment, epoch, public, public.part_of(self.me.pair) if include_own else None)

    def close(self) -> None:
        self.session.close("stopped")
