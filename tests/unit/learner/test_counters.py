"""Counters, intervals, and which calls a learner answers."""

from __future__ import annotations

from typing import Any

import pytest
from decoupled_diloco.common.wire import Call
from decoupled_diloco.learner.counters import Counters, Counts

ME = ("me", 7)


def call(**more: Any) -> Call:
    rows: dict[str, Any] = {"run": "r", "epoch": 1, "slot": 4, "t": 4, "fragment": 0, "version": 3, "attempt": 1}
    return Call(**(rows | more))


def books(version: int = 3, steps: int = 1) -> Counters:
    """Everything adopted at `version` under epoch 1, and so many steps of 10 tokens taken since."""
    made = Counters(ME, 2)
    for fragment in range(2):
        made.adopted(fragment, 1, version)
    for _ in range(steps):
        made.count(10)
    return made


def test_nothing_is_answered_before_the_first_step_after_an_adoption() -> None:
    kept = books(steps=0)
    assert not kept.may_answer(call())
    kept.count(10)
    assert kept.may_answer(call())
    kept.adopted(0, 1, 3)
    assert not kept.may_answer(call())


def test_an_answer_covers_what_was_done_since_the_adoption() -> None:
    kept = books(steps=3)
    assert kept.captured(call()) == (Counts(0, 0), Counts(3, 30))
    kept.adopted(0, 1, 4)
    kept.count(5)
    assert kept.captured(call(slot=5, version=4)) == (Counts(3, 30), Counts(4, 35))


def test_after_a_rebase_the_interval_begins_at_the_merged_capture() -> None:
    kept = books(steps=2)
    _, at = kept.captured(call())
    kept.count(10)
    kept.adopted(0, 1, 4, since=at)
    kept.count(10)
    assert kept.captured(call(slot=9, version=4)) == (Counts(2, 20), Counts(4, 40))


def test_each_attempt_is_answered_once_and_a_new_one_with_a_new_capture() -> None:
    kept = books()
    kept.captured(call())
    kept.count(10)
    assert not kept.may_answer(call())
    assert kept.may_answer(call(attempt=2))
    assert kept.captured(call(attempt=2)) == (Counts(0, 0), Counts(2, 20))
    assert not kept.may_answer(call(attempt=1))


def test_a_new_attempt_without_a_step_in_between_waits_for_the_next_step() -> None:
    kept = books()
    kept.captured(call())
    assert not kept.may_answer(call(attempt=2))


@pytest.mark.parametrize(("version", "answers"), [(3, True), (4, True), (5, True), (6, False), (2, False)])
def test_an_anchor_may_lag_by_two_versions_and_never_lead(version: int, *, answers: bool) -> None:
    assert books(version=3).may_answer(call(version=version)) is answers


def test_a_contributor_adopts_first() -> None:
    assert not books(version=3).may_answer(call(version=4, contributors=(ME,)))
    assert books(version=3).may_answer(call(version=4, contributors=(("me", 8), ("you", 7))))
    assert books(version=4).may_answer(call(version=4, contributors=(ME,)))


def test_calls_of_another_epoch_and_of_unknown_fragments_are_not_answered() -> None:
    assert not books().may_answer(call(epoch=2))
    assert not books().may_answer(call(fragment=2))


def test_versions_adopted_under_an_older_epoch_count_as_none() -> None:
    kept = books()
    kept.adopted(1, 2, 9)
    assert kept.versions(1) == (3, 0)
    assert kept.versions(2) == (0, 9)


def test_steps_on_no_tokens_are_not_answered_for() -> None:
    kept = books(steps=0)
    kept.count(0)
    assert not kept.may_answer(call())
    kept.count(1)
    assert kept.may_answer(call())
