"""Failure model: failures and returns of one group of chips that steps together, in virtual time (arXiv 2604.21428,
section 3.3).

A group is the unit that fails and resizes: the whole cluster of a data-parallel run, or one learner of a decoupled run.
Chips fail as a Poisson process of rate chips / MTBI (equation 4); a failed chip takes its whole slice down; the slice
returns after an exponentiated-Weibull time. Losing slices and taking them back cost a fixed pause each. The paper
names these mechanisms but not their parameters; the defaults here are fitted to its Table 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from .settings import YEAR_SECONDS, FailureModel

DAY_SECONDS = 86_400.0


@dataclass(frozen=True)
class Stretch:
    """Interval in which the group made useful steps with `share` of its slices."""

    start: float
    end: float
    share: float
    useful_seconds: float
    """Time that chips of mean speed would have needed: waiting for slow chips is not useful."""


@dataclass(frozen=True)
class Absence:
    """Interval in which a share of a group's slices is absent: its site is down, or it is daytime."""

    start: float
    end: float
    share: float


class ChipGroup:
    """Chips that step together. Memory is O(return time / step time), whatever the number of chips."""

    def __init__(
        self,
        model: FailureModel,
        chips: float,
        rng: np.random.Generator,
        absences: Sequence[Absence] = (),
        *,
        elastic: bool = True,
    ) -> None:
        self.model, self._rng, self._elastic = model, rng, elastic
        self.slices = max(1, round(chips / model.slice_chips))
        self._step = model.step_seconds * _slowest(model, chips, rng)
        self._slice_rate = model.slice_chips / (model.mtbi_years * YEAR_SECONDS)
        self._failed = 0
        self._back: dict[int, int] = {}
        """Step-long interval -> slices that return in it."""
        self._next_back = 0
        self._absences = sorted(absences, key=lambda a: a.start)
        self._slow_until = -1.0
        self._slow_rate = model.slowdowns_a_chip_year * chips / YEAR_SECONDS

    def life(self, seconds: float) -> Iterator[Stretch]:
        """Useful stretches in order of time, until `seconds`.

        Between two steps the group removes failed or absent slices and takes returned ones back, in one pause of the
        longer of the two lengths. Nothing fails during a pause.
        """
        t, model, present, failed = 0.0, self.model, self._present(0.0), 0
        while t < seconds:
            before, present = present, self._present(t)
            returned = self._returned(t)
            pause = self._pause(shrinks=failed > 0 or present < before, grows=returned > 0 or present > before)
            since, t = t, t + pause
            if t >= seconds:
                return
            failed, alive = 0, present - self._failed
            if alive <= 0 or (not self._elastic and present < self.slices):
                t = max(math.nextafter(t, math.inf), self._next_change(since))
                continue
            length = self._step * (model.slowdown_factor if self._slow(t) else 1.0)
            failed = self._fail(t, length, present)
            yield Stretch(t, t + length, alive / self.slices, model.step_seconds)
            t += length

    def _pause(self, *, shrinks: bool, grows: bool) -> float:
        model = self.model
        if not self._elastic:
            return model.restart_seconds if shrinks or grows else 0.0
        return max(model.downscale_seconds if shrinks else 0.0, model.upscale_seconds if grows else 0.0)

    def _fail(self, t: float, seconds: float, present: int) -> int:
        """Number of slices that fail within `seconds`; each returns later. A group without elasticity has spares."""
        alive = present - self._failed
        mean = alive * self._slice_rate * seconds
        count = min(alive, int(self._rng.poisson(mean))) if alive > 0 else 0
        if count and self._elastic:
            self._failed += count
            for away in _returns(self.model, self._rng, count):
                slot = int((t + away) / self.model.step_seconds)
                self._back[slot] = self._back.get(slot, 0) + 1
        return count

    def _returned(self, t: float) -> int:
        """Number of slices that returned up to `t`."""
        until = int(t / self.model.step_seconds)
        count = sum(self._back.pop(slot, 0) for slot in range(self._next_back, until))
        self._next_back = max(self._next_back, until)
        self._failed -= count
        return count

    def _present(self, t: float) -> int:
        share = sum(a.share for a in self._absences if a.start <= t < a.end)
        return self.slices - min(self.slices, round(self.slices * share))

    def _next_change(self, t: float) -> float:
        """Earliest time after `t` at which slices may return: the next return, or the end of an absence."""
        times = [(min(self._back) + 1) * self.model.step_seconds] if self._back else []
        times += [a.end for a in self._absences if a.start <= t < a.end]
        return min(times, default=math.inf)

    def _slow(self, t: float) -> bool:
        if self._slow_rate and self._rng.random() < -math.expm1(-self._slow_rate * self._step):
            self._slow_until = max(self._slow_until, t + float(self._rng.exponential(self.model.slowdown_seconds)))
        return t < self._slow_until


def site_outages(model: FailureModel, site: int, seconds: float, seed: int) -> list[tuple[float, float]]:
    """Outages of site number `site` until `seconds`: (start, end) in order."""
    if not model.site_failures_a_year:
        return []
    rng, t = np.random.default_rng((seed, 1, site)), 0.0
    found: list[tuple[float, float]] = []
    while True:
        t += float(rng.exponential(YEAR_SECONDS / model.site_failures_a_year))
        if t >= seconds:
            return found
        end = t + float(rng.exponential(model.site_seconds))
        found.append((t, end))
        t = end


def days(model: FailureModel, seconds: float) -> list[tuple[float, float]]:
    """Absences of scavenged compute: the first part of each day of virtual time."""
    if not model.scavenged_share or model.night_hours >= 24:
        return []
    length = DAY_SECONDS * (1 - model.night_hours / 24)
    return [(n * DAY_SECONDS, n * DAY_SECONDS + length) for n in range(math.ceil(seconds / DAY_SECONDS))]


def _returns(model: FailureModel, rng: np.random.Generator, count: int) -> np.ndarray:
    """Seconds until each of `count` slices returns: f64, shape [count]."""
    below = 1.0 - rng.random(count) ** (1.0 / model.return_power)
    return np.asarray(model.return_seconds * (-np.log(np.maximum(below, 1e-300))) ** (1.0 / model.return_shape))


def _slowest(model: FailureModel, chips: float, rng: np.random.Generator) -> float:
    """Permanent slowdown of the slowest of `chips` relative to a mean chip: one draw of the maximum."""
    if not model.speed_spread:
        return 1.0
    quantile = min(1.0 - 1e-15, float(rng.random()) ** (1.0 / max(1.0, chips)))
    return max(1.0, 1.0 + model.speed_spread * NormalDist().inv_cdf(quantile))
