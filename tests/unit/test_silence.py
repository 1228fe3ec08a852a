"""When a silence is said."""

from __future__ import annotations

import itertools

from decoupled_diloco.common.silence import FIRST_SECONDS, LONGEST_SECONDS, Silence


def said(silence: Silence, until: int) -> list[int]:
    """The whole seconds of a silence at which it is said."""
    return [second for second in range(until) if silence.look(float(second))]


def test_a_silence_is_said_within_ten_seconds_then_ever_more_seldom_and_its_end_once() -> None:
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
