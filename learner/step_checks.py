"""What one session looks at in each step: the model, its optimizers, and whether anything was done at all.

What would train this learner alone raises; what is probably not meant is said once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..common.errors import SettingError
from ..common.log import get_logger
from .mailbox import Arrival
from .model_check import ModelCheck
from .model_layout import Optimizers, Owned, stepped
from .optimizer_watch import OptimizerWatch
from .replica import Replica
from .step_counter import StepCounter
from .training_checks import LearningRateCheck, LowPrecisionCheck, rate_of

log = get_logger("learner")


class StepChecks:
    """All of it for one session. Only the training thread uses it."""

    def __init__(self, learner: str, replica: Replica, optimizer: Optimizers, now: float, *, in_mid_run: bool) -> None:
        """in_mid_run: other learners were already at work when this one joined."""
        entries = replica.all_entries()
        trained = [entry for entry in entries if entry.kind == "trainable"]
        self.optimizers = OptimizerWatch(Owned(entries), optimizer, now)
        self._learner, self._trained = learner, trained
        self._model = ModelCheck(replica.model, entries, now)
        self._work = StepCounter(
            [entry.source for entry in trained],
            [t for e in trained for t in (e.objects if e.master is None else [*e.objects, e.master])],
        )
        self._still = LowPrecisionCheck(
            [
                (entry.name, entry.tensor, fragment.index)
                for fragment in replica.plan.fragments
                for entry in replica.entries(fragment)
                if entry.master is None and entry.tensor.itemsize == 2 and self.optimizers.watches
            ]
        )
        self._rates = LearningRateCheck() if in_mid_run and self.optimizers.watches else None

    @property
    def pending_tokens(self) -> int:
        """Tokens that wait for an optimizer step."""
        return self._work.pending_tokens

    def called(self, tokens: int, now: float) -> int | None:
        """A session call begins: the tokens of the inner step that has ended, None if no step was made.

        SettingError if something was changed after join() that would be trained by this learner alone.
        """
        self._model.look(now)
        if (problem := self.optimizers.look(now)) is not None:
            self._model.compare()  # a strange tensor may be a new one of the model: then it has a name
            raise SettingError(problem)
        stepped, self.optimizers.stepped = self.optimizers.stepped or not self.optimizers.watches, False
        booked = self._work.called(tokens, stepped=stepped)
        for event, sentence in self._work.sentences():
            self._say(event, sentence)
        if booked is not None:
            self._inner_step()
        return booked

    def not_stepped(self) -> str:
        """A trained parameter that is in no optimizer's groups any more, by its name; '' if there is none."""
        optimizers = self.optimizers.all
        held = stepped(optimizers)
        missing = (
            entry.name
            for entry in self._trained
            if entry.tensor.numel() and entry.tensor.requires_grad and all(id(s) not in held for s in entry.sources)
        )
        return next(missing, "") if optimizers else ""

    def adopting(self, arrivals: Sequence[Arrival]) -> None:
        """Before these fragments are written into the model."""
        self._still.adopting({arrival.fragment for arrival in arrivals})

    def adopted(self, arrivals: Sequence[Arrival]) -> None:
        self._still.adopted({arrival.fragment for arrival in arrivals})

    def left(self) -> None:
        """The call ends."""
        self._work.left()

    def before_looking(self) -> None:
        """Other weights are about to be written into the model, and the own ones back."""
        self._work.before_looking()

    def after_looking(self) -> None:
        self._work.after_looking()

    def progress_asked(self) -> None:
        self._rates = None

    def close(self) -> None:
        self.optimizers.close()

    def _inner_step(self) -> None:
        wanted = self._rates is not None or self._still.wants_rate
        rate = rate_of(self.optimizers.all) if wanted else None
        if self._still.stepped(rate):
            self.optimizers.after_step = self._say_still
        if self._rates is not None and self._rates.stepped(rate):
            self._rates = None
            self._say("rate_is_local", _LOCAL_RATE)

    def _say_still(self, optimizer: torch.optim.Optimizer) -> None:
        if sentence := self._still.verdict(optimizer):
            self._say("parameters_stand_still", sentence)
        if self._still.over:
            self.optimizers.after_step = None

    def _say(self, event: str, sentence: str) -> None:
        log.warning(event, learner=self._learner, sentence=sentence)


_LOCAL_RATE = (
    "the learning rate falls, and session.progress was never asked: a schedule that counts this learner's own steps "
    "ends at another rate than that of the learners who began earlier; drive it by session.progress.fraction"
)
