"""What of a delta's length is absurd, and who says what is usual."""

from __future__ import annotations

import pytest
from decoupled_diloco.syncer.screen import INSISTS_AFTER, NORM_AFTER, NormScreen


@pytest.fixture
def screen() -> NormScreen:
    """A fragment whose merges have had norms of about 1."""
    screen = NormScreen(2)
    for _ in range(NORM_AFTER):
        screen.merged(0, 1.0)
    return screen


def test_a_norm_over_100_times_the_usual_is_absurd_where_something_is_known(screen: NormScreen) -> None:
    assert not screen.absurd(0, 99.0, "a", 3)
    assert screen.absurd(0, 101.0, "a", 3)
    assert not screen.absurd(1, 1e9, "a", 3), "of the other fragment nothing is known"


@pytest.mark.parametrize("live", [2, 3, 8])
def test_a_minority_is_refused_for_ever(screen: NormScreen, live: int) -> None:
    wild = [f"wild-{n}" for n in range(live // 2)]
    assert all(screen.absurd(0, 1e4, name, live) for _ in range(100) for name in wild)


@pytest.mark.parametrize("live", [1, 2, 3, 8])
def test_more_than_half_who_insist_say_what_is_usual_and_others_are_measured_by_that(
    screen: NormScreen, live: int
) -> None:
    most = [f"learner-{n}" for n in range(live // 2 + 1)]
    for _ in range(INSISTS_AFTER - 1):
        assert all(screen.absurd(0, 1e4, name, live) for name in most)
    assert [screen.absurd(0, 1e4, name, live) for name in most] == [True] * (len(most) - 1) + [False]
    assert not any(screen.absurd(0, 1e4, name, live) for name in most)
    assert screen.absurd(0, 1e7, "wild", live + 1)


def test_a_merge_that_others_bring_about_forgets_who_was_refused(screen: NormScreen) -> None:
    for _ in range(10 * INSISTS_AFTER):
        assert screen.absurd(0, 1e4, "a", 1)
        screen.merged(0, 1.0)
