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
from ..syncer.metrics import RunMetrics
from ..syncer.publish import merge_answers
from ..syncer.round_events import Answer, Called
from ..syncer.run_state import Served
from .real_training import version_zero
from .virtual_learner import VirtualLearner

MOST_THREADS = 1024
Answered = tuple[str, int, int, int]
"""(name, incarnation, slot, attempt)"""


@dataclass(frozen=True)
class Verdict:
    """What a replay found. It raises where something differs, so these are the figures of a tape that agrees."""

    decisions: int
    merges: int
    local_steps: int
    model_hash: str
    """"" where nothing was trained to the end."""
    complete: bool
    """The tape has the run's end."""


def replay(tape: RunJournal, data: Path | None, said: Callable[[int], None] = lambda _: None) -> Verdict:
    """Take every decision again and train everything anew. SettingError, naming the line, at the first difference."""
    try:
        return _Replay(tape, data, said).run()
    except BROKEN as wrong:
        raise SettingError(f"{tape.syncer.path}: no tape that can be done again ({wrong!r})") from wrong


def replay_decisions(tape: RunJournal) -> Verdict:
    """Take every decision again, without a model. SettingError, naming the line, at the first that differs."""
    again, decisions, merges = ReplayedRounds(tape.syncer), 0, 0
    for number, row in enumerate(tape.syncer.rows, 2):
        actions = again.take(number, row)
        decisions += len(actions) if row["what"] == "tick" else 0
        merges += row["what"] == "merged"
    return Verdict(decisions, merges, 0, "", _complete(tape))


class _Replay:
    """The global model, made again merge by merge."""

    def __init__(self, tape: RunJournal, data: Path | None, said: Callable[[int], None]) -> None:
        self._tape, self._said = tape, said
        self._again = ReplayedRounds(tape.syncer)
        settings, task = self._again.settings, _task(tape.syncer)
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
        rounds = self._again.rounds
        self._served = Served(state, rounds, RunMetrics(plan.parameters, rounds.schedule.steps_between))
        epoch, wanted = int(tape.syncer["epoch"]), _merged_answers(tape.syncer)
        self._world = _World(settings, task, corpus, plan, state.static, epoch, wanted, _uses(tape))
        for p, vector in enumerate(state.public):
            self._world.made(p, PublicFragment(0, vector, digest(vector)))
        self._lives: dict[tuple[str, int], _Life] = {}

    def run(self) -> Verdict:
        rows, decisions, merges, model_hash = self._tape.syncer.rows, 0, 0, ""
        for number, row in enumerate(rows, 2):
            vector = self._vector(number, row) if row["what"] == "answer" else None
            if row["what"] == "begin" and row.get("resumed") is not None:
                raise SettingError(
                    f"{self._tape.syncer.path} begins in mid-run, so it cannot be trained again; see --decisions"
                )
            if row["what"] == "merged":
                self._merge(number, row)
                merges += 1
                self._said(merges)
            if row["what"] == "failed":
                self._fail(number, row)
            actions = self._again.take(number, row, vector)
            decisions += len(actions) if row["what"] == "tick" else 0
            for action in actions:
                if isinstance(action, Called):
                    call = self._again.rounds.wire_call(action.call)
                    self._world.calls[call.slot, call.attempt] = call
            if row["what"] == "end":
                model_hash = self._end(number, row)
        return Verdict(
            decisions, merges, sum(life.local_steps for life in self._lives.values()), model_hash, _complete(self._tape)
        )

    def _vector(self, number: int, row: Row) -> Any:
        """What this answer carried, by training up to it; None for one that was not merged."""
        try:
            key = (row["learner"], row["incarnation"], row["slot"], row["attempt"])
        except KeyError as wrong:
            raise SettingError(f"{self._tape.syncer.path}, line {number}: an answer without {wrong}") from wrong
        if key not in self._world.wanted or row.get("refused"):
            return None
        answer: Answer | None = None
        try:
            for chunk in self._life(key[0], key[1]).until(key, self._world):
                answer = self._served.intake.take(chunk)
        except Malformed as wrong:
            raise SettingError(f"{self._tape.syncer.path}, line {number}: refused here: {wrong}") from wrong
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

    def _life(self, name: str, incarnation: int) -> _Life:
        who = (name, incarnation)
        if who not in self._lives:
            if who not in self._tape.learners:
                raise SettingError(
                    f"the tape has no file {name}-{incarnation}.jsonl, and what that learner sent was merged; "
                    "it was started without --tape, or elsewhere: lay its file beside the others"
                )
            self._lives[who] = _Life(self._tape.learners[who], self._world)
        return self._lives[who]

    def _merge(self, number: int, row: Row) -> None:
        served, merge = self._served, self._again.merge_of(row["slot"])
        merged = merge_answers(served, merge)
        if merged.digest != row.get("digest"):
            raise SettingError(
                f"{self._tape.syncer.path}, line {number}: version {merged.version} of fragment {merge.call.fragment} "
                f"has other bits here than on the tape{self._torch()}"
            )
        # the screen is told no norm, so it judges nothing: refusals stand on no tape, and what was usual rests on them
        public = PublicFragment(
            merged.version, served.state.public[merge.call.fragment], merged.digest, merge.contributors
        )  # fmt: skip
        self._world.made(merge.call.fragment, public)

    def _fail(self, number: int, row: Row) -> None:
        with suppress(Malformed):
            merge_answers(self._served, self._again.merge_of(row["slot"]))
            raise SettingError(f"{self._tape.syncer.path}, line {number}: a merge that failed there succeeds here")

    def _torch(self) -> str:
        """What may be why."""
        theirs = {str(file.head.get("torch")) for file in self._tape.learners.values()} - {torch.__version__}
        if theirs:
            return f", which was made by torch {', '.join(sorted(theirs))}; this is {torch.__version__}"
        return "; it was made on another machine, or it was changed"

    def _end(self, number: int, row: Row) -> str:
        state = self._served.state
        state.finalize()
        found = state.model_hash()
        if found != row.get("model_hash"):
            raise SettingError(f"{self._tape.syncer.path}, line {number}: the final model has other bits here")
        return found


@dataclass
class _World:
    """What lives may ask for: fragments at versions, calls."""

    settings: RunSettings
    task: TaskSettings
    corpus: Corpus
    plan: Plan
    static: bytes
    epoch: int
    wanted: set[Answered]
    uses: Counter[tuple[int, int]]
    """Of (fragment, version): how often some life still takes it."""
    calls: dict[tuple[int, int], Call] = field(default_factory=dict)
    """By (slot, attempt)."""
    _public: dict[tuple[int, int], PublicFragment] = field(default_factory=dict)

    def made(self, fragment: int, public: PublicFragment) -> None:
        if self.uses[fragment, public.version]:
            self._public[fragment, public.version] = public

    def public(self, fragment: int, version: int) -> PublicFragment:
        """KeyError if it was not made yet: no learner can have adopted it."""
        taken = self._public[fragment, version]
        self.uses[fragment, version] -= 1
        if not self.uses[fragment, version]:
            del self._public[fragment, version]
        return taken


class _Life:
    """One life of a learner, done again as far as somebody needs it."""

    def __init__(self, file: JournalFile, world: _World) -> None:
        if file["epoch"] != world.epoch:
            raise SettingError(f"{file.path} belongs to epoch {file['epoch']}, not to {world.epoch} as the syncer's")
        if file["data_hash"] != world.corpus.sha256:
            raise SettingError(f"{file.path} is of a learner that trained another text than the run's; see --decisions")
        self.file, self._world = file, world
        self._rows = enumerate(file.rows, 2)
        self._answers: dict[Answered, Any] = {}
        whole = tuple(self._taken(1, p, v) for p, v in enumerate(file["versions"]))
        joined = Joined(world.plan, world.settings, world.task, world.epoch, file["t"], whole, world.static)
        first = file.rows[0].get("adopted", ()) if file.rows and file.rows[0].get("steps") == 0 else ()
        self._trainee = VirtualLearner(
            joined, world.corpus, str(file["learner"]), int(file["incarnation"]),
            pending=[(p, self._taken(2, p, v)) for p, _, v, _ in first],
        )  # fmt: skip

    @property
    def local_steps(self) -> int:
        return self._trainee.session.local_steps

    def until(self, wanted: Answered, world: _World) -> list[Any]:
        """Train until this answer was captured; its chunks."""
        threads = int(self.file["threads"])
        if not 0 < threads <= MOST_THREADS:
            raise SettingError(f"{self.file.path} is of a learner with {threads} threads, which no machine has")
        torch.set_num_threads(threads)
        while wanted not in self._answers:
            number, row = next(self._rows, (0, {"what": "close"}))
            if row["what"] != "boundary":
                raise SettingError(
                    f"{self.file.path} ends before the answer to slot {wanted[2]}, attempt {wanted[3]}, that was merged"
                )
            try:
                self._boundary(number, row, world)
            except BROKEN as wrong:
                raise SettingError(
                    f"{self.file.path}, line {number}: no step boundary that can be done again ({wrong!r})"
                ) from wrong
        return list(self._answers.pop(wanted))

    def _taken(self, number: int, fragment: int, version: int) -> PublicFragment:
        try:
            return self._world.public(fragment, version)
        except KeyError as wrong:
            raise SettingError(
                f"{self.file.path}, line {number}: version {version!r} of fragment {fragment!r} was not made by then"
            ) from wrong

    def _boundary(self, number: int, row: Row, world: _World) -> None:
        trainee, session = self._trainee, self._trainee.session
        if not row["steps"]:
            return  # what waited for the first step was adopted when the session began
        trainee.mailbox.fixed_progress = Progress(row.get("progress", 0.0), world.settings.steps)
        arrivals = [
            trainee.arrival(p, e, self._taken(number, p, v), include_own=bool(own))
            for p, e, v, own in row.get("adopted", ())
        ]
        trainee.mailbox.deliver(arrivals, reset=bool(row.get("reset")))
        calls = [world.calls[slot, attempt] for slot, attempt, _ in row.get("captured", ())]
        steps, tokens = row["steps"], row["tokens"]
        if steps > session.local_steps:
            trainee.share = (tokens - session.tokens) / world.task.tokens_per_step
            trainee.step(calls)
        elif calls:  # captured once more when it left
            trainee.mailbox.open_calls(calls)
            session.close("left")
        if (session.local_steps, session.tokens) != (steps, tokens):
            raise SettingError(
                f"{self.file.path}, line {number}: {steps} steps and {tokens} tokens on the tape, "
                f"{session.local_steps} and {session.tokens} here"
            )
        answers = trainee.captured()
        if sorted(chunks[0].slot for chunks in answers) != sorted(call.slot for call in calls):
            raise SettingError(f"{self.file.path}, line {number}: other captures here than on the tape")
        for chunks in answers:
            key = (*trainee.me.pair, chunks[0].slot, chunks[0].attempt)
            if key in world.wanted:
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
    except Malformed as wrong:
        raise SettingError(f"{file.path} is no tape of this version: {wrong}") from wrong


def _uses(tape: RunJournal) -> Counter[tuple[int, int]]:
    """How often each (fragment, version) is taken by some life."""
    uses: Counter[tuple[int, int]] = Counter()
    for file in tape.learners.values():
        uses.update(enumerate(file["versions"]))
        uses.update((p, v) for row in file.rows for p, _, v, _ in row.get("adopted", ()))
    return uses


def _merged_answers(file: JournalFile) -> set[Answered]:
    """Every answer that some merge took."""
    attempts: dict[int, int] = {}
    found: set[Answered] = set()
    for row in file.rows:
        for action in row.get("actions", ()):
            if action[0] == "call":
                attempts[action[1]] = action[4]
            elif action[0] == "merge":
                found |= {(name, incarnation, action[1], attempts[action[1]]) for name, incarnation in action[2]}
        if row["what"] == "failed":
            attempts[row["slot"]] += 1
    return found
