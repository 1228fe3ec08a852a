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
from ..syncer.metrics import RunMetrics
from ..syncer.publish import count_merge
from ..syncer.round_events import Answer, Merge
from ..syncer.rounds import Rounds
from .backend import EPOCH, MERGE_SECONDS, Sent

NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")


class CostOnlyModel:
    """Fragments of equal size, of which only the versions are known."""

    def __init__(
        self,
        settings: RunSettings,
        *,
        parameters: int,
        tokens_a_step: int,
        fragments: int = 0,
        tape: Path | None = None,
    ) -> None:
        """fragments: P, where neither the settings nor the cadence say it."""
        self.settings, self.tokens_a_step = settings, tokens_a_step
        P = fragments or settings.fragments or settings.sync_every
        self.size = ALIGN * max(1, parameters // P // ALIGN)
        sizes = [self.size] * P
        self.rounds = Rounds(settings, sizes, EPOCH) if tape is None else recorded(tape, settings, sizes, epoch=EPOCH)
        self.figures = RunMetrics(self.size * P, self.rounds.schedule.steps_between)

    def worker(self, name: str, incarnation: int, tape: Path | None) -> CostOnlyLearner:
        del tape
        octets = encoded_bytes(self.settings.codec_up, self.size)
        me = Identity(run=self.settings.run, name=name, incarnation=incarnation, layout=Layout(()))
        return CostOnlyLearner(me, self.rounds.versions, octets, self.tokens_a_step, self.settings.adopt == "rebase")

    def whole(self) -> list[PublicFragment]:
        return [PublicFragment(version, NOTHING, "") for version in self.rounds.versions]

    def take(self, sent: Sent) -> str:
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
    """A learner's books, and nothing that they are about."""

    def __init__(
        self, me: Identity, versions: Sequence[int], octets: int, tokens_a_step: int, rebases: bool
    ) -> None:  # fmt: skip
        """octets: of an answer. rebases: what it did since its capture is kept where the capture was merged."""
        self.me, self.share, self._rebases = me, 1.0, rebases
        self._octets, self._tokens = octets, tokens_a_step
        self._books = Counters(me.pair, len(versions))
        for fragment, version in enumerate(versions):
            self._books.adopted(fragment, EPOCH, version)
        self._waits: dict[int, PublicFragment] = {}
        self._captured: dict[int, Counts] = {}
        """Fragment -> where its last capture that was not adopted yet ends."""
        self._sent: list[Sent] = []

    @property
    def done(self) -> Counts:
        return self._books.now

    @property
    def versions(self) -> tuple[int, ...]:
        return self._books.versions(EPOCH)

    def hear(self, beat: Beat, now: float) -> None: ...

    def begin_step(self, now: float) -> None: ...

    def step(self, calls: Sequence[Call]) -> None:
        self._books.count(max(1, round(self.share * self._tokens)))
        for fragment, public in self._waits.items():
            until = self._captured.pop(fragment, None)
            kept = until if self._rebases and until == public.part_of(self.me.pair) else None
            self._books.adopted(fragment, EPOCH, public.version, kept)
        self._waits.clear()
        wanted = [call for call in calls if self._books.may_answer(call)]
        self._sent = [self._answer(call) for call in wanted]

    def sent(self) -> list[Sent]:
        return self._sent

    def wants_reset(self) -> bool:
        return False

    def deliver(self, fragment: int, public: PublicFragment, *, reset: bool = False) -> None:
        self._waits[fragment] = PublicFragment(public.version, public.vector, public.digest) if reset else public

    def close(self) -> None: ...

    def _answer(self, call: Call) -> Sent:
        version = self._books.accounts[call.fragment].version
        since, until = self._books.captured(call)
        self._captured[call.fragment] = until
        answer = Answer(
            who=self.me.pair, fragment=call.fragment, slot=call.slot, attempt=call.attempt, base_version=version,
            tokens_from=since.tokens, tokens_to=until.tokens, steps_from=since.steps, steps_to=until.steps,
        )  # fmt: skip
        return Sent(self._octets, answer)
