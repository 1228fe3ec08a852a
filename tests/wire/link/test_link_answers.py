"""A learner answers calls: what is captured, encoded and sent, and when."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch
from decoupled_diloco.common.wire import (
    Alive,
    Delta,
    Update,
    chunk_count,
)
from link_trainer import WIDTH, Trainer, talk_of, vectors
from scripted_syncer import ScriptedSyncer
from waiting import wait_for


def test_an_answer_covers_what_was_done_since_the_adoption_and_follows_its_report(
    syncer: ScriptedSyncer, me: Trainer
) -> None:
    me.step()
    syncer.call(0, slot=0)
    me.hears_call(0)
    me.step()
    first, delta = syncer.delta(slot=0, name="me")
    assert first.chunks == chunk_count(first.size) == 2
    assert (first.base_version, first.steps_from, first.steps_to) == (1, 0, 2)
    assert (first.tokens_from, first.tokens_to) == (0, 20)
    assert delta.dtype == torch.float64
    assert (delta[: WIDTH * 300] == -2).all()
    assert syncer.wait_for(Alive, tokens=20), "the tokens that an answer covers are reported"


def test_no_answer_is_given_to_a_call_right_after_an_adoption(syncer: ScriptedSyncer, me: Trainer) -> None:
    me.step()
    syncer.merge(1, vectors(9.0)[1])
    me.gets(1, 2)
    syncer.call(1, slot=0)
    me.hears_call(0)
    me.step()
    assert (me.model.narrow == 9).all()
    assert not me.session._mailbox._captures
    me.step()
    first, delta = syncer.delta(slot=0, name="me")
    assert (first.base_version, first.steps_from, first.steps_to) == (2, 2, 3)
    assert (delta[:40] == -1).all()


def test_the_same_bytes_are_sent_again_until_the_syncer_lists_the_answer(syncer: ScriptedSyncer, me: Trainer) -> None:
    syncer.call(1, slot=0)
    me.hears_call(0)
    me.step()
    syncer.delta(slot=0, name="me")
    me.step()
    first, again = syncer.wait_for(Delta, 2, slot=0)[:2]
    assert replace(again, sequence=0, payload=b"") == replace(first, sequence=0, payload=b"")
    assert bytes(again.payload) == bytes(first.payload)
    syncer.confirm(0, "me")
    wait_for(lambda: talk_of(me.session).outbox.unconfirmed == 0, "the learner knows that it was heard")
    syncer.close_call(0)
    wait_for(lambda: not talk_of(me.session).outbox._kept, "the kept answer is forgotten")


def test_a_new_attempt_is_answered_with_a_new_capture(syncer: ScriptedSyncer, me: Trainer) -> None:
    syncer.call(1, slot=0)
    me.hears_call(0)
    me.step()
    syncer.delta(slot=0, name="me")
    syncer.call(1, slot=0, attempt=2)
    me.hears_call(0, attempt=2)
    me.step()
    first, delta = syncer.delta(slot=0, attempt=2, name="me")
    assert (first.steps_from, first.steps_to) == (0, 2)
    assert (delta[:40] == -2).all()


def test_a_contributor_adopts_what_its_work_went_into_before_it_answers_again(
    syncer: ScriptedSyncer, me: Trainer
) -> None:
    syncer.call(1, slot=0)
    me.hears_call(0)
    me.step()
    syncer.delta(slot=0, name="me")
    syncer.drops = lambda message: isinstance(message, Update)
    syncer.merge(1, vectors(6.0)[1], [("me", me.session.incarnation, 1, 10)])
    syncer.close_call(0)
    syncer.call(1, slot=1, contributors=(("me", me.session.incarnation),))
    me.hears_call(1)
    me.step()
    me.step()
    assert not syncer.all_of(Delta, slot=1)
    syncer.drops = lambda _: False
    me.gets(1, 2)
    me.step()
    me.step()
    first, _ = syncer.delta(slot=1, name="me")
    assert (first.base_version, first.steps_from, first.steps_to) == (2, 4, 5)


def test_a_learner_that_did_not_contribute_may_answer_from_an_older_anchor(syncer: ScriptedSyncer, me: Trainer) -> None:
    syncer.drops = lambda message: isinstance(message, Update)
    syncer.merge(1, vectors(6.0)[1], [("you", 1, 1, 10)])
    syncer.call(1, slot=0, contributors=(("you", 1),))
    me.hears_call(0)
    me.step()
    first, _ = syncer.delta(slot=0, name="me")
    assert first.base_version == 1


def test_what_is_sent_is_the_model_as_it_was_at_its_capture(broker: str, syncer: ScriptedSyncer, me: Trainer) -> None:
    """The link encodes only after the model has trained on."""
    talk = talk_of(me.session)
    gate, encode = threading.Event(), talk._answer

    def late(capture: Any) -> None:
        assert gate.wait(30)
        encode(capture)

    talk._answer = late  # type: ignore[method-assign]
    syncer.call(0, slot=0)
    me.hears_call(0)
    me.step()
    for _ in range(3):
        me.step()
    gate.set()
    first, delta = syncer.delta(slot=0, name="me")
    assert first.steps_to == 1
    assert (delta[: WIDTH * 300] == -1).all()
