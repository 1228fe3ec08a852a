"""Journal of the rounds: their inputs with times, and their decisions, which a replay of the inputs repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..common.config import RunSettings, TaskSettings
from ..common.errors import Malformed, SettingError
from ..common.journal import BROKEN, JournalFile, JournalWriter, Row
from ..common.wire import Alive
from .membership import Member
from .round_events import Action, Answer, Called, Drained, Lost, Merge, Unmet
from .rounds import Rounds

ANSWER = tuple(f.name for f in fields(Answer) if f.name not in ("who", "vector"))
REPORT = (
    "epoch", "local_steps", "tokens", "step_seconds", "last_step_age_seconds", "inner_seconds", "session_seconds",
    "since_first_step_seconds", "bytes_up", "bytes_down", "gaps",
)  # fmt: skip


class JournaledRounds(Rounds):
    """Rounds that record their inputs and decisions. The initial state is written with the first event."""

    def __init__(self, settings: RunSettings, parameters: Sequence[int], epoch: int, tape: JournalWriter) -> None:
        super().__init__(settings, parameters, epoch)
        self._tape = tape
        self._begun = self._touched = False

    def join(self, name: str, incarnation: int, now: float) -> Member:
        self._note("join", at=now, learner=name, incarnation=incarnation)
        return super().join(name, incarnation, now)

    def alive(self, alive: Alive, now: float) -> Member | None:
        row = {name: getattr(alive, name) for name in REPORT}
        self._note("alive", at=now, learner=alive.name, incarnation=alive.incarnation, **row)
        return super().alive(alive, now)

    def left(self, who: tuple[str, int], local_steps: int, tokens: int) -> None:
        self._note("leave", learner=who[0], incarnation=who[1], local_steps=local_steps, tokens=tokens)
        super().left(who, local_steps, tokens)

    def forget_oldest(self) -> list[Member]:
        gone = super().forget_oldest()
        if gone:
            self._note("forget", learners=[member.name for member in gone])
        return gone

    def answer(self, answer: Answer) -> str:
        refused = super().answer(answer)
        row = {name: getattr(answer, name) for name in ANSWER}
        self._note("answer", learner=answer.who[0], incarnation=answer.who[1], **row, refused=refused)
        return refused

    def tick(self, now: float) -> list[Action]:
        actions = super().tick(now)
        if actions or self._touched:
            self._note("tick", at=now, actions=[_row_of(action) for action in actions])
            self._touched = False
        return actions

    def merged(self, merge: Merge, seconds: float, digest: str = "") -> None:
        self._note("merged", slot=merge.call.slot, seconds=seconds, digest=digest)
        super().merged(merge, seconds, digest)

    def failed(self, merge: Merge, now: float) -> Called:
        self._note("failed", at=now, slot=merge.call.slot)
        return super().failed(merge, now)

    def pause(self) -> None:
        self._note("pause")
        super().pause()

    def ended(self, model_hash: str) -> None:
        self._note("end", model_hash=model_hash)

    def close(self) -> None:
        self._tape.close()

    def _note(self, what: str, **row: Any) -> None:
        if not self._begun:
            self._begun = True
            resumed = None if not any(self.versions) else self.to_json()
            self._tape.write("begin", versions=self.versions, resumed=resumed)
        self._touched = True
        self._tape.write(what, **row)


def _row_of(action: Action) -> list[Any]:
    """An action as a list in a journal: its kind and its subject."""
    match action:
        case Called(call):
            return ["call", call.slot, call.fragment, call.version, call.attempt, call.t]
        case Merge(call, answers, unreported):
            return ["merge", call.slot, [list(a.who) for a in answers], [list(a.who) for a in unreported]]
        case Unmet(call):
            return ["unmet", call.slot]
        case Lost(member):
            return ["lost", *member.who]
        case Drained():
            return ["drained"]


def recorded(
    folder: Path,
    settings: RunSettings,
    parameters: Sequence[int],
    *,
    epoch: int,
    task: TaskSettings | None = None,
    plan_digest: str = "",
    data_hash: str = "",
) -> JournaledRounds:
    """Rounds that record into `folder`. SettingError if the journal cannot be written there."""
    tape = JournalWriter(
        folder, f"syncer-{epoch}", of="syncer", run=settings.run, epoch=epoch, settings=settings.to_map(),
        task=None if task is None else task.to_map(), data_hash=data_hash, plan_digest=plan_digest,
        parameters=list(parameters),
    )  # fmt: skip
    return JournaledRounds(settings, parameters, epoch, tape)


class ReplayedRounds:
    """Feeds the inputs of a journal to new Rounds, one by one, and compares the decisions."""

    def __init__(self, file: JournalFile) -> None:
        self.file = file
        self.settings = _settings_of(file)
        try:
            self.rounds = Rounds(self.settings, file["parameters"], int(file["epoch"]))
        except BROKEN as wrong:
            raise SettingError(f"{file.path} is not a tape of this version: {wrong}") from wrong
        self._merges: dict[int, Merge] = {}

    def take(self, number: int, row: Row, vector: Any = None) -> list[Action]:
        """Replay one event; returns the actions. SettingError if the event is invalid, or the decisions differ.

        number: of the line, for messages. vector: the decoded delta of an answer.
        """
        try:
            return self._take(number, row, vector)
        except BROKEN as wrong:
            raise SettingError(f"{self.file.path}, line {number}: the event cannot be replayed ({wrong})") from wrong

    def merge_of(self, slot: int) -> Merge:
        return self._merges[slot]

    def _take(self, number: int, row: Row, vector: Any) -> list[Action]:
        rounds, what = self.rounds, row["what"]
        match what:
            case "begin":
                if row["resumed"] is not None:
                    rounds.load_json(row["resumed"])
                rounds.versions = list(row["versions"])
            case "join":
                rounds.join(row["learner"], row["incarnation"], row["at"])
            case "alive":
                rounds.alive(_report_of(self.settings.run, row), row["at"])
            case "leave":
                rounds.left((row["learner"], row["incarnation"]), row["local_steps"], row["tokens"])
            case "forget":
                self._agree(number, "forgotten", row["learners"], [m.name for m in rounds.forget_oldest()])
            case "answer":
                self._agree(number, "an answer's refusal", row["refused"], rounds.answer(_answer_of(row, vector)))
            case "tick":
                actions = rounds.tick(row["at"])
                self._agree(number, "decisions", row["actions"], [_row_of(action) for action in actions])
                self._merges |= {a.call.slot: a for a in actions if isinstance(a, Merge)}
                return actions
            case "merged":
                rounds.merged(self._merges.pop(row["slot"]), row["seconds"], row["digest"])
            case "failed":
                return [rounds.failed(self._merges.pop(row["slot"]), row["at"])]
            case "pause":
                rounds.pause()
            case "end":
                pass
            case _:
                raise ValueError(what)
        return []

    def _agree(self, number: int, what: str, taped: object, ours: object) -> None:
        if taped != ours:
            raise SettingError(f"{self.file.path}, line {number}: {what} differ: {taped!r} on the tape, {ours!r} here")


def _settings_of(file: JournalFile) -> RunSettings:
    rows: Mapping[str, object] = file["settings"]
    try:
        return RunSettings.from_map(rows)
    except (Malformed, *BROKEN) as wrong:
        raise SettingError(f"{file.path} is not a tape of this version: {wrong}") from wrong


def _report_of(run: str, row: Row) -> Alive:
    return Alive(run=run, name=row["learner"], incarnation=row["incarnation"], **{name: row[name] for name in REPORT})


def _answer_of(row: Row, vector: Any = None) -> Answer:
    return Answer(who=(row["learner"], row["incarnation"]), vector=vector, **{name: row[name] for name in ANSWER})
