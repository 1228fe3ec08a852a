"""Simulator settings: frozen and checked dataclasses. They import nothing heavy, so that `--help` is fast."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..common.config import CODECS, CodecName
from ..common.errors import SettingError
from ..common.wire import MAX_COUNT

MOST_LEARNERS, MOST_CHIPS, MOST_STEPS = 10_000, 10**9, 10**7
MOST_SECONDS = 1e6
RARE_SECONDS = 10 * 86_400.0
YEAR_SECONDS = 365.25 * 86_400.0
PUBLISHED_PARAMETERS = 5.03e9
"""The paper's 5B model, as its data-parallel figures imply it."""


@dataclass(frozen=True, kw_only=True)
class GoodputPlan:
    """Cluster for the goodput simulation."""

    chips: int = 1_200_000
    """Chips of the whole cluster."""
    learners: int = 8
    """Learners of the decoupled run, which share the chips, M."""
    simulated_steps: int = 0
    """Length of the simulated time, in inner steps. 0 = 5000, or ten days where sites fail or chips are scavenged."""
    seed: int = 0
    """Seed of the failures."""

    def __post_init__(self) -> None:
        for name in ("chips", "learners"):
            _more_than(self, name, 0, inclusive=False)
        for name in ("seed", "simulated_steps"):
            _more_than(self, name, 0, inclusive=True)
        _at_most(self, "chips", MOST_CHIPS)
        _at_most(self, "learners", MOST_LEARNERS)
        _at_most(self, "simulated_steps", MOST_STEPS)
        if self.learners > self.chips:
            raise SettingError(f"{self.learners} learners cannot share {self.chips} chips; a learner has at least one")

    def steps(self, model: FailureModel) -> int:
        """Inner steps to simulate, enough to include rare and daily events."""
        rare = model.site_failures_a_year or model.scavenged_share
        return self.simulated_steps or (max(100, int(RARE_SECONDS / model.step_seconds)) if rare else 5000)


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """Virtual cluster around the production round machine."""

    learners: int = 2
    """How many learners, M."""
    chips: int = 0
    """Chips that the learners share and that fail by the failure model. 0 = learners that step at their own pace."""
    step_seconds: float = 0.0
    """An inner step of the fastest learner, in virtual seconds. 0 = 1, and with --chips 5.5, as in simulate goodput."""
    slowest: float = 1.0
    """How many times as long the slowest learner's step takes; the others lie evenly between."""
    stragglers: int = 0
    """Number of slow learners, all equally slow; the others are fast. 0 = spread evenly."""
    late: int = 0
    """Additional learners that join later, as extra compute becomes available."""
    late_seconds: float = 0.0
    """When they join, in virtual seconds."""
    absent: float = 0.0
    """Share of the time in which a learner is absent; it returns as a new incarnation."""
    absence_seconds: float = 60.0
    """Mean length of one absence, in virtual seconds."""
    latency_seconds: float = 0.01
    """One-way latency between a learner and the syncer."""
    megabit: float = 0.0
    """Mbit/s of a learner's link, in each direction. 0 = no limit."""
    cost_only: bool = False
    """No model and no text: only counters and sizes."""
    params: float = 1e9
    """Parameters of the model with --cost-only."""

    def __post_init__(self) -> None:
        for name in ("learners", "absence_seconds", "params"):
            _more_than(self, name, 0.0, inclusive=False)
        for name in ("chips", "step_seconds", "absent", "latency_seconds", "megabit", "stragglers", "late",
                     "late_seconds"):  # fmt: skip
            _more_than(self, name, 0.0, inclusive=True)
        _more_than(self, "slowest", 1.0, inclusive=True)
        if self.chips and self.learners > self.chips:
            raise SettingError(f"{self.learners} learners cannot share {self.chips} chips; a learner has at least one")
        if self.absent >= 1:
            raise SettingError(f"--absent must be below 1, not {self.absent:g}: learners must be present at times")
        if self.stragglers > self.learners:
            raise SettingError(f"--stragglers {self.stragglers} are more than there are learners, {self.learners}")
        _at_most(self, "learners", MOST_LEARNERS)
        _at_most(self, "late", MOST_LEARNERS)
        _at_most(self, "chips", MOST_CHIPS)
        for name in ("step_seconds", "absence_seconds", "latency_seconds", "slowest", "late_seconds"):
            _at_most(self, name, MOST_SECONDS)
        if self.params >= MAX_COUNT:
            raise SettingError(f"--params must be below 2^53, not {self.params:g}")
        if self.params != ClusterPlan.params and not self.cost_only:
            raise SettingError(
                "--params is for --cost-only; a model that is trained is as large as --layers and --width say"
            )

    def step(self, chips_step_seconds: float) -> float:
        """Virtual seconds of the fastest learner's inner step; the argument is the failure model's step time."""
        return self.step_seconds or (chips_step_seconds if self.chips else 1.0)


@dataclass(frozen=True, kw_only=True)
class FailureModel:
    """Failures and returns of chips. All seconds are virtual."""

    mtbi_years: float = 1.0
    """Mean time between interruptions of one chip, in years (paper: 1)."""
    slice_chips: int = 256
    """Chips in a slice; they fail and return together."""
    step_seconds: float = 5.5
    """An inner step on chips of mean speed."""
    downscale_seconds: float = 15.5
    """Pause in which a group changes to fewer slices."""
    upscale_seconds: float = 10.0
    """Pause in which a group takes slices back."""
    restart_seconds: float = 81.0
    """Without elasticity: from a failure until all slices step again."""
    return_seconds: float = 1100.0
    """Scale of the time until a failed slice returns."""
    return_shape: float = 0.6
    """Weibull shape of that time: 1 = exponential, below 1 = some are away for very long."""
    return_power: float = 1.5
    """Its exponent: the distribution is (1 - exp(-(x / scale)^shape))^power."""
    speed_spread: float = 0.0
    """Relative standard deviation of a chip's constant speed; a group steps at the pace of its slowest chip."""
    slowdowns_a_chip_year: float = 0.0
    """Transient slowdowns of each chip, a year."""
    slowdown_seconds: float = 300.0
    """Mean length of one."""
    slowdown_factor: float = 1.5
    """Factor on the step time of the whole group during a slowdown."""
    sites: int = 1
    """Sites over which slices, or learners, are spread evenly."""
    site_failures_a_year: float = 0.0
    """Failures of a whole site, a year and site."""
    site_seconds: float = 3600.0
    """Mean length of one."""
    scavenged_share: float = 0.0
    """Share of the slices, or learners, that are available only at night."""
    night_hours: float = 12.0
    """Hours per day in which they are available."""

    def __post_init__(self) -> None:
        for name in ("mtbi_years", "slice_chips", "step_seconds", "return_seconds", "return_shape", "return_power",
                     "sites", "slowdown_factor", "slowdown_seconds", "site_seconds"):  # fmt: skip
            _more_than(self, name, 0.0, inclusive=False)
        for name in ("downscale_seconds", "upscale_seconds", "restart_seconds", "speed_spread",
                     "slowdowns_a_chip_year", "site_failures_a_year", "scavenged_share", "night_hours"):  # fmt: skip
            _more_than(self, name, 0.0, inclusive=True)
        _at_most(self, "scavenged_share", 1)
        _at_most(self, "night_hours", 24)
        for name, least in (("slowdown_factor", 1.0), ("return_shape", 0.05), ("return_power", 0.05),
                            ("mtbi_years", 1e-6), ("step_seconds", 1e-3)):  # fmt: skip
            _more_than(self, name, least, inclusive=True)
        for name in ("step_seconds", "downscale_seconds", "upscale_seconds", "restart_seconds", "return_seconds",
                     "slowdown_seconds", "site_seconds", "slowdowns_a_chip_year", "site_failures_a_year"):  # fmt: skip
            _at_most(self, name, MOST_SECONDS)
        for name, most in (("slowdown_factor", 1000.0), ("speed_spread", 10.0), ("sites", MOST_LEARNERS)):
            _at_most(self, name, most)

    def check_slices(self, chips: int, learners: int) -> None:
        """SettingError if a learner's share of the chips is not even one slice."""
        if self.slice_chips > chips / learners:
            raise SettingError(
                f"--slice-chips {self.slice_chips} is more than each of {learners} learners has of {chips} chips; "
                "lower --slice-chips or --learners, or raise --chips"
            )


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """Model, step time, sites and target utilization for the bandwidth model."""

    params: float = PUBLISHED_PARAMETERS
    """Parameters of the model, N."""
    step_seconds: float = 1.0
    """Length of an inner step, T."""
    sites: int = 2
    """Sites connected by the network, D; one learner each in `this system`."""
    codec_up: CodecName = "int4"
    """How progress travels to the syncer."""
    codec_down: CodecName = "int4"
    """How merged fragments travel back."""
    sync_every: int = 24
    """H, in steps: the whole model is synchronized once every H steps."""
    fragments: int = 0
    """P, number of fragments of the model. 0 = same as sync_every."""
    overlap: int = 2
    """tau, in steps: how long a fragment's transfer may overlap with computation."""
    utilization: float = 0.95
    """Share of the time in which chips compute, below 1."""

    def __post_init__(self) -> None:
        for name in ("params", "step_seconds", "sites", "sync_every", "overlap"):
            _more_than(self, name, 0, inclusive=False)
            _at_most(self, name, MAX_COUNT)
        if not 0 < self.utilization < 1:
            raise SettingError(f"--utilization must lie between 0 and 1, both excluded, not {self.utilization}")
        if not 0 <= self.fragments <= self.params:
            raise SettingError(f"--fragments {self.fragments} is negative, or more than the model has parameters")
        if self.parts > 1 and self.overlap >= self.parts:
            raise SettingError(f"--overlap {self.overlap} must be smaller than the {self.parts} fragments")
        for codec in (self.codec_up, self.codec_down):
            if codec not in CODECS:
                raise SettingError(f"no codec is named {codec!r}; there are {', '.join(CODECS)}")

    @property
    def parts(self) -> int:
        """P."""
        return self.fragments or self.sync_every

    @property
    def exposed_seconds(self) -> float:
        """e = T (1 / utilization - 1): how long a step may wait for the network."""
        return self.step_seconds * (1 / self.utilization - 1)


def _more_than(settings: object, name: str, low: float, *, inclusive: bool) -> None:
    value = getattr(settings, name)
    fine = value >= low if inclusive else value > low
    option = "--" + name.replace("_", "-")
    if not math.isfinite(value):
        raise SettingError(f"{option} must be a finite number, not {value}")
    if not fine:
        raise SettingError(f"{option} must be {'at least' if inclusive else 'more than'} {low:g}, not {value}")


def _at_most(settings: object, name: str, high: float) -> None:
    value = getattr(settings, name)
    if value > high:
        raise SettingError(f"--{name.replace('_', '-')} must be at most {high:,g}, not {value:,g}")
