"""Repeated rejections, and when their sender is notified."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from decoupled_diloco.common.log import get_logger
from decoupled_diloco.common.registry import Registry
from decoupled_diloco.syncer.rejections import (
    LONGEST_NOTICE_SECONDS,
    NOTICE_SECONDS,
    REPEATED,
    SENDERS,
    Rejections,
    describe_rejection,
    sender_from_topic,
)
from decoupled_diloco.syncer.telemetry import Telemetry
from logged import logged

WHO = ("a", 1)


def test_the_third_in_a_row_is_reported_to_its_sender_and_then_at_growing_intervals() -> None:
    rejections = Rejections()
    told = [t for t in range(4000) if rejections.rejected(WHO, "alive", "field: loss", float(t))]
    pauses = [later - sooner for sooner, later in pairwise(told)]
    assert told[0] == REPEATED - 1
    assert pauses[0] == NOTICE_SECONDS
    assert pauses == [min(LONGEST_NOTICE_SECONDS, NOTICE_SECONDS * 2**k) for k in range(len(pauses))]


def test_a_flood_is_reported_as_seldom_as_single_ones() -> None:
    rejections = Rejections()
    told = [t / 1000 for t in range(60_000) if rejections.rejected(WHO, "delta", "size", t / 1000)]
    assert told == [2.0, 12.0, 32.0]


def test_a_complaint_that_comes_all_the_time_is_logged_at_growing_intervals_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with logged(tmp_path) as events:
        log = get_logger("syncer")
        teller, now = Telemetry(Registry(None, "it", log), log, "it"), 1000.0
        monkeypatch.setattr("time.monotonic", lambda: now)
        for _ in range(10 * 60):  # answers of steps that take milliseconds
            teller.reject("a", "late", message="delta")
            now += 0.125
        times = [row["times"] for row in events("rejected")]
    assert times == [1, 9, 25, 57, 121, 249, 505]
    assert teller.rejection_counts() == {"a:late": 600}


def test_one_that_is_taken_ends_the_row_of_its_kind_and_of_no_other() -> None:
    rejections = Rejections()
    for t in range(10):
        rejections.rejected(WHO, "delta", "norm: 3", float(t))
        assert not rejections.rejected(WHO, "fetch", "field", float(t)) or t < REPEATED
        rejections.accepted(WHO, "fetch")
    assert rejections.repeated(WHO) == "delta norm: 3 (10 in a row)"
    assert rejections.of(WHO, "fetch") is None
    rejections.accepted(WHO, "delta")
    assert rejections.repeated(WHO) == ""
    assert not rejections.rejected(WHO, "delta", "late", 100.0), "it begins anew"


def test_invented_senders_cost_bounded_memory() -> None:
    rejections = Rejections()
    for number in range(3 * SENDERS):
        rejections.rejected((f"n{number}", 1), "delta", "size", 0.0)
    assert len(rejections._senders) == SENDERS


@pytest.mark.parametrize(
    ("reason", "detail", "said"),
    [
        ("norm", "norm: 3, too long", "norm: 3, too long"),
        ("checksum", "checksum", "checksum"),
        ("late", "late", "late: its call was closed when it arrived"),
        ("unreported", "", "unreported: it covers more tokens than its sender has reported"),
    ],
)
def test_a_reason_is_reported_with_what_is_known_beside_it(reason: str, detail: str, said: str) -> None:
    assert describe_rejection(reason, detail) == said


@pytest.mark.parametrize(
    ("topic", "sender"),
    [
        (b"run/alive/a/", ("a", "alive")),
        (b"run/delta/3/a-b/", ("a-b", "delta")),
        (b"run/other/a/", ("a", "?")),
        (b"run/alive/", ("?", "alive")),
        (b"run/alive/\x1b[31m/", ("?", "alive")),
        (b"\xff", ("?", "?")),
        (b"", ("?", "?")),
    ],
)
def test_the_topic_names_the_sender_of_what_cannot_be_read(topic: bytes, sender: tuple[str, str]) -> None:
    assert sender_from_topic(topic) == sender
