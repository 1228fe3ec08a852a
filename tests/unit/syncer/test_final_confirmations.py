"""Final confirmations: which learners are expected at the end of a run, and for how long."""

from __future__ import annotations

import pytest
from decoupled_diloco.common.wire import GOODBYE_REASONS
from decoupled_diloco.syncer.final_confirmations import (
    MAX_EXPECTED,
    NAMES,
    OTHER_MODEL,
    SILENT,
    Confirmations,
    describe_missing,
)

FINAL = "f" * 64


def awaiting(*learners: tuple[str, int]) -> Confirmations:
    made = Confirmations()
    made.expect(learners)
    return made


def test_a_learner_is_awaited_from_when_it_was_live_until_it_says_that_it_has_finished() -> None:
    awaited = Confirmations()
    awaited.record_goodbye(("early", 1), "finished", FINAL, FINAL)
    awaited.expect([("b", 1), ("a", 1)])
    awaited.expect([("a", 1)])
    assert list(awaited.missing) == ["a", "b"]
    awaited.record_goodbye(("a", 1), "finished", FINAL, FINAL)
    assert awaited.missing == {"b": SILENT}
    assert awaited.pending
    awaited.record_goodbye(("b", 1), "finished", FINAL, FINAL)
    assert not awaited.missing
    assert not awaited.pending


@pytest.mark.parametrize("reason", [reason for reason in GOODBYE_REASONS if reason != "finished"])
def test_a_learner_that_leaves_without_the_final_model_is_waited_for_no_longer_and_named_with_its_reason(
    reason: str,
) -> None:
    awaited = awaiting(("a", 1))
    awaited.record_goodbye(("a", 1), reason, "", FINAL)
    assert awaited.missing == {"a": reason}
    assert not awaited.pending
    awaited.expect([("a", 1)])
    assert awaited.missing == {"a": reason}, "it has left"
    awaited.expect([("a", 2)])
    assert awaited.missing == {"a": SILENT}, "it came back as another process"
    assert awaited.pending


@pytest.mark.parametrize(("theirs", "final"), [("0" * 64, FINAL), ("", FINAL), ("", ""), (FINAL, "")])
def test_a_learner_that_has_finished_with_another_model_has_not_confirmed(theirs: str, final: str) -> None:
    awaited = awaiting(("a", 1))
    awaited.record_goodbye(("a", 1), "finished", theirs, final)
    assert awaited.missing == {"a": OTHER_MODEL}
    awaited.record_goodbye(("a", 1), "finished", FINAL, FINAL)
    assert not awaited.missing, "a goodbye is repeated"


def test_another_process_of_the_same_name_confirms_nothing() -> None:
    awaited = awaiting(("a", 1))
    awaited.record_goodbye(("a", 2), "finished", FINAL, FINAL)
    awaited.record_goodbye(("a", 2), "failed", "", FINAL)
    awaited.record_request(("a", 2), 5.0)
    assert awaited.missing == {"a": SILENT}
    assert awaited.pending
    assert awaited.requested_at == float("-inf")


def test_only_a_learner_that_is_awaited_lengthens_the_wait_by_what_it_fetches() -> None:
    awaited = awaiting(("a", 1))
    awaited.record_request(("stranger", 1), 10.0)
    assert awaited.requested_at == float("-inf")
    awaited.record_request(("a", 1), 11.0)
    assert awaited.requested_at == 11.0


def test_the_wait_starts_again_with_each_request_and_has_an_end_all_the_same() -> None:
    awaited = awaiting(("a", 1))

    def given_up(now: float) -> bool:
        return awaited.timed_out(100.0, now, wait_seconds=30.0, most_seconds=600.0)

    assert not given_up(129.0)
    assert given_up(130.0)
    for now in range(120, 700, 20):
        awaited.record_request(("a", 1), float(now))
        assert not given_up(now + 19.0)
    awaited.record_request(("a", 1), 700.0)
    assert given_up(700.0)


def test_names_that_are_made_up_without_end_take_no_memory_without_end() -> None:
    awaited = awaiting(("live", 1))
    for number in range(MAX_EXPECTED + 100):
        awaited.expect([(f"n{number}", 1)])
    assert len(awaited.missing) == MAX_EXPECTED
    assert "live" in awaited.missing
    awaited.expect([("live", 2)])
    awaited.record_goodbye(("live", 2), "finished", FINAL, FINAL)
    assert "live" not in awaited.missing


def test_only_the_first_few_are_named() -> None:
    assert describe_missing({"a": "failed", "b": SILENT}) == "a (failed), b (no goodbye)"
    sentence = describe_missing({f"n{number:03}": SILENT for number in range(MAX_EXPECTED)})
    assert sentence.count("(") == NAMES
    assert sentence.endswith(f"n007 (no goodbye) and {MAX_EXPECTED - NAMES} more")
