"""Answers are kept until their calls close, and sent again as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoupled_diloco.common.codec import decode_delta
from decoupled_diloco.common.errors import Malformed
from decoupled_diloco.common.fragments import Layout, TensorSpec, balanced_plan
from decoupled_diloco.common.wire import Call, Delta
from decoupled_diloco.learner.counters import Counts
from decoupled_diloco.learner.identity import Identity
from decoupled_diloco.learner.mailbox import Capture
from decoupled_diloco.learner.outbox import EncodedDelta, Outbox, encode_answer

LAYOUT = Layout((TensorSpec(name="w", shape=(150,), dtype="bfloat16"),))
FRAGMENT = balanced_plan(LAYOUT, 1).fragments[0]
ME = Identity(run="r", name="me", incarnation=7, layout=LAYOUT)


def call(slot: int = 1, attempt: int = 1, **more: Any) -> Call:
    return Call(run="r", epoch=1, slot=slot, t=0, fragment=0, version=3, attempt=attempt, **more)


def answered(*calls: Call, now: float = 0.0) -> Outbox:
    answers = Outbox(ME)
    for each in calls:
        answers.add_call(each)
        answers.keep(EncodedDelta(each, []))
        answers.sent(each.slot, each.attempt, now)
    return answers


def resent(answers: Outbox, now: float, *calls: Call) -> list[int]:
    return [answer.call.slot for answer in answers.update_open_calls(calls, now)]


def test_an_answer_that_is_not_listed_goes_out_again_after_a_second_and_then_less_often() -> None:
    answers = answered(call())
    assert resent(answers, 0.5, call()) == []
    assert resent(answers, 1.1, call()) == [1]
    answers.sent(1, 1, 1.1)
    assert resent(answers, 2.5, call()) == []
    assert resent(answers, 3.2, call()) == [1]


def test_an_answer_that_still_waits_to_be_sent_is_not_sent_twice() -> None:
    answers = Outbox(ME)
    answers.add_call(call())
    answers.keep(EncodedDelta(call(), []))
    assert resent(answers, 99.0, call()) == []


def test_an_answer_that_was_received_is_kept_but_not_sent_again() -> None:
    answers = answered(call())
    assert resent(answers, 9.0, call(received=("me",))) == []
    assert answers.unconfirmed == 0
    assert resent(answers, 19.0, call(received=("you",))) == [1]


def test_a_call_that_no_beat_lists_has_closed_and_its_answer_is_forgotten() -> None:
    answers = answered(call(1), call(2))
    assert answers.unconfirmed == 2
    assert resent(answers, 9.0, call(2)) == [2]
    assert not answers.keeps(1, 1)
    assert not answers.wanted(call(1))
    assert answers.unconfirmed == 1


def test_a_new_attempt_replaces_the_older_answer() -> None:
    answers = answered(call())
    answers.add_call(call(attempt=2))
    assert answers.wanted(call(attempt=2))
    assert not answers.wanted(call(attempt=1))
    assert resent(answers, 9.0, call(attempt=2)) == []
    assert not answers.keeps(1, 1)


def test_an_older_attempt_that_is_heard_late_changes_nothing() -> None:
    answers = answered(call(attempt=2))
    answers.add_call(call(attempt=1))
    assert answers.wanted(call(attempt=2))


def test_nothing_is_left_after_a_drop() -> None:
    answers = answered(call())
    answers.drop()
    assert not answers.calls
    assert not answers.keeps(1, 1)


def test_an_answer_measures_from_the_public_model_through_the_parameters_dtype() -> None:
    public = torch.zeros(FRAGMENT.length)
    public[:150] = torch.randn(150)
    theta = torch.full((FRAGMENT.length + 50,), float("nan"))
    theta[:150] = public[:150].bfloat16().float() - 0.5
    capture = Capture(call(), 3, public, theta, Counts(1, 10), Counts(4, 40), (), reusable=True)
    deltas = encode_answer(ME, FRAGMENT, "bf16", capture)
    assert [(d.tokens_from, d.tokens_to, d.steps_from, d.steps_to) for d in deltas] == [(10, 40, 1, 4)]
    assert isinstance(deltas[0], Delta)
    decoded = decode_delta("bf16", public, deltas[0].payload)
    assert torch.equal(decoded[:150], torch.full((150,), 0.5))
    assert not decoded[150:].any()


def test_an_answer_that_is_not_finite_is_not_made() -> None:
    theta = torch.zeros(FRAGMENT.length)
    theta[3] = float("nan")
    capture = Capture(call(), 3, torch.zeros(FRAGMENT.length), theta, Counts(), Counts(1, 1), (), reusable=True)
    with pytest.raises(Malformed, match="nonfinite"):
        encode_answer(ME, FRAGMENT, "int4", capture)
