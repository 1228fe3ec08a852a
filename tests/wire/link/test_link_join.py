"""A learner joins: the model it gets, and the reasons for which it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoupled_diloco.common.errors import PeerLost, Refused
from decoupled_diloco.common.wire import (
    Alive,
    Fetch,
    Goodbye,
    Hello,
    Keyframe,
    Message,
    Seed,
)
from decoupled_diloco.learner import session
from decoupled_diloco.learner.join_wait import await_joined
from decoupled_diloco.learner.link import Link
from decoupled_diloco.learner.mailbox import Joined
from link_trainer import Trainer, in_thread, settings, trainer, vectors
from scripted_syncer import ScriptedSyncer
from waiting import wait_for


def test_a_joiner_holds_the_global_model_and_the_static_values_before_its_first_step(
    syncer: ScriptedSyncer, me: Trainer
) -> None:
    assert (me.model.wide == 5).all()
    assert (me.model.narrow == 5).all()
    assert (me.model.fixed == 0).all()
    assert me.session.versions == (1, 1)
    assert syncer.all_of(Hello)[0].bulk_proven
    assert syncer.wait_for(Alive)[0].local_steps == 0


def test_the_first_learner_seeds_the_run_with_its_own_model(broker: str) -> None:
    with ScriptedSyncer(broker, settings(run="seeded")) as syncer:
        syncer.verdict = syncer.seed_first
        joined = trainer(broker, run="seeded")
        joined.session.close("stopped")
        assert torch.equal(syncer.public[0], vectors(-1.0)[0])
        assert syncer.static == torch.full((3,), -1.0).numpy().tobytes()
        assert (joined.model.wide == -1).all()


def test_only_what_is_missing_of_version_0_is_sent_again(broker: str) -> None:
    with ScriptedSyncer(broker, settings(run="reseeded")) as syncer:
        syncer.verdict = syncer.seed_first
        lost: list[int] = []
        take = syncer._take

        def lose_one(message: Message) -> None:
            if isinstance(message, Seed) and message.fragment == 0 and message.chunk == 1 and not lost:
                lost.append(message.chunk)
            else:
                take(message)

        syncer._take = lose_one  # type: ignore[method-assign]
        trainer(broker, run="reseeded").session.close("stopped")
        assert lost == [1]
        assert {m.fragment for m in syncer.all_of(Seed)} == {0, 1, 2}
        assert len(syncer.all_of(Seed, fragment=1)) == len(syncer.all_of(Seed, fragment=2)) == 1


def test_a_learner_that_is_not_welcomed_yet_does_not_hear_what_another_joiner_fetches(
    broker: str, syncer: ScriptedSyncer
) -> None:
    first: list[Trainer] = []

    def wait_for_the_first(hello: Hello) -> dict[str, Any]:
        waits = hello.name == "later" and not first
        return {"verdict": "wait", "reason": "not yet"} if waits else {"verdict": "welcome"}

    syncer.verdict = wait_for_the_first
    thread, joined = in_thread(lambda: trainer(broker, name="later"))
    syncer.wait_for(Hello, name="later")
    first.append(trainer(broker, name="first"))
    wait_for(lambda: not thread.is_alive(), "the second joins")
    for each in (first[0], joined[0]):
        each.session.close("stopped")
    syncer.wait_for(Goodbye, name="later")
    model_bytes = sum(4 * vector.numel() for vector in syncer.public)
    assert model_bytes < syncer.all_of(Alive, name="later")[-1].bytes_down < 1.5 * model_bytes


def test_a_learner_that_must_wait_asks_again_until_it_is_welcome(broker: str, syncer: ScriptedSyncer) -> None:
    def wait_twice(hello: Hello) -> dict[str, Any]:
        waits = len(syncer.all_of(Hello)) <= 2
        return {"verdict": "wait", "reason": "the name is held"} if waits else {"verdict": "welcome"}

    syncer.verdict = wait_twice
    joined = trainer(broker)
    joined.session.close("stopped")
    hellos = syncer.all_of(Hello)
    assert len(hellos) == 3
    assert len({hello.incarnation for hello in hellos}) == 1


def test_a_refusal_is_raised_with_the_syncers_reason(broker: str, syncer: ScriptedSyncer) -> None:
    syncer.verdict = lambda _: {"verdict": "refused", "reason": "you lack wide [9]"}
    with pytest.raises(Refused, match=r"run r rejects me: you lack wide \[9\]"):
        trainer(broker)


def test_a_plan_that_both_sides_cut_differently_is_refused(broker: str, syncer: ScriptedSyncer) -> None:
    syncer.verdict = lambda _: {"verdict": "welcome", "plan_digest": "0" * 64}
    with pytest.raises(Refused, match="splits the model into 2 fragments differently"):
        trainer(broker)


def test_a_join_that_nobody_answers_says_what_it_waited_for(broker: str) -> None:
    with pytest.raises(PeerLost, match=r"me waited 0\.3 s for a beat of the syncer at tcp"):
        trainer(broker, run="nobody", join_timeout_seconds=0.3)


def test_a_join_without_a_broker_says_what_it_waited_for() -> None:
    with pytest.raises(PeerLost, match="a connection to the broker"):
        trainer("tcp://127.0.0.1:1", join_timeout_seconds=0.3)


def test_chunks_that_are_lost_during_a_join_are_fetched_again(broker: str, syncer: ScriptedSyncer) -> None:
    lost: list[Keyframe] = []

    def lose_first(message: Message) -> bool:
        if isinstance(message, Keyframe) and message.fragment == 0 and message.chunk == 1 and not lost:
            lost.append(message)
            return True
        return False

    syncer.drops = lose_first
    joined = trainer(broker)
    joined.session.close("stopped")
    assert (joined.model.wide == 5).all()
    assert lost
    again = [fetch.chunks for fetch in syncer.all_of(Fetch, fragment=0)]
    assert again[0] == (0, 1)
    assert again[-1] == (1,)


def test_a_merge_during_the_download_is_not_lost(broker: str, syncer: ScriptedSyncer) -> None:
    held: list[Message] = []

    def hold_back(message: Message) -> bool:
        if isinstance(message, Keyframe) and message.fragment == 0 and message.chunk == 1 and not held:
            held.append(message)
            return True
        return False

    syncer.drops = hold_back
    thread, result = in_thread(lambda: trainer(broker))
    wait_for(lambda: held, "the keyframe is half sent")
    syncer.merge(0, vectors(7.0)[0])
    syncer.say(held[0])
    thread.join(30)
    joined: Trainer = result[0]
    wait_for(lambda: joined.step(by=0.0) and joined.session.versions[0] == 2, "the merge is adopted")
    joined.session.close("stopped")
    assert (joined.model.wide == 7).all()


def test_a_merge_between_the_download_and_the_first_step_is_not_lost(
    broker: str, syncer: ScriptedSyncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def joined_late(link: Link) -> Joined:
        joined = await_joined(link)
        syncer.merge(1, vectors(6.0)[1])
        wait_for(lambda: 1 in link.mailbox._arrivals, "version 2 of fragment 1 is here already")
        return joined

    monkeypatch.setattr(session, "await_joined", joined_late)
    me = trainer(broker)
    assert me.session.versions == (1, 2)
    assert torch.equal(me.model.narrow, torch.full((40,), 6.0))
    assert syncer.wait_for(Alive, versions=(1, 2))
    me.session.close("stopped")


def test_a_learner_of_a_finished_run_holds_the_final_model_and_takes_no_step(
    broker: str, syncer: ScriptedSyncer
) -> None:
    syncer.finish()
    joined = trainer(broker)
    assert joined.session.finished
    assert (joined.model.wide == 5).all()
    assert joined.session.progress.fraction == 1.0
    assert not joined.step(), "its loop takes one before it asks"
    assert (joined.model.wide == 5).all()
    assert joined.session.local_steps == 0
    joined.session.close()
    assert syncer.wait_for(Goodbye)[0].model_hash == syncer.model_hash
