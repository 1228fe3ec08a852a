"""A learner without a network: the built-in training loop and a production Session, whose messages are handed over
in this process. Whoever drives it says what lies on its desk at each step boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..common.config import LearnerConfig
from ..common.wire import Call, Delta
from ..learner.answers import encode_answer
from ..learner.books import Mark
from ..learner.desk import Arrival, Capture, Desk, Joined
from ..learner.follower import Public
from ..learner.identity import Identity
from ..learner.loop import make_optimizer, train_on
from ..learner.pace import Progress
from ..learner.replica import Replica, layout_of
from ..learner.session import Session
from ..learner.text import Corpus, batches
from ..learner.transformer import Transformer


class VirtualDesk(Desk):
    """A desk on which time is what its owner says."""

    def __init__(self) -> None:
        super().__init__()
        self.progress_told = Progress(0.0, 0)

    def progress(self, now: float) -> Progress:
        del now
        return self.progress_told

    def progress_at_time(self, now: float) -> Progress:
        """As a learner that heard the beats that lie here would reckon it."""
        return super().progress(now)


@dataclass
class VirtualLink:
    """What a session needs of a link; it sends nothing."""

    config: LearnerConfig
    me: Identity
    desk: Desk

    def wake(self) -> None: ...

    def leave(self, reason: str) -> None: ...

    def abandon(self) -> None: ...

    def join_thread(self, seconds: float) -> bool:
        del seconds
        return True


class Trainee:
    """One life of a learner, from the public model that it begins with."""

    def __init__(
        self,
        joined: Joined,
        corpus: Corpus,
        name: str,
        incarnation: int,
        *,
        waits: Sequence[tuple[int, Public]] = (),
        tape: Path | None = None,
    ) -> None:
        """waits: fragments that came after the welcome and are adopted before the first step."""
        settings, task = joined.settings, joined.task
        assert task is not None  # noqa: S101 whoever drives it says what is trained
        self.task = task
        self.share = 1.0
        """Of each batch that is trained on: a learner that lost slices works on less."""
        self.model = Transformer(task, settings.seed)
        self.optimizer = make_optimizer(self.model)
        self.me = Identity(
            run=settings.run, name=name, incarnation=incarnation, layout=layout_of(self.model), data_hash=corpus.sha256
        )
        self.desk = VirtualDesk()
        self.plan, self.codec = joined.plan, settings.codec_up
        self.desk.deliver([self.arrival(fragment, joined.epoch, public) for fragment, public in waits])
        link = VirtualLink(LearnerConfig(broker="tcp://nowhere:1", name=name, tape=tape), self.me, self.desk)
        self.session = Session(link, joined, Replica(self.model, joined.plan), self.optimizer)
        self._batches = batches(
            corpus.train, task.batch_sequences, task.sequence_length,
            seed=settings.seed, name=name, incarnation=incarnation,
        )  # fmt: skip

    @property
    def done(self) -> Mark:
        """Steps and tokens so far."""
        return Mark(self.session.local_steps, self.session.tokens)

    def step(self) -> float:
        """One inner step, and its boundary, where it adopts and answers what lies on the desk; the loss."""
        inputs, targets = next(self._batches)
        rows = max(1, round(self.share * len(inputs)))
        return train_on(
            self.session, self.model, self.optimizer, inputs[:rows], targets[:rows],
            local_step=self.session.local_steps, inner_lr=self.task.inner_lr,
        )  # fmt: skip

    def deliver(self, arrivals: Sequence[Arrival], *, reset: bool = False) -> None:
        self.desk.deliver(arrivals, reset=reset)

    def captures(self) -> list[Capture]:
        """What was captured at the last boundary."""
        return self.desk.take_captures()

    def encode(self, capture: Capture) -> list[Delta]:
        """The answer in a capture, as it would be sent."""
        deltas = encode_answer(self.me, self.plan.fragments[capture.call.fragment], self.codec, capture)
        self.desk.give_back(capture)
        return deltas

    def open_calls(self, calls: Sequence[Call]) -> None:
        self.desk.open_calls(calls)

    def arrival(self, fragment: int, epoch: int, public: Public) -> Arrival:
        """As the learner's link hands a fragment over: with what it has of this learner's own."""
        own = next(
            (Mark(steps, tokens) for name, incarnation, steps, tokens in public.contributors
             if (name, incarnation) == self.me.pair),
            None,
        )  # fmt: skip
        return Arrival(fragment, epoch, public, own)


def in_one_process() -> None:
    """Numbers as one learner process with one thread computes them."""
    torch.set_num_threads(1)
