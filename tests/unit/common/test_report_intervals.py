"""Reporting intervals of a silence."""

from __future__ import annotations

import itertools

from decoupled_diloco.common.report_intervals import FIRST_SECONDS, LONGEST_SECONDS, Repeats, Silence


def said(silence: Silence, until: int) -> list[int]:
    """The whole seconds of a silence at which it is said."""
    return [second for second in range(until) if silence.report_due(float(second))]


def test_a_silence_is_said_within_ten_seconds_then_at_growing_intervals_and_its_end_once() -> None:
    silence = Silence()
    assert FIRST_SECONDS < 10
    assert said(silence, 100) == [8, 16, 32, 64]
    assert silence.end()
    assert not silence.end()
    assert said(silence, 20) == [8, 16], "the next one begins anew"


def test_a_short_silence_is_not_said_nor_its_end() -> None:
    silence = Silence()
    assert said(silence, 8) == []
    assert not silence.end()


def test_a_very_long_silence_is_still_said_from_time_to_time() -> None:
    times = said(Silence(), 20_000)
    assert all(later - sooner <= LONGEST_SECONDS for sooner, later in itertools.pairwise(times))
    assert len(times) < 45


def test_what_continues_is_reported_at_once_then_after_pauses_that_double_up_to_the_longest() -> None:
    repeats = Repeats(1.0, 16.0)
    told = [t / 4 for t in range(4 * 100) if repeats.due(t / 4)]
    assert told == [0, 1, 3, 7, 15, 31, 47, 63, 79, 95]


def test_what_was_absent_for_a_whole_pause_is_reported_as_new() -> None:
    repeats = Repeats(1.0)
    assert [t for t in range(100) if repeats.due(float(t))] == [0, 1, 3, 7, 15, 31, 63]
    assert [t for t in range(150, 300) if repeats.due(float(t))] == [150, 278], "the pause goes on"
    assert [t for t in range(2000, 2010) if repeats.due(float(t))] == [2000, 2001, 2003, 2007]
