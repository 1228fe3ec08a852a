"""Norm filter: which norms of deltas are implausible, and whose persistence makes them the usual ones."""

from __future__ import annotations

import pytest
from decoupled_diloco.syncer.deltas import NORM_AFTER, PERSISTENT_AFTER, NormFilter


@pytest.fixture
def norm_filter() -> NormFilter:
    """A fragment whose merges have had norms of about 1."""
    norm_filter = NormFilter(2, most_steps=48)
    for _ in range(NORM_AFTER):
        norm_filter.merged(0, 1.0, 1)
    return norm_filter


def test_a_norm_over_100_times_the_usual_is_absurd_where_something_is_known(norm_filter: NormFilter) -> None:
    assert not norm_filter.is_implausible(0, 99.0, 1, "a", "abc")
    assert norm_filter.is_implausible(0, 101.0, 1, "a", "abc")
    assert not norm_filter.is_implausible(1, 1e9, 1, "a", "abc"), "of the other fragment nothing is known"


def test_what_covers_more_steps_may_be_longer_but_only_of_so_many_steps_as_there_may_be(
    norm_filter: NormFilter,
) -> None:
    """The first merges cover a step at a twentieth of the rate, later ones 96 at the whole of it."""
    assert not norm_filter.is_implausible(0, 48 * 20.0, 24, "a", "abc")
    assert not norm_filter.is_implausible(0, 96 * 20.0, 96, "a", "abc")
    assert norm_filter.is_implausible(0, 48 * 101.0, 10**9, "a", "abc")


@pytest.mark.parametrize("live", ["ab", "abc", "abcdefgh"])
def test_a_minority_is_refused_forever(norm_filter: NormFilter, live: str) -> None:
    assert all(norm_filter.is_implausible(0, 1e4, 1, name, live) for _ in range(100) for name in live[: len(live) // 2])


@pytest.mark.parametrize("live", ["a", "ab", "abc", "abcdefgh"])
def test_more_than_half_who_insist_say_what_is_usual_and_others_are_measured_by_that(
    norm_filter: NormFilter, live: str
) -> None:
    most = live[: len(live) // 2 + 1]
    for _ in range(PERSISTENT_AFTER - 1):
        assert all(norm_filter.is_implausible(0, 1e4, 1, name, live) for name in most)
    assert [norm_filter.is_implausible(0, 1e4, 1, name, live) for name in most] == [True] * (len(most) - 1) + [False]
    assert not any(norm_filter.is_implausible(0, 1e4, 1, name, live) for name in most)
    assert norm_filter.is_implausible(0, 1e7, 1, "wild", [*live, "wild"])


def test_a_learner_that_has_left_insists_on_nothing(norm_filter: NormFilter) -> None:
    for _ in range(PERSISTENT_AFTER):
        assert norm_filter.is_implausible(0, 1e4, 1, "gone", ["gone", "a", "b"])
    for _ in range(10 * PERSISTENT_AFTER):
        assert norm_filter.is_implausible(0, 1e4, 1, "wild", ["wild", "a", "b"])


def test_a_merge_that_others_bring_about_forgets_who_was_refused(norm_filter: NormFilter) -> None:
    for _ in range(10 * PERSISTENT_AFTER):
        assert norm_filter.is_implausible(0, 1e4, 1, "a", "a")
        norm_filter.merged(0, 1.0, 1)
