"""Checks that one session makes in each step: of the model, its optimizers, and whether a step was made at all.

A change that this learner would train alone raises an error; what is probably a mistake is logged once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..common.errors import SettingError
from ..common.log import get_logger
from .mailbox import Arrival
from .model_changes import ModelCheck
from .model_layout import Optimizers, Owned, stepped
from .optimizer_watch import OptimizerWatch
from .replica import Replica
from .step_counter import StepCounter
from .training_checks import AdoptionCheck, LearningRateCheck, LowPrecisionCheck, rate_of

log = get_logger("learner")


class StepChecks:
    """All step checks of one session. Only the training thread uses it."""

    def __init__(
        self,
        learner: str,
        replica: Replica,
        optimizer: Optimizers,
        now: float,
        *,
        in_mid_run: bool,
        adoption: AdoptionCheck | None = None,
    ) -> None:
        """in_mid_run: other learners were already training when this one joined.
        adoption: made before the first adoption.
        """
        entries = replica.all_entries()
        trained = [entry for entry in entries if entry.kind == "trainable"]
        self.optimizers = OptimizerWatch(Owned(entries), optimizer, now)
        self._learner, self._trained = learner, trained
        self._model = ModelCheck(replica.model, entries, now)
        self._adoption = adoption
        self._counter = StepCounter(
            [entry.source for entry in trained],
            [t for e in trained for t in (e.objects if e.master is None else [*e.objects, e.master])],
        )
        self._low_precision = LowPrecisionCheck(
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
        """Tokens that are not counted yet, because no optimizer step has learned from them."""
        return self._counter.pending_tokens

    def called(self, tokens: int, now: float) -> int | None:
        """Call when session.step() begins. Returns the tokens of the inner step that has ended; None if none was made.

        Raises SettingError if something was changed after join() that this learner would train alone.
        """
        self._model.look(now)
        if (problem := self.optimizers.look(now)) is not None:
            self._model.compare()  # an unknown tensor may be a new one of the model; then this names it
            raise SettingError(problem)
        stepped, self.optimizers.stepped = self.optimizers.stepped or not self.optimizers.watches, False
        counted = self._counter.called(tokens, stepped=stepped)
        for event, sentence in self._counter.warnings():
            self._warn(event, sentence)
        if counted is not None:
            self._inner_step()
        return counted

    def first_adopted(self) -> None:
        """Call after the first adoption."""
        if self._adoption is not None:
            self._adoption.adopted()

    def check_adoption(self) -> None:
        """Call after each inner step. Raises SettingError if the optimizer undoes what was adopted."""
        if self._adoption is None:
            return
        verdict = self._adoption.stepped()
        unstepped = self._unstepped()
        if verdict is False or unstepped:
            raise SettingError(
                f"{self._learner}: the model did not keep the values it adopted: "
                + (
                    f"the optimizer no longer steps {unstepped}"
                    if unstepped
                    else "one step later the old values were back, so the optimizer steps tensors of its own"
                )
                + "; pass those f32 tensors by name to join(masters=...)"
            )
        if verdict is not None:
            self._adoption = None

    def _unstepped(self) -> str:
        """The first trained parameter that is no longer in any optimizer's groups, by its name; '' if there is none."""
        optimizers = self.optimizers.all
        held = stepped(optimizers)
        missing = (
            entry.name
            for entry in self._trained
            if entry.tensor.numel() and entry.tensor.requires_grad and all(id(s) not in held for s in entry.sources)
        )
        return next(missing, "") if optimizers else ""

    def adopting(self, arrivals: Sequence[Arrival]) -> None:
        """Call before these fragments are written into the model."""
        self._low_precision.adopting({arrival.fragment for arrival in arrivals})

    def adopted(self, arrivals: Sequence[Arrival]) -> None:
        """Call after they were written."""
        self._low_precision.adopted({arrival.fragment for arrival in arrivals})

    def left(self) -> None:
        """Call when session.step() ends."""
        self._counter.left()

    def before_swap(self) -> None:
        """Call before other weights are written into the model for a while."""
        self._counter.before_swap()

    def after_swap(self) -> None:
        """Call once the learner's own weights are back."""
        self._counter.after_swap()

    def progress_read(self) -> None:
        """The script reads the run's progress, so that its learning rate presumably follows the run."""
        self._rates = None

    def close(self) -> None:
        self.optimizers.close()

    def _inner_step(self) -> None:
        wanted = self._rates is not None or self._low_precision.wants_rate
        rate = rate_of(self.optimizers.all) if wanted else None
        if self._low_precision.stepped(rate):
            self.optimizers.after_step = self._check_low_precision
        if self._rates is not None and self._rates.stepped(rate):
            self._rates = None
            self._warn("rate_is_local", _LOCAL_RATE)

    def _check_low_precision(self, optimizer: torch.optim.Optimizer) -> None:
        if sentence := self._low_precision.verdict(optimizer):
            self._warn("parameters_stand_still", sentence)
        if self._low_precision.over:
            self.optimizers.after_step = None

    def _warn(self, event: str, sentence: str) -> None:
        log.warning(event, learner=self._learner, sentence=sentence)


_LOCAL_RATE = (
    "the learning rate falls, and session.progress was never read: a schedule that counts this learner's own steps "
    "ends at another rate than that of the learners that joined earlier; compute it from session.progress.fraction"
)
