"""Replay of a tape: repeats the decisions with the production round machine, and the training bit for bit.

The syncer's tape records the order of answers and the decisions; each learner's tape records at which of its steps it
adopted which version and was captured for which call. So nothing pending and no clock is needed: each learner trains
until the capture that a merge needs. (arXiv 2604.21428, section 7 and appendix E.1.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..common.codec import digest
from ..common.config import RunSettings, TaskSettings
from ..common.errors import Malformed, SettingError
from ..common.fragments import Plan
from ..common.journal import BROKEN, JournalFile, Row, RunJournal
from ..common.wire import Call
from ..learner.mailbox import Joined
from ..learner.public_model import PublicFragment
from ..learner.task.text import Corpus, load_corpus
from ..learner.timing import Progress
from ..syncer.journal import ANSWER, ReplayedRounds
from ..syncer.publish import merge_answers
from ..syncer.round_events import Answer, Called
from ..syncer.run_metrics import RunMetrics
from ..syncer.run_state import TrainingState
from .real_training import version_zero
from .virtual_learner import VirtualLearner

MAX_THREADS = 1024
AnswerKey = tuple[str, int, int, int]
"""(name, incarnation, slot, attempt)"""


@dataclass(frozen=True)
class Verdict:
    """Figures of a tape whose replay agrees; a difference raises instead."""

    decisions: int
    merges: int
    local_steps: int
    model_hash: str
    """Empty if nothing was trained to the end."""
    complete: bool
    """Whether the tape includes the run's end."""


def replay(tape: RunJournal, data: Path | None, on_progress: Callable[[int], None] = lambda _: None) -> Verdict:
    """Repeat every decision and all training. SettingError, with the line, at the first difference."""
    try:
        return _Replay(tape, data, on_progress).run()
    except BROKEN as error:
        raise SettingError(f"{tape.syncer.path}: no tape that can be done again ({error!r})") from error


def replay_decisions(tape: RunJournal) -> Verdict:
    """Repeat every decision, without a model. SettingError, with the line, at the first difference."""
    rounds, decisions, merges = ReplayedRounds(tape.syncer), 0, 0
    for number, row in enumerate(tape.syncer.rows, 2):
        actions = rounds.take(number, row)
        decisions += len(actions) if row["what"] == "tick" else 0
        merges += row["what"] == "merged"
    return Verdict(decisions, merges, 0, "", _complete(tape))


class _Replay:
    """Replay of the global model, merge by merge."""

    def __init__(self, tape: RunJournal, data: Path | None, on_progress: Callable[[int], None]) -> None:
        self._tape, self._on_progress = tape, on_progress
        self._replayed = ReplayedRounds(tape.syncer)
        settings, task = self._replayed.settings, _task(tape.syncer)
        corpus = load_corpus(data, task.sequence_length)
        if tape.syncer["data_hash"] not in ("", corpus.sha256):
            raise SettingError(
                f"{tape.syncer.path} is of a run on another text than {corpus.source}; give --data the same"
            )
        state, plan = version_zero(settings, task)
        if tape.syncer["plan_digest"] != plan.digest:
            raise SettingError(
                f"{tape.syncer.path} is the tape of another model than this program builds: it was made by another "
                "version, or changed"
            )
        rounds = self._replayed.rounds
        self._training = TrainingState(state, rounds, RunMetrics(plan.parameters, rounds.schedule.steps_between))
        epoch, wanted = int(tape.syncer["epoch"]), _merged_answers(tape.syncer)
        self._context = _ReplayContext(settings, task, corpus, plan, state.static, epoch, wanted, _count_uses(tape))
        for p, vector in enumerate(state.public):
            self._context.add_version(p, PublicFragment(0, vector, digest(vector)))
        self._learners: dict[tuple[str, int], _ReplayedLearner] = {}

    def run(self) -> Verdict:
        rows, decisions, merges, model_hash = self._tape.syncer.rows, 0, 0, ""
        for number, row in enumerate(rows, 2):
            vector = self._trained_vector(number, row) if row["what"] == "answer" else None
            if row["what"] == "begin" and row.get("resumed") is not None:
                raise SettingError(
                    f"{self._tape.syncer.path} begins in mid-run, so it cannot be trained again; see --decisions"
                )
            if row["what"] == "merged":
                self._replay_merge(number, row)
                merges += 1
                self._on_progress(merges)
            if row["what"] == "failed":
                self._replay_failure(number, row)
            actions = self._replayed.take(number, row, vector)
            decisions += len(actions) if row["what"] == "tick" else 0
            for action in actions:
                if isinstance(action, Called):
                    call = self._replayed.rounds.wire_call(action.call)
                    self._context.calls[call.slot, call.attempt] = call
            if row["what"] == "end":
                model_hash = self._check_end(number, row)
        return Verdict(
            decisions,
            merges,
            sum(learner.local_steps for learner in self._learners.values()),
            model_hash,
            _complete(self._tape),
        )

    def _trained_vector(self, number: int, row: Row) -> Any:
        """Vector of this answer, by training up to it; None if it was not merged."""
        try:
            key = (row["learner"], row["incarnation"], row["slot"], row["attempt"])
        except KeyError as error:
            raise SettingError(f"{self._tape.syncer.path}, line {number}: an answer without {error}") from error
        if key not in self._context.wanted or row.get("refused"):
            return None
        answer: Answer | None = None
        try:
            for chunk in self._learner(key[0], key[1]).until(key, self._context):
                answer = self._training.delta_assembler.take(chunk)
        except Malformed as error:
            raise SettingError(f"{self._tape.syncer.path}, line {number}: refused here: {error}") from error
        if answer is None:
            return None
        for name in ANSWER:
            ours, theirs = getattr(answer, name), row.get(name)
            if ours != theirs:
                raise SettingError(
                    f"{self._tape.syncer.path}, line {number}: the answer of {key[0]} has {name} "
                    f"{theirs} on the tape and {ours} when it is trained anew"
                )
        return answer.vector

    def _learner(self, name: str, incarnation: int) -> _ReplayedLearner:
        who = (name, incarnation)
        if who not in self._learners:
            if who not in self._tape.learners:
                raise SettingError(
                    f"the tape has no file {name}-{incarnation}.jsonl, and what that learner sent was merged; "
                    "it was started without --tape, or elsewhere: lay its file beside the others"
                )
            self._learners[who] = _ReplayedLearner(self._tape.learners[who], self._context)
        return self._learners[who]

    def _replay_merge(self, number: int, row: Row) -> None:
        training, merge = self._training, self._replayed.merge_of(row["slot"])
        merged = merge_answers(training, merge)
        if merged.digest != row.get("digest"):
            raise SettingError(
                f"{self._tape.syncer.path}, line {number}: version {merged.version} of fragment {merge.call.fragment} "
                f"has other bits here than on the tape{self._likely_cause()}"
            )
        # the norm filter gets no norms: its rejections are not on the tape, and its statistics depend on them
        public = PublicFragment(
            merged.version, training.model.public[merge.call.fragment], merged.digest, merge.contributors
        )  # fmt: skip
        self._context.add_version(merge.call.fragment, public)

    def _replay_failure(self, number: int, row: Row) -> None:
        with suppress(Malformed):
            merge_answers(self._training, self._replayed.merge_of(row["slot"]))
            raise SettingError(f"{self._tape.syncer.path}, line {number}: a merge that failed there succeeds here")

    def _likely_cause(self) -> str:
        """Likely cause of different bits."""
        theirs = {str(file.head.get("torch")) for file in self._tape.learners.values()} - {torch.__version__}
        if theirs:
            return f", which was made by torch {', '.join(sorted(theirs))}; this is {torch.__version__}"
        return "; it was made on another machine, or it was changed"

    def _check_end(self, number: int, row: Row) -> str:
        state = self._training.model
        state.finalize()
        found = state.model_hash()
        if found != row.get("model_hash"):
            raise SettingError(f"{self._tape.syncer.path}, line {number}: the final model has other bits here")
        return found


@dataclass
class _ReplayContext:
    """Versions and calls shared by all replayed learners."""

    settings: RunSettings
    task: TaskSettings
    corpus: Corpus
    plan: Plan
    static: bytes
    epoch: int
    wanted: set[AnswerKey]
    uses: Counter[tuple[int, int]]
    """(fragment, version) -> number of adoptions still to come."""
    calls: dict[tuple[int, int], Call] = field(default_factory=dict)
    """By (slot, attempt)."""
    _public: dict[tuple[int, int], PublicFragment] = field(default_factory=dict)

    def add_version(self, fragment: int, public: PublicFragment) -> None:
        if self.uses[fragment, public.version]:
            self._public[fragment, public.version] = public

    def public(self, fragment: int, version: int) -> PublicFragment:
        """KeyError if it does not exist yet, so no learner can have adopted it."""
        found = self._public[fragment, version]
        self.uses[fragment, version] -= 1
        if not self.uses[fragment, version]:
            del self._public[fragment, version]
        return found


class _ReplayedLearner:
    """One learner incarnation, replayed as far as its answers are needed."""

    def __init__(self, file: JournalFile, context: _ReplayContext) -> None:
        if file["epoch"] != context.epoch:
            raise SettingError(f"{file.path} belongs to epoch {file['epoch']}, not to {context.epoch} as the syncer's")
        if file["data_hash"] != context.corpus.sha256:
            raise SettingError(f"{file.path} is of a learner that trained another text than the run's; see --decisions")
        self.file, self._context = file, context
        self._rows = enumerate(file.rows, 2)
        self._answers: dict[AnswerKey, Any] = {}
        whole = tuple(self._version(1, p, v) for p, v in enumerate(file["versions"]))
        joined = Joined(context.plan, context.settings, context.task, context.epoch, file["t"], whole, context.static)
        first = file.rows[0].get("adopted", ()) if file.rows and file.rows[0].get("steps") == 0 else ()
        self._trained = VirtualLearner(
            joined, context.corpus, str(file["learner"]), int(file["incarnation"]),
            pending=[(p, self._version(2, p, v)) for p, _, v, _ in first],
        )  # fmt: skip

    @property
    def local_steps(self) -> int:
        return self._trained.session.local_steps

    def until(self, wanted: AnswerKey, context: _ReplayContext) -> list[Any]:
        """Train until this answer is captured; returns its chunks."""
        threads = int(self.file["threads"])
        if not 0 < threads <= MAX_THREADS:
            raise SettingError(f"{self.file.path} is of a learner with {threads} threads, which no machine has")
        torch.set_num_threads(threads)
        while wanted not in self._answers:
            number, row = next(self._rows, (0, {"what": "close"}))
            if row["what"] != "boundary":
                raise SettingError(
                    f"{self.file.path} ends before the answer to slot {wanted[2]}, attempt {wanted[3]}, that was merged"
                )
            try:
                self._boundary(number, row, context)
            except BROKEN as error:
                raise SettingError(
                    f"{self.file.path}, line {number}: no step boundary that can be done again ({error!r})"
                ) from error
        return list(self._answers.pop(wanted))

    def _version(self, number: int, fragment: int, version: int) -> PublicFragment:
        try:
            return self._context.public(fragment, version)
        except KeyError as error:
            raise SettingError(
                f"{self.file.path}, line {number}: version {version!r} of fragment {fragment!r} was not made by then"
            ) from error

    def _boundary(self, number: int, row: Row, context: _ReplayContext) -> None:
        trained, session = self._trained, self._trained.session
        if not row["steps"]:
            return  # arrivals before the first step were adopted when the session began
        trained.mailbox.fixed_progress = Progress(row.get("progress", 0.0), context.settings.steps)
        arrivals = [
            trained.arrival(p, e, self._version(number, p, v), include_own=bool(own))
            for p, e, v, own in row.get("adopted", ())
        ]
        trained.mailbox.deliver(arrivals, reset=bool(row.get("reset")))
        calls = [context.calls[slot, attempt] for slot, attempt, _ in row.get("captured", ())]
        steps, tokens = row["steps"], row["tokens"]
        if steps > session.local_steps:
            trained.share = (tokens - session.tokens) / context.task.tokens_per_step
            trained.step(calls)
        elif calls:  # a last capture when it left
            trained.mailbox.open_calls(calls)
            session.close("left")
        if (session.local_steps, session.tokens) != (steps, tokens):
            raise SettingError(
                f"{self.file.path}, line {number}: {steps} steps and {tokens} tokens on the tape, "
                f"{session.local_steps} and {session.tokens} here"
            )
        answers = trained.captured()
        if sorted(chunks[0].slot for chunks in answers) != sorted(call.slot for call in calls):
            raise SettingError(f"{self.file.path}, line {number}: other captures here than on the tape")
        for chunks in answers:
            key = (*trained.me.pair, chunks[0].slot, chunks[0].attempt)
            if key in context.wanted:
                self._answers[key] = chunks


def _complete(tape: RunJournal) -> bool:
    return any(row["what"] == "end" for row in tape.syncer.rows)


def _task(file: JournalFile) -> TaskSettings:
    if file["task"] is None:
        raise SettingError(
            f"{file.path} is of a run without a model, or one whose learners bring their own; see --decisions"
        )
    try:
        return TaskSettings.from_map(file["task"])
    except Malformed as error:
        raise SettingError(f"{file.path} is no tape of this version: {error}") from error


def _count_uses(tape: RunJournal) -> Counter[tuple[int, int]]:
    """Number of adoptions of each (fragment, version)."""
    uses: Counter[tuple[int, int]] = Counter()
    for file in tape.learners.values():
        uses.update(enumerate(file["versions"]))
        uses.update((p, v) for row in file.rows for p, _, v, _ in row.get("adopted", ()))
    return uses


def _merged_answers(file: JournalFile) -> set[AnswerKey]:
    """Keys of all merged answers."""
    attempts: dict[int, int] = {}
    found: set[AnswerKey] = set()
    for row in file.rows:
        for action in row.get("actions", ()):
            if action[0] == "call":
                attempts[action[1]] = action[4]
            elif action[0] == "merge":
                found |= {(name, incarnation, action[1], attempts[action[1]]) for name, incarnation in action[2]}
        if row["what"] == "failed":
            attempts[row["slot"]] += 1
    return found
