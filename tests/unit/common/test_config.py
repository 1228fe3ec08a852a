"""Settings are checked when they are made, and again when they arrive."""

from __future__ import annotations

from typing import Any

import pytest
from decoupled_diloco.common.config import (
    MOMENTUM_ROUNDS,
    BrokerConfig,
    LearnerConfig,
    RunSettings,
    TaskSettings,
    check_schedule,
)
from decoupled_diloco.common.errors import Malformed, SettingError


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 0}, "--steps must be greater than 0"),
        ({"steps": -5}, "--steps"),
        ({"quorum": 0}, "--quorum must be greater than 0"),
        ({"sync_every": 0}, "--sync-every"),
        ({"overlap": 0}, "--overlap"),
        ({"grace_seconds": -1.0}, "--grace-seconds must lie between 0"),
        ({"gamma": 1.0}, "--gamma"),
        ({"outer_lr": 0.0}, "--outer-lr"),
        ({"outer_momentum": 1.0}, "--outer-momentum"),
        ({"codec_up": "int2"}, "--codec-up must be one of f32, bf16, int8, int4"),
        ({"adopt": "keep"}, "--adopt must be one of"),
        ({"run": "Läufe"}, "must match"),
        ({"run": "a/b"}, "must match"),
        ({"fragments": 30, "sync_every": 24}, "--fragments 30 is more than --sync-every 24"),
        ({"fragments": 1, "overlap": 2}, "--fragments 1 needs --overlap 1"),
        ({"fragments": 3, "overlap": 3}, "--overlap 3 must be smaller than --fragments 3"),
        ({"grace_seconds": float("nan")}, "--grace-seconds"),
        ({"outer_lr": float("inf")}, "--outer-lr"),
    ],
)
def test_a_setting_out_of_its_range_is_one_sentence_that_names_its_option(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said.replace("(", r"\(")):
        RunSettings(**changes)


def test_settings_come_through_the_wire_as_they_were_and_nothing_else_does() -> None:
    settings = RunSettings(run="r", steps=7, outer_momentum=0.5)
    assert RunSettings.from_map(settings.to_map()) == settings
    assert TaskSettings.from_map(TaskSettings(width=64).to_map()) == TaskSettings(width=64)
    whole = settings.to_map()
    for wrong in (
        {k: v for k, v in whole.items() if k != "steps"},
        whole | {"more": 1},
        whole | {"steps": "7"},
        whole | {"steps": True},
        whole | {"steps": 0},
        whole | {"gamma": "0.5"},
    ):
        with pytest.raises(Malformed, match="settings"):
            RunSettings.from_map(wrong)


def test_a_whole_number_that_arrives_for_a_fraction_is_taken_as_one() -> None:
    again = RunSettings.from_map(RunSettings().to_map() | {"grace_seconds": 3})
    assert isinstance(again.grace_seconds, float)


def test_a_schedule_in_which_some_fragment_would_never_be_synchronised_is_refused() -> None:
    check_schedule(24, 24, 2)
    check_schedule(24, 1, 1)
    with pytest.raises(SettingError):
        check_schedule(3, 4, 1)


@pytest.mark.parametrize("rounds", [10, 100, MOMENTUM_ROUNDS])
def test_momentum_in_a_run_that_is_no_longer_than_those_compared_is_allowed_and_advised_against(rounds: int) -> None:
    assert not RunSettings(steps=24 * rounds, sync_every=24).advice()
    (sentence,) = RunSettings(steps=24 * rounds, sync_every=24, outer_momentum=0.9).advice()
    assert f"--outer-momentum 0.9 with {rounds} rounds" in sentence
    assert f"up to {MOMENTUM_ROUNDS} rounds" in sentence


def test_of_momentum_in_longer_runs_nothing_is_known_or_said() -> None:
    assert not RunSettings(steps=24 * (MOMENTUM_ROUNDS + 1), sync_every=24, outer_momentum=0.9).advice()


def test_a_broker_beyond_loopback_must_be_asked_for_in_so_many_words() -> None:
    with pytest.raises(SettingError, match="--insecure"):
        BrokerConfig(host="0.0.0.0")  # noqa: S104 it is refused
    assert BrokerConfig(host="0.0.0.0", insecure=True).insecure  # noqa: S104 nothing listens here


@pytest.mark.parametrize("name", ["", "A", "a b", "-a", "a" * 41, "ü", "a\n", "a/b", "a:b", "a*"])
def test_a_learner_s_name_cannot_be_anything_that_could_pass_for_another_key_or_line(name: str) -> None:
    with pytest.raises(SettingError, match="--name"):
        LearnerConfig(broker="tcp://127.0.0.1:5550", name=name)
