"""Which claims the numbers support."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean

import pytest
from comparison_cells import OURS, PAIR, THEIRS, row
from decoupled_diloco.experiments.analysis import differences, interval
from decoupled_diloco.experiments.suites import Contrast


def test_the_interval_is_student_s() -> None:
    low, high = interval([1.0, 2.0, 3.0, 4.0])
    assert math.isclose((low + high) / 2, 2.5)
    assert math.isclose(high - 2.5, 3.182 * math.sqrt(5 / 3) / 2, rel_tol=1e-3)
    assert interval([1.0]) == (-math.inf, math.inf)
    low, high = interval([float(n % 2) for n in range(26)])
    assert math.isclose(high - low, 2 * 2.086 * math.sqrt(0.26 / 26)), "beyond 20 degrees of freedom a little too wide"


@pytest.mark.parametrize(
    ("losses", "within", "verdict"),
    [
        ([2.0, 2.0, 2.0], 0.01, "within +1.0%: shown"),
        ([2.01, 2.0, 2.05], 0.01, "within +1.0%: not shown"),
        ([2.20, 2.21, 2.22], 0.01, "more than +1.0%"),
        ([2.20, 2.21, 2.22], None, "worse"),
        ([1.90, 1.91, 1.92], None, "better"),
        ([1.90, 2.01, 2.12], None, "no difference shown"),
        ([2.0], 0.01, "nothing: one seed"),
        ([9.0], None, "nothing: one seed"),
    ],
)
def test_an_equality_is_claimed_only_where_the_interval_s_end_is_within_the_bound(
    losses: list[float], within: float | None, verdict: str
) -> None:
    judged = replace(PAIR, contrasts=(Contrast(cell="ours", against="theirs", within=within),))
    rows = [row(OURS, seed, loss) for seed, loss in enumerate(losses)]
    rows += [row(THEIRS, seed, 2.0) for seed in range(5)]
    (found,) = differences(judged, rows)
    assert found.verdict == verdict
    assert found.seeds == len(losses)
    assert math.isclose(found.mean, mean(losses) / 2 - 1, abs_tol=1e-12)


def test_seeds_are_paired() -> None:
    rows = [row(OURS, 1, 2.0), row(OURS, 2, 3.0), row(THEIRS, 2, 3.0), row(THEIRS, 3, 9.0)]
    (found,) = differences(PAIR, rows)
    assert (found.mean, found.seeds) == (0.0, 1)
