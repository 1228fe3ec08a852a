"""A learner follows the public model: updates, gaps and resets."""

from __future__ import annotations

from dataclasses import replace

import torch
from decoupled_diloco.common.wire import (
    Alive,
    Call,
    Delta,
    Fetch,
    Hello,
    Message,
    Update,
)
from link_trainer import WIDTH, Trainer, syncer_at, talk_of, trainer, vectors
from scripted_syncer import ScriptedSyncer
from waiting import wait_for


def test_an_update_is_adopted_at_the_next_step_boundary_and_not_before(syncer: ScriptedSyncer, me: Trainer) -> None:
    new = syncer.merge(0, vectors(8.0)[0])
    me.gets(0, 2)
    assert (me.model.wide == 5).all()
    me.step()
    assert torch.equal(me.model.wide.detach().view(-1), new[: WIDTH * 300])
    assert me.session.versions == (2, 1)
    wait_for(lambda: syncer.all_of(Alive)[-1].versions == (2, 1), "the learner reports what it adopted")


def test_a_lost_chunk_of_an_update_is_repaired(syncer: ScriptedSyncer, me: Trainer) -> None:
    lost: list[Message] = []

    def lose_second(message: Message) -> bool:
        if isinstance(message, Update) and message.chunk == 1 and not lost:
            lost.append(message)
            return True
        return False

    syncer.drops = lose_second
    syncer.merge(0, vectors(8.0)[0])
    me.gets(0, 2)
    assert [(f.what, f.version, f.chunks) for f in syncer.all_of(Fetch)[-1:]] == [("update", 2, (1,))]


def test_a_gap_of_several_versions_is_healed_by_a_keyframe(syncer: ScriptedSyncer, me: Trainer) -> None:
    syncer.drops = lambda message: isinstance(message, Update)
    for value in (6.0, 7.0, 8.0):
        syncer.merge(1, vectors(value)[1])
    me.gets(1, 4)
    me.step()
    assert (me.model.narrow == 8).all()
    assert syncer.all_of(Fetch)[-1].what == "keyframe"


def test_an_update_with_another_digest_is_never_adopted(syncer: ScriptedSyncer, me: Trainer) -> None:
    syncer.drops = lambda message: isinstance(message, Update) and message.digest != "0" * 64
    syncer.merge(1, vectors(6.0)[1])
    syncer.say(replace(syncer.last[1][0], digest="0" * 64))
    me.gets(1, 2)
    assert talk_of(me.session).rejected["digest"] == 1
    me.step()
    assert (me.model.narrow == 6).all()


def test_messages_under_a_lower_epoch_are_ignored(syncer: ScriptedSyncer, me: Trainer) -> None:
    syncer.new_epoch(5, versions=9)
    wait_for(lambda: me.session._mailbox._arrivals, "the learner has gone over to epoch 5")
    me.step()
    old = Call(run="r", epoch=4, slot=70, t=0, fragment=1, version=9, attempt=1)
    syncer.say(old)
    syncer.call(1, slot=3)
    me.hears_call(3)
    assert 70 not in [call.slot for call in me.session._mailbox._calls]


def test_under_a_new_epoch_the_learner_says_hello_again_and_takes_the_whole_model(
    syncer: ScriptedSyncer, me: Trainer
) -> None:
    me.step()
    syncer.call(1, slot=0)
    me.hears_call(0)
    me.step()
    syncer.delta(slot=0, name="me")
    with syncer._lock:
        syncer.put(vectors(2.0))
        syncer.new_epoch(3, versions=12)
        heard = len(syncer.all_of(Hello))
    me.gets(0, 12)
    assert len(syncer.all_of(Hello)) == heard + 1
    assert len({hello.incarnation for hello in syncer.all_of(Hello)}) == 1
    me.step()
    assert (me.model.wide == 2).all()
    assert me.session.versions == (12, 12)
    syncer.call(1, slot=0)
    me.hears_call(0)
    me.step()
    answer = syncer.wait_for(Delta, slot=0, epoch=3)[0]
    assert (answer.base_version, answer.steps_from, answer.steps_to) == (12, 3, 4)


def test_a_reset_takes_the_whole_model_at_once_and_drops_the_answers(syncer: ScriptedSyncer, me: Trainer) -> None:
    syncer.call(1, slot=0)
    me.hears_call(0)
    me.step()
    syncer.delta(slot=0, name="me")
    syncer.tell(syncer.all_of(Hello)[0], "reset", reason="three rejected answers")
    wait_for(lambda: me.session._mailbox._reset, "the whole model waits")
    me.step()
    assert (me.model.wide == 5).all()
    assert (me.model.narrow == 5).all()
    assert not talk_of(me.session).outbox._kept


def test_a_rebase_keeps_a_contributors_steps_since_its_capture(broker: str) -> None:
    with syncer_at(broker, run="rebased", adopt="rebase") as syncer:
        me = trainer(broker, run="rebased")
        syncer.call(1, slot=0)
        me.hears_call(0)
        me.step()
        first, _ = syncer.delta(slot=0, name="me")
        me.step()
        me.step()
        syncer.merge(1, vectors(20.0)[1], [("me", me.session.incarnation, first.steps_to, first.tokens_to)])
        syncer.close_call(0)
        me.gets(1, 2)
        me.step()
        assert (me.model.narrow == 23).all()
        syncer.call(1, slot=1)
        me.hears_call(1)
        me.step()
        second, delta = syncer.delta(slot=1, name="me")
        me.session.close("stopped")
        assert (second.base_version, second.steps_from, second.steps_to) == (2, 1, 5)
        assert (delta[:40] == -4).all()
