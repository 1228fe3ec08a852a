"""What the training script sees of its session."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoupled_diloco.common.codec import encode_delta
from decoupled_diloco.common.errors import DilocoError, Diverged, SettingError
from decoupled_diloco.common.wire import (
    Delta,
    Hello,
    Welcome,
)
from decoupled_diloco.learner.replica import layout_of
from decoupled_diloco.learner.session import join
from link_trainer import Model, Trainer, settings, talk_of, trainer, vectors
from scripted_syncer import ScriptedSyncer, running_broker
from torch import nn
from waiting import wait_for


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


def test_after_a_restart_of_the_broker_the_learner_continues_by_itself() -> None:
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
