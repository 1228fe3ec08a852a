"""Stall diagnosis: the sentences, and when they are reported."""

from __future__ import annotations

import io
from itertools import pairwise
from typing import Any

import pytest
from decoupled_diloco.common.config import RunSettings
from decoupled_diloco.common.wire import Alive
from decoupled_diloco.monitor.status import RunStatus
from decoupled_diloco.monitor.watch import PlainDisplay, line, table
from decoupled_diloco.syncer.rejections import Rejections
from decoupled_diloco.syncer.round_events import Answer, Merge
from decoupled_diloco.syncer.rounds import Rounds
from decoupled_diloco.syncer.stall_diagnosis import (
    LONGEST_REPEAT_SECONDS,
    NAMES,
    PATIENCE_SECONDS,
    STALL_SECONDS,
    SURE_SECONDS,
    StallChange,
    StallMonitor,
    StallReason,
    stall_reason,
)
from rich.console import Console

TOKENS = 10


class StallScenario:
    """A round machine with learners of 10 steps each; time moves only when a test says so."""

    def __init__(self, names: str, quorum: int, step_seconds: float = 1.0, tokens: int = 10 * TOKENS) -> None:
        settings = RunSettings(steps=1000, sync_every=2, fragments=2, overlap=1, quorum=quorum)
        self.rounds, self.rejections, self.now = Rounds(settings, [10, 10], epoch=1), Rejections(), 100.0
        self.step_seconds, self.tokens = step_seconds, tokens
        for name in names:
            self.rounds.join(name, 1, self.now)
            self.hear(name)
        self.rounds.tick(self.now)

    def hear(self, name: str, **more: Any) -> None:
        rows: dict[str, Any] = {
            "local_steps": 10, "tokens": self.tokens, "step_seconds": self.step_seconds, "last_step_age_seconds": 0.0,
            "inner_seconds": 0.0, "session_seconds": 0.0, "since_first_step_seconds": 0.0,
        }  # fmt: skip
        self.rounds.alive(Alive(run="run", name=name, incarnation=1, epoch=1, **(rows | more)), self.now)

    def answer(self, name: str, **more: Any) -> str:
        [call] = self.rounds.calls.values()
        rows: dict[str, Any] = {
            "fragment": call.fragment, "slot": call.slot, "attempt": call.attempt, "base_version": call.version,
            "tokens_from": 0, "tokens_to": 10 * TOKENS, "steps_from": 0, "steps_to": 10,
        }  # fmt: skip
        return self.rounds.answer(Answer(who=(name, 1), **(rows | more)))

    def reject(self, name: str, kind: str, sentence: str, times: int = 1) -> None:
        for _ in range(times):
            self.rejections.rejected((name, 1), kind, sentence, self.now)

    def tick(self, seconds: float = 0.0) -> list[Any]:
        self.now += seconds
        return self.rounds.tick(self.now)

    def reason(self) -> StallReason | None:
        return stall_reason(self.rounds, self.rejections, self.now)

    def text(self) -> str:
        reason = self.reason()
        assert reason is not None
        return reason.text


def test_present_and_missing_learners_are_named_below_the_quorum() -> None:
    scenario = StallScenario("abc", quorum=3)
    assert scenario.rounds.calls
    scenario.now += 30.0
    scenario.hear("a")
    scenario.hear("b", last_step_age_seconds=29.0)
    scenario.tick()
    assert scenario.text() == (
        "1 of the 3 learners that --quorum asks for can answer (a); b has taken no step for 29 s; "
        "c has not been heard for 30 s"
    )


@pytest.mark.parametrize(("silent", "patience"), [("", STALL_SECONDS), ("b", SURE_SECONDS)])
def test_a_pause_of_learners_that_are_heard_is_no_block_for_a_while(silent: str, patience: float) -> None:
    scenario = StallScenario("ab", quorum=2)
    scenario.now += 30.0
    for name in "ab":
        if name != silent:
            scenario.hear(name, last_step_age_seconds=15.0)  # inside session.global_weights(), say
    scenario.tick()
    reason = scenario.reason()
    assert reason is not None
    assert reason.patience_seconds == patience


def test_a_learner_that_vanished_since_its_reports_are_rejected_is_named_with_the_reason() -> None:
    scenario = StallScenario("a", quorum=1)
    scenario.reject("a", "alive", "field: loss of a alive must be a finite number", times=4)
    scenario.tick(30.0)
    assert scenario.text() == (
        "0 of the 1 learners that --quorum asks for can answer; a has not been heard for 30 s, and what it reports is "
        "rejected, field: loss of a alive must be a finite number"
    )


def test_the_first_steps_of_newcomers_are_waited_for_before_that_is_reported() -> None:
    scenario = StallScenario("", quorum=2)
    for name in "ab":
        scenario.rounds.join(name, 1, scenario.now)
    scenario.now += 50.0
    for name in "ab":
        scenario.hear(name, step_seconds=0.0)
    assert scenario.reason() is None
    scenario.now += 10.0
    assert scenario.text().endswith("a has not completed two steps since it joined 60 s ago; "
                                 "b has not completed two steps since it joined 60 s ago")  # fmt: skip


def test_one_of_three_whose_answers_are_rejected_at_a_quorum_of_three_is_named_with_the_reason() -> None:
    scenario = StallScenario("abc", quorum=3)
    assert [scenario.answer(name) for name in "ab"] == ["", ""]
    scenario.reject("c", "delta", "norm: 1e+04, over 100 times", times=7)
    fragment = next(iter(scenario.rounds.calls))
    assert scenario.text() == (
        f"fragment {fragment} has 2 of the 3 answers that --quorum asks for, at attempt 1; those of c are "
        "rejected, norm: 1e+04, over 100 times"
    )


def test_learners_that_do_not_answer_are_named() -> None:
    scenario = StallScenario("abc", quorum=2)
    scenario.answer("b")
    assert scenario.text().endswith("has 1 of the 2 answers that --quorum asks for, at attempt 1; none of a, c")


def test_an_answer_beyond_what_was_reported_is_reported() -> None:
    scenario = StallScenario("a", quorum=1)
    scenario.answer("a", tokens_to=10**9)
    assert scenario.text().endswith("those of a cover more tokens than were reported")


@pytest.mark.parametrize("answering", [True, False])
def test_that_no_learner_reports_tokens_is_reported_whether_they_answer_or_not(answering: bool) -> None:
    scenario = StallScenario("ab", quorum=1, tokens=0)
    for name in "ab" if answering else "":
        assert scenario.answer(name, tokens_to=0) == "empty"
        scenario.reject(name, "delta", "empty", times=3)
    assert "; those of a, b do not count, because 0 tokens are reported: session.step(tokens=...)" in scenario.text()


def test_merges_that_give_nothing_usable_are_reported() -> None:
    scenario = StallScenario("a", quorum=1)
    scenario.answer("a")
    [merge] = [action for action in scenario.tick() if isinstance(action, Merge)]
    assert scenario.reason() is None, "the quorum is met"
    scenario.rounds.failed(merge, scenario.now)
    assert "1 merges of it gave values that are not finite" in scenario.text()


def test_a_round_that_only_waits_for_its_grace_or_the_next_slot_is_not_blocked() -> None:
    scenario = StallScenario("ab", quorum=1)
    scenario.answer("a")
    scenario.tick()
    assert scenario.reason() is None, "grace"
    [merge] = [action for action in scenario.tick(1000.0) if isinstance(action, Merge)]
    scenario.hear("a")
    scenario.rounds.merged(merge, 0.1)
    assert not scenario.rounds.calls
    assert scenario.reason() is None, "time"


def test_a_syncer_that_stops_is_not_blocked() -> None:
    scenario = StallScenario("", quorum=1)
    assert scenario.reason() is not None
    scenario.rounds.pause()
    assert scenario.reason() is None


def test_the_patience_follows_the_pace_so_that_a_slow_run_is_not_called_blocked() -> None:
    quick, slow = (
        StallScenario("a", quorum=1, step_seconds=0.01).reason(),
        StallScenario("a", quorum=1, step_seconds=600.0).reason(),
    )
    assert quick is not None
    assert slow is not None
    assert quick.patience_seconds == PATIENCE_SECONDS
    assert slow.patience_seconds >= 4 * 3 * 600, "the way to the next step boundary is twice a step, and a slot one"


def test_a_sentence_names_so_many_and_no_more() -> None:
    names = [f"n{k:03}" for k in range(300)]
    scenario = StallScenario("", quorum=300)
    for name in names[:299]:
        scenario.rounds.join(name, 1, scenario.now)
        scenario.hear(name, step_seconds=0.0)
    scenario.now += 100.0
    assert scenario.text().endswith(f"and {299 - NAMES} more")
    assert len(scenario.text()) < 1000


def test_looking_changes_nothing() -> None:
    scenario = StallScenario("abc", quorum=3)
    scenario.answer("a")
    before = repr(vars(scenario.rounds))
    scenario.reason()
    assert repr(vars(scenario.rounds)) == before


# --- when it is told -------------------------------------------------------------------------------------------------
QUORUM = StallReason("quorum", "1 of 2", SURE_SECONDS)


def looks(
    block: StallMonitor, reason: StallReason | None, seconds: range, progress: object = 0
) -> list[tuple[int, StallChange]]:
    found = [(t, block.update(reason, progress, float(t))) for t in seconds]
    return [(t, change) for t, change in found if change is not None]


def test_it_is_reported_when_the_patience_is_over_then_seldom_and_again_when_it_moves() -> None:
    block = StallMonitor()
    told = looks(block, QUORUM, range(2000))
    assert [t for t, _ in told[:4]] == [5, 35, 95, 215]
    assert {change.kind for _, change in told} == {"blocked"}
    assert max(later[0] - sooner[0] for sooner, later in pairwise(told)) == LONGEST_REPEAT_SECONDS
    assert (block.text, block.seconds) == ("1 of 2", 1999.0)
    [(t, change)] = looks(block, None, range(2000, 2010), progress=1)
    assert (t, change.kind, change.seconds) == (2000, "unblocked", 2000.0)
    assert block.text == ""


def test_what_passes_soon_is_not_reported() -> None:
    block = StallMonitor()
    for start in range(0, 1000, 10):
        assert looks(block, QUORUM, range(start, start + int(SURE_SECONDS))) == []
        assert looks(block, None, range(start + int(SURE_SECONDS), start + 10)) == []
    assert looks(block, QUORUM, range(1000, 1005)) == []


def test_merges_that_come_again_and_again_are_a_run_that_moves() -> None:
    block = StallMonitor()
    reason = StallReason("answers", "none of a", 10.0)
    assert [block.update(reason, t // 8, float(t)) for t in range(1000)] == [None] * 1000


def test_another_reason_while_it_is_blocked_changes_the_text_at_once_and_is_no_new_block() -> None:
    block = StallMonitor()
    looks(block, QUORUM, range(10))
    assert looks(block, StallReason("answers", "none of b", 1000.0), range(10, 20)) == []
    assert block.text == "none of b"
    assert looks(block, None, range(20, 30)) == []
    assert block.text == "", "it is about to merge"


def test_what_the_process_slept_through_does_not_count() -> None:
    block = StallMonitor()
    block.update(QUORUM, 0, 0.0)
    block.update(QUORUM, 0, 1.0)
    assert block.update(QUORUM, 0, 100_000.0) is None


@pytest.mark.parametrize("seconds", [1, 100])
def test_nothing_is_reported_of_a_run_where_nothing_is_amiss(seconds: int) -> None:
    assert looks(StallMonitor(), None, range(seconds)) == []


# --- how it is shown -------------------------------------------------------------------------------------------------
def shown(blocked: str = "", rejected: str = "") -> RunStatus:
    figures = {"blocked": blocked, "blocked_seconds": 12 if blocked else None, "quorum_state": "met"}
    learners = [{"name": "c", "state": "live", "rejected_reason": rejected, "rejected": 7}]
    return RunStatus(run="run", state="running", t=3, steps=9, summary=figures, learners=learners)


def printed(what: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(what)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_status_says_why_a_run_does_not_move_and_who_is_rejected_and_why() -> None:
    now = shown("c's are rejected", "delta norm (7 in a row)")
    assert "blocked for 12 s: c's are rejected" in printed(table(now))
    assert "repeatedly rejected: c's delta norm (7 in a row)" in printed(table(now))
    assert line(now).endswith("(blocked for 12 s: c's are rejected)")
    figures = now.figures()
    assert figures["blocked"] == "blocked for 12 s: c's are rejected"
    assert figures["rejected"] == {"c": "delta norm (7 in a row)"}


def test_nothing_is_shown_of_a_run_that_moves() -> None:
    said = printed(table(shown()))
    assert "blocked" not in said
    assert "repeatedly rejected" not in said
    assert (shown().figures()["blocked"], shown().figures()["rejected"]) == ("", {})


def test_plain_lines_say_at_once_that_the_run_is_blocked_and_that_it_moves_again() -> None:
    console = Console(file=io.StringIO(), width=200)
    display = PlainDisplay(console)
    for now in (shown(), shown(), shown("x"), shown("y"), shown()):
        display.show(now)
    assert console.file.getvalue().count("run running") == 3  # type: ignore[attr-defined]
