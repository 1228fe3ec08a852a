"""A session against a scripted syncer, over a real broker and real sockets: every corner of the learner's protocol."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoupled_diloco.common.codec import encode_delta
from decoupled_diloco.common.config import RunSettings
from decoupled_diloco.common.errors import DilocoError, Diverged, Orphaned, PeerLost, Refused, SettingError
from decoupled_diloco.common.fragments import Plan, balanced_plan
from decoupled_diloco.common.wire import (
    Alive,
    Call,
    Delta,
    Fetch,
    Goodbye,
    Hello,
    Keyframe,
    Message,
    Seed,
    Update,
    Welcome,
    chunk_count,
)
from decoupled_diloco.learner import core, join_protocol, public_model, session
from decoupled_diloco.learner.join_wait import await_joined
from decoupled_diloco.learner.link import Link
from decoupled_diloco.learner.mailbox import Joined
from decoupled_diloco.learner.replica import Replica, layout_of
from decoupled_diloco.learner.session import Session, join
from scripted_syncer import ScriptedSyncer, running_broker
from torch import Tensor, nn
from waiting import wait_for

WIDTH = 1100
"""The first fragment has two chunks of 1 MiB as a keyframe (and in f32), the second one less than one."""


class Model(nn.Module):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.full((WIDTH, 300), value))
        self.narrow = nn.Parameter(torch.full((40,), value))
        self.fixed = nn.Parameter(torch.full((3,), value), requires_grad=False)


@dataclass
class Trainer:
    """A model that each step moves by 1, and its session."""

    model: Model
    optimizer: torch.optim.Optimizer
    session: Session

    def step(self, tokens: int = 10, loss: float | None = None, by: float = 1.0) -> bool:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(by)
        return self.session.step(tokens=tokens, loss=loss)

    def hears_call(self, slot: int, attempt: int = 1) -> None:
        wait_for(
            lambda: any((c.slot, c.attempt) == (slot, attempt) for c in self.session._mailbox._calls),
            f"the learner hears call {slot}, attempt {attempt}",
        )

    def gets(self, fragment: int, version: int) -> None:
        wait_for(
            lambda: fragment in (a := self.session._mailbox._arrivals) and a[fragment].public.version == version,
            f"version {version} of fragment {fragment} waits for the learner",
        )


def settings(**more: Any) -> RunSettings:
    rows: dict[str, Any] = {"run": "r", "fragments": 2, "overlap": 1, "codec_up": "f32", "codec_down": "f32"}
    return RunSettings(**(rows | more))


def vectors(value: float) -> list[Tensor]:
    model = Model(value)
    replica = Replica(model, plan_of(model))
    return [replica.vector(fragment) for fragment in replica.plan.fragments]


def plan_of(model: nn.Module) -> Plan:
    return balanced_plan(layout_of(model), 2)


@contextmanager
def syncer_at(address: str, **more: Any) -> Iterator[ScriptedSyncer]:
    """A seeded run: every fragment at version 1, all values 5, the static ones 0."""
    with ScriptedSyncer(address, settings(**more), layout_of(Model())) as syncer:
        syncer.put(vectors(5.0), 1, static=bytes(12))
        yield syncer


def trainer(address: str, **more: Any) -> Trainer:
    model = Model(-1.0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    rows: dict[str, Any] = {"name": "me", "run": "r"}
    return Trainer(model, optimizer, join(address, model, optimizer, **(rows | more)))


@pytest.fixture(autouse=True)
def _sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens each second in a real run happens ten times as often."""
    monkeypatch.setattr(join_protocol, "HELLO_SECONDS", 0.05)
    monkeypatch.setattr(core, "ALIVE_SECONDS", 0.1)
    monkeypatch.setattr(public_model, "GAP_SECONDS", 0.3)


@pytest.fixture(scope="module")
def broker() -> Iterator[str]:
    with running_broker() as address:
        yield address


@pytest.fixture
def syncer(broker: str) -> Iterator[ScriptedSyncer]:
    with syncer_at(broker) as running:
        yield running


@pytest.fixture
def me(broker: str, syncer: ScriptedSyncer) -> Iterator[Trainer]:
    joined = trainer(broker)
    yield joined
    joined.session.close("stopped")


def talk_of(session: Session) -> core.LearnerCore:
    """What its link says and hears."""
    assert isinstance(session._link, Link)
    return session._link.core


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """`work` in a thread; what it returns or raises is in the list once it has ended."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except DilocoError as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result


# --- joining ---------------------------------------------------------------------------------------------------------
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


def test_who_is_not_welcomed_yet_does_not_hear_what_another_joiner_fetches(broker: str, syncer: ScriptedSyncer) -> None:
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


# --- answering -------------------------------------------------------------------------------------------------------
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


def test_who_did_not_contribute_may_answer_from_an_older_anchor(syncer: ScriptedSyncer, me: Trainer) -> None:
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


# --- following -------------------------------------------------------------------------------------------------------
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


# --- the end ---------------------------------------------------------------------------------------------------------
def test_the_final_model_is_taken_and_acknowledged_with_its_hash(syncer: ScriptedSyncer, me: Trainer) -> None:
    me.step()
    with syncer._lock:
        syncer.put(vectors(3.0))
        syncer.finish()
    wait_for(lambda: not me.step(), "the session says that the run is over")
    assert me.session.finished
    assert (me.model.wide == 3).all()
    assert me.session.progress.step == syncer.settings.steps
    goodbye = syncer.wait_for(Goodbye, 2)[0]
    assert (goodbye.reason, goodbye.model_hash) == ("finished", syncer.model_hash)
    steps = me.session.local_steps
    assert not me.step()
    assert me.session.local_steps == steps


def test_a_final_model_whose_hash_never_fits_is_an_error(syncer: ScriptedSyncer, me: Trainer) -> None:
    with syncer._lock:
        syncer.finish()
        syncer.model_hash = "f" * 64
    with pytest.raises(DilocoError, match=r"its hash .* is not the ffff"):
        wait_for(lambda: not me.step(), "the session fails")


def test_closing_in_mid_run_answers_once_more_and_says_goodbye(broker: str, syncer: ScriptedSyncer) -> None:
    me = trainer(broker)
    me.step()
    syncer.call(0, slot=0)
    me.hears_call(0)
    thread, _ = in_thread(me.session.close)
    _, delta = syncer.delta(slot=0, name="me")
    assert (delta[: WIDTH * 300] == -1).all()
    assert not syncer.all_of(Goodbye)
    syncer.confirm(0, "me")
    thread.join(30)
    assert [goodbye.reason for goodbye in syncer.wait_for(Goodbye)] == ["left"]
    with pytest.raises(DilocoError, match=r"step\(\) after close\(\)"):
        me.step()
    me.session.close()


@pytest.mark.parametrize(
    ("error", "reason"),
    [(KeyboardInterrupt, "stopped"), (ValueError, "failed"), (Diverged, "diverged")],
)
def test_a_session_that_an_exception_leaves_says_why_and_lets_it_through(
    broker: str, syncer: ScriptedSyncer, error: type[BaseException], reason: str
) -> None:
    with pytest.raises(error), trainer(broker).session:
        raise error
    assert [goodbye.reason for goodbye in syncer.wait_for(Goodbye)] == [reason]


def test_closing_does_not_hang_when_the_broker_is_gone() -> None:
    with running_broker() as address:
        with syncer_at(address):
            me = trainer(address)
        me.step()
    me.session.close()
    assert me.session._link.join_thread(0)


def test_a_learner_that_hears_no_beat_saves_its_model_and_stops(
    broker: str, syncer: ScriptedSyncer, tmp_path: Path
) -> None:
    me = trainer(broker, orphan_timeout_seconds=0.5, directory=tmp_path)
    syncer.beating = False
    with pytest.raises(Orphaned, match="its parameters are in"):
        wait_for(lambda: not me.step(), "the learner is orphaned")
    me.session.close("failed")
    assert (tmp_path / "r-me-orphan.safetensors").stat().st_size > WIDTH * 300 * 4


def test_a_link_that_fails_tells_the_next_step(syncer: ScriptedSyncer, me: Trainer) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of order")

    talk_of(me.session).tick = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(DilocoError, match=r"the link of me to tcp.* failed: RuntimeError: out of order"):
        wait_for(lambda: not me.step(), "the failure is told")


# --- what the training script sees -----------------------------------------------------------------------------------
def test_global_weights_are_shown_and_the_own_ones_come_back(syncer: ScriptedSyncer, me: Trainer) -> None:
    me.step(by=0.3)
    own = me.model.wide.detach().clone()
    syncer.merge(0, vectors(8.0)[0])
    me.gets(0, 2)
    with me.session.global_weights() as versions:
        assert versions == (2, 1)
        assert (me.model.wide == 8).all()
        with pytest.raises(DilocoError, match="inside global_weights"):
            me.session.step(tokens=1)
    assert torch.equal(me.model.wide, own)


def test_a_loss_that_is_not_finite_resets_the_learner_once_and_then_it_has_diverged(
    syncer: ScriptedSyncer, me: Trainer
) -> None:
    me.step(by=float("nan"), loss=float("nan"))
    wait_for(lambda: me.session._mailbox._reset, "the whole model waits")
    me.step(by=0.0, loss=float("nan"))
    assert (me.model.wide == 5).all()
    me.step(loss=1.0)
    with pytest.raises(Diverged, match="me has diverged"):
        me.step(loss=float("inf"))


def test_parameters_that_are_not_finite_are_never_sent(syncer: ScriptedSyncer, me: Trainer) -> None:
    syncer.call(1, slot=0)
    me.hears_call(0)
    me.step(by=float("nan"))
    wait_for(lambda: me.session._mailbox._nonfinite, "the link finds it")
    me.step(by=0.0)
    wait_for(lambda: me.session._mailbox._reset, "the whole model waits")
    me.step(by=0.0)
    assert (me.model.narrow == 5).all()
    assert not syncer.all_of(Delta)


def test_an_optimizer_that_steps_tensors_of_its_own_is_found_after_the_join(
    broker: str, syncer: ScriptedSyncer
) -> None:
    me = trainer(broker)
    hidden = torch.full_like(me.model.wide, -1.0)

    @torch.no_grad()
    def train() -> None:
        for _ in range(3):
            me.model.wide.copy_(hidden.add_(0.001))
            me.session.step(tokens=1)

    with pytest.raises(SettingError, match="did not keep the values it adopted"):
        train()
    me.session.close("failed")


@pytest.mark.parametrize("tokens", [-1, 1.5, "3", 2**53 + 1])
def test_tokens_must_be_a_count(me: Trainer, tokens: Any) -> None:
    with pytest.raises(SettingError, match="tokens must be a whole number"):
        me.session.step(tokens=tokens)


def test_a_joiner_without_moments_raises_its_rate_over_its_first_steps(broker: str, syncer: ScriptedSyncer) -> None:
    with syncer._lock:
        syncer.t = 50
    me = trainer(broker)
    rates = []
    for _ in range(25):
        rates.append(me.session.ramp)
        me.step(by=0.001)
    me.session.close("stopped")
    assert rates[:2] == [0.05, 0.1]
    assert rates[19:] == [1.0] * 6


def test_the_answers_of_a_bf16_model_are_measured_from_what_it_holds(broker: str) -> None:
    model = nn.Linear(30, 20).bfloat16()
    with ScriptedSyncer(broker, settings(run="halves", codec_up="int4", codec_down="int4")) as syncer:
        syncer.verdict = syncer.seed_first
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with join(broker, model, optimizer, name="me", run="halves") as session:
            target = syncer.public[0].clone()
            target[:600] += 0.1234
            new = syncer.merge(0, target)
            wait_for(lambda: session._mailbox._arrivals, "the update waits")
            session.step(tokens=1)
            assert model.weight.dtype == torch.bfloat16
            assert torch.equal(model.weight.detach().view(-1), new[:600].bfloat16())
            syncer.call(0, slot=0)
            wait_for(lambda: session._mailbox._calls, "the call is heard")
            optimizer.step()
            session.step(tokens=1)
            _, delta = syncer.delta(slot=0, name="me")
            syncer.close_call(0)
        assert not delta.any(), "a learner whose steps moved nothing has nothing to say"
        zero = encode_delta("int4", new, new)
        assert len(zero) == len(syncer.all_of(Delta)[0].payload)


def test_a_welcome_for_another_incarnation_changes_nothing(syncer: ScriptedSyncer, me: Trainer) -> None:
    mine = syncer.all_of(Hello)[0]
    syncer.say(
        Welcome(run="r", name="me", incarnation=mine.incarnation + 1, epoch=1, verdict="reset", reason="not you")
    )
    syncer.merge(1, vectors(6.0)[1])
    me.gets(1, 2)
    assert not talk_of(me.session)._fetching_all


def test_after_a_restart_of_the_broker_the_learner_goes_on_by_itself() -> None:
    with running_broker() as address:
        port = int(address.rpartition(":")[2])
        syncer = ScriptedSyncer(address, settings(), layout_of(Model()))
        syncer.put(vectors(5.0), 1, static=bytes(12))
        syncer.__enter__()
        me = trainer(address)
        me.step()
    with running_broker(port):
        syncer.call(1, slot=0)
        me.hears_call(0)
        me.step()
        syncer.delta(slot=0, name="me")
        syncer.merge(1, vectors(6.0)[1])
        me.gets(1, 2)
        me.session.close("stopped")
        syncer.__exit__()
