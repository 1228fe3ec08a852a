"""Real-training backend of a virtual cluster: production merges at the syncer, production sessions at the learners."""

from __future__ import annotations

from pathlib import Path

import torch

from ..common.codec import digest
from ..common.config import RunSettings, TaskSettings
from ..common.errors import Malformed, SettingError
from ..common.fragments import MergeKind, Plan, balanced_plan, default_fragments
from ..learner.mailbox import Joined
from ..learner.public_model import PublicFragment
from ..learner.replica import Replica, layout_of
from ..learner.task.text import Corpus
from ..learner.task.transformer import Transformer
from ..syncer.global_model import GlobalModel
from ..syncer.journal import recorded
from ..syncer.publish import book_merge, merge_answers
from ..syncer.round_events import Merge
from ..syncer.rounds import Rounds
from ..syncer.run_metrics import RunMetrics
from ..syncer.run_state import TrainingState
from .ablation import UNCHANGED, Ablation
from .backend import EPOCH, MERGE_SECONDS, SentAnswer
from .virtual_learner import VirtualLearner


class TrainedModel:
    """Global model of one virtual run; by default the seed determines version 0."""

    def __init__(
        self,
        settings: RunSettings,
        task: TaskSettings,
        corpus: Corpus,
        *,
        tape: Path | None = None,
        variant: Ablation = UNCHANGED,
        model: Transformer | None = None,
    ) -> None:
        """model: the initial model; None = from the seed. A tape records neither a given model nor a variant, so
        either of them together with a tape is a SettingError.
        """
        if tape is not None and (model is not None or variant != UNCHANGED):
            raise SettingError(
                "a run with a variant or a given initial model cannot have a tape: its replay would differ"
            )
        self.settings, self.task, self.corpus = settings, task, corpus
        self.variant = variant
        self.state, self.plan = version_zero(settings, task, variant.merge, model)
        sizes = [f.parameters for f in self.plan.fragments]
        self.rounds = Rounds(settings, sizes, EPOCH)
        if tape is not None:
            self.rounds = recorded(
                tape, settings, sizes, epoch=EPOCH, task=task, plan_digest=self.plan.digest, data_hash=corpus.sha256
            )
        self.figures = RunMetrics(self.plan.parameters, self.rounds.schedule.steps_between)
        self._training = TrainingState(self.state, self.rounds, self.figures)
        self._whole = [PublicFragment(0, vector, digest(vector)) for vector in self.state.public]

    def new_learner(self, name: str, incarnation: int, tape: Path | None) -> VirtualLearner:
        joined = Joined(
            self.plan, self.settings, self.task, EPOCH, self.rounds.t, tuple(self._whole), self.state.static
        )
        return VirtualLearner(joined, self.corpus, name, incarnation, tape=tape, retain_progress=self.variant.keeps)

    def public_model(self) -> list[PublicFragment]:
        return list(self._whole)

    def take(self, sent: SentAnswer) -> str:
        answers = (self._training.delta_assembler.take(chunk) for chunk in sent.content)
        try:
            (answer,) = (answer for answer in answers if answer is not None)  # all chunks are here, so it is complete
        except Malformed as wrong:
            return wrong.reason
        return self.rounds.answer(answer)

    def merge(self, merge: Merge, now: float) -> tuple[PublicFragment, int] | None:
        fragment = merge.call.fragment
        self.state.settings = self.variant.outer(self.settings, min(1.0, merge.call.t / self.settings.steps))
        try:
            merged = merge_answers(self._training, merge)
        except Malformed:
            return None
        if not self.variant.feedback:
            self.state.residual[fragment] = torch.zeros_like(self.state.residual[fragment])
        public = PublicFragment(merged.version, self.state.public[fragment], merged.digest, merge.contributors)
        book_merge(self._training, merge, merged, now, MERGE_SECONDS)
        self._whole[fragment] = public
        return public, len(merged.payload)

    def finish(self) -> str:
        self.state.finalize()
        model_hash = self.state.model_hash()
        self.rounds.ended(model_hash)
        return model_hash


def version_zero(
    settings: RunSettings, task: TaskSettings, merge: MergeKind = "rda", model: Transformer | None = None
) -> tuple[GlobalModel, Plan]:
    """Initial global model of a run with these settings, and its fragment plan. SettingError if they do not fit.

    merge: mean = the weighted mean for all tensors. model: the initial model; None = from the seed.
    """
    model = model or Transformer(task, settings.seed)
    layout = layout_of(model, merge=dict.fromkeys(dict(model.named_parameters()), merge) if merge == "mean" else None)
    plan = balanced_plan(layout, settings.fragments or default_fragments(layout, settings.sync_every))
    replica = Replica(model, plan)
    vectors = [replica.vector(f) for f in plan.fragments]
    return GlobalModel.from_version_zero(plan, settings, vectors, replica.static_bytes()), plan
