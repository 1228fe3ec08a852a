"""Ledger: the counters agree to the token."""

from __future__ import annotations

import json

import pytest
from decoupled_diloco.syncer.ledger import Ledger, TokenAccount

A, B = ("a", 1), ("b", 7)


def test_every_token_is_merged_pending_or_lost() -> None:
    ledger = Ledger([30, 10])
    ledger.report(A, 100)
    assert ledger.account("a") == TokenAccount(100, 0, 100, 0)
    ledger.merge(A, 0, 20, 60)  # [0, 20) was overwritten by an adoption
    assert ledger.pending(A, 0) == 40
    ledger.merge(A, 1, 0, 100)
    assert ledger.account("a") == TokenAccount(100, (30 * 40 + 10 * 100) // 40, 30 * 40 // 40, 100 - 55 - 30)


def test_an_interval_that_meets_a_merged_one_is_refused_and_changes_nothing() -> None:
    ledger = Ledger([1])
    ledger.report(A, 100)
    ledger.merge(A, 0, 0, 50)
    before = ledger.to_json()
    assert not ledger.accepts(A, 0, 49)
    with pytest.raises(ValueError, match="already merged"):
        ledger.merge(A, 0, 49, 80)
    assert ledger.to_json() == before
    assert ledger.accepts(A, 0, 50)


def test_counters_never_go_back() -> None:
    ledger = Ledger([1])
    ledger.report(A, 100)
    ledger.report(A, 40)
    assert ledger.reported(A) == 100


def test_what_is_pending_when_an_incarnation_ends_is_lost_and_names_keep_their_sums() -> None:
    ledger = Ledger([2, 3])
    for incarnation in range(1000):
        who = ("a", incarnation)
        ledger.report(who, 10)
        ledger.merge(who, 0, 0, 10)
        ledger.close(who)
    assert ledger.account("a") == TokenAccount(10_000, 4000, 0, 6000)
    assert len(ledger.to_json()["books"]) == 0
    ledger.close(("a", 5))  # again: nothing happens
    assert ledger.total().reported == 10_000


def test_the_books_survive_a_checkpoint() -> None:
    ledger = Ledger([5, 6])
    ledger.report(A, 70)
    ledger.merge(A, 1, 10, 50)
    ledger.report(B, 30)
    ledger.close(B)
    again = Ledger([5, 6])
    again.load_json(json.loads(json.dumps(ledger.to_json())))
    assert again.to_json() == ledger.to_json()
    assert again.total() == ledger.total()
    assert not again.accepts(A, 1, 49)


def test_nothing_stays_pending_once_all_books_are_closed() -> None:
    ledger = Ledger([7, 11, 13])
    for who, told in ((A, 101), (B, 57)):
        ledger.report(who, told)
        ledger.merge(who, 1, 3, 41)
    ledger.close_all()
    total = ledger.total()
    assert total.pending == 0
    assert total.reported == 158 == total.merged + total.lost
