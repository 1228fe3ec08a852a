"""Which learners are awaited at the end of a run."""

from __future__ import annotations

from decoupled_diloco.syncer.confirmations import AWAITED, Confirmations


def test_a_learner_is_awaited_from_when_it_was_live_until_any_life_of_it_says_goodbye() -> None:
    awaited = Confirmations()
    awaited.left("early")
    awaited.await_from(["b", "a"])
    awaited.await_from(["a"])
    assert list(awaited.missing) == ["a", "b"]
    awaited.left("a")
    assert list(awaited.missing) == ["b"]


def test_only_a_learner_that_is_awaited_lengthens_the_wait_by_what_it_fetches() -> None:
    awaited = Confirmations()
    awaited.await_from(["a"])
    awaited.asked("stranger", 10.0)
    assert awaited.asked_at == float("-inf")
    awaited.asked("a", 11.0)
    assert awaited.asked_at == 11.0


def test_names_that_are_made_up_without_end_take_no_memory_without_end() -> None:
    awaited = Confirmations()
    awaited.await_from(["live"])
    for number in range(AWAITED + 100):
        awaited.await_from([f"n{number}"])
    assert len(awaited.missing) == AWAITED
    assert "live" in awaited.missing
