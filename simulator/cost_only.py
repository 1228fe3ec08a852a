"""Cost-only backend of a virtual cluster: counters, intervals and sizes without a model, for clusters of any size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ..common.codec import encoded_bytes
from ..common.config import RunSettings
from ..common.fragments import ALIGN, Layout
from ..common.wire import Beat, Call
from ..learner.counters import Counters, Counts
from ..learner.identity import Identity
from ..learner.public_model import PublicFragment
from ..syncer.journal import recorded
from ..syncer.publish import count_merge
from ..syncer.round_events import Answer, Merge
from ..syncer.rounds import Rounds
from ..syncer.run_metrics import RunMetrics
from .backend import EPOCH, MERGE_SECONDS, SentAnswer

NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")


class CostOnlyModel:
    """Fragments of equal size, of which only the versions are tracked."""

    def __init__(
        self,
        settings: RunSettings,
        *,
        parameters: int,
        tokens_a_step: int,
        fragments: int = 0,
        tape: Path | None = None,
    ) -> None:
        """fragments: P; 0 = from the settings or the cadence."""
        self.settings, self.tokens_a_step = settings, tokens_a_step
        P = fragments or settings.fragments or settings.sync_every
        self.size = ALIGN * max(1, parameters // P // ALIGN)
        sizes = [self.size] * P
        self.rounds = Rounds(settings, sizes, EPOCH) if tape is None else recorded(tape, settings, sizes, epoch=EPOCH)
        self.figures = RunMetrics(self.size * P, self.rounds.schedule.steps_between)

    def new_learner(self, name: str, incarnation: int, tape: Path | None) -> CostOnlyLearner:
        del tape
        payload_bytes = encoded_bytes(self.settings.codec_up, self.size)
        me = Identity(run=self.settings.run, name=name, incarnation=incarnation, layout=Layout(()))
        return CostOnlyLearner(
            me, self.rounds.versions, payload_bytes, self.tokens_a_step, self.settings.adopt == "rebase"
        )

    def public_model(self) -> list[PublicFragment]:
        return [PublicFragment(version, NOTHING, "") for version in self.rounds.versions]

    def take(self, sent: SentAnswer) -> str:
        return self.rounds.answer(sent.content)

    def merge(self, merge: Merge, now: float) -> tuple[PublicFragment, int]:
        rounds, fragment = self.rounds, merge.call.fragment
        rounds.merged(merge, MERGE_SECONDS)
        count_merge(rounds, self.figures, merge, now, MERGE_SECONDS)
        public = PublicFragment(rounds.versions[fragment], NOTHING, "", merge.contributors)
        return public, encoded_bytes(self.settings.codec_down, self.size)

    def finish(self) -> str:
        self.rounds.ended("")
        return ""


class CostOnlyLearner:
    """A learner's counters, without a model."""

    def __init__(
        self, me: Identity, versions: Sequence[int], payload_bytes: int, tokens_a_step: int, rebases: bool
    ) -> None:  # fmt: skip
        """payload_bytes: of an answer. rebases: progress since a capture is kept if the capture was merged."""
        self.me, self.share, self._rebases = me, 1.0, rebases
        self._octets, self._tokens = payload_bytes, tokens_a_step
        self._counters = Counters(me.pair, len(versions))
        for fragment, version in enumerate(versions):
            self._counters.adopted(fragment, EPOCH, version)
        self._pending: dict[int, PublicFragment] = {}
        self._captured: dict[int, Counts] = {}
        """Fragment -> end of its last capture that is not adopted yet."""
        self._sent: list[SentAnswer] = []

    @property
    def done(self) -> Counts:
        return self._counters.now

    @property
    def versions(self) -> tuple[int, ...]:
        return self._counters.versions(EPOCH)

    def receive_beat(self, beat: Beat, now: float) -> None: ...

    def begin_step(self, now: float) -> None: ...

    def step(self, calls: Sequence[Call]) -> None:
        self._counters.count(max(1, round(self.share * self._tokens)))
        for fragment, public in self._pending.items():
            until = self._captured.pop(fragment, None)
            kept = until if self._rebases and until == public.part_of(self.me.pair) else None
            self._counters.adopted(fragment, EPOCH, public.version, kept)
        self._pending.clear()
        wanted = [call for call in calls if self._counters.may_answer(call)]
        self._sent = [self._answer(call) for call in wanted]

    def answers(self) -> list[SentAnswer]:
        return self._sent

    def wants_reset(self) -> bool:
        return False

    def deliver(self, fragment: int, public: PublicFragment, *, reset: bool = False) -> None:
        self._pending[fragment] = PublicFragment(public.version, public.vector, public.digest) if reset else public

    def close(self) -> None: ...

    def _answer(self, call: Call) -> SentAnswer:
        version = self._counters.accounts[call.fragment].version
        since, until = self._counters.captured(call)
        self._captured[call.fragment] = until
        answer = Answer(
            who=self.me.pair, fragment=call.fragment, slot=call.slot, attempt=call.attempt, base_version=version,
            tokens_from=since.tokens, tokens_to=until.tokens, steps_from=since.steps, steps_to=until.steps,
        )  # fmt: skip
        return SentAnswer(self._octets, answer)
