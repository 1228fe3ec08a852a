"""A session under modes of torch: default device and dtype, inference mode, deterministic algorithms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from decoupled_diloco.common.codec import decode_delta, encode_delta
from decoupled_diloco.common.wire import Goodbye
from decoupled_diloco.learner import core
from decoupled_diloco.learner.link import Link
from decoupled_diloco.learner.observer import Observer
from decoupled_diloco.learner.replica import Replica
from decoupled_diloco.learner.session import Session
from decoupled_diloco.syncer.global_model import cast_through
from odd_scripts import member, model_of, move, syncer_at, trained_of
from scripted_syncer import ScriptedSyncer
from torch import nn
from waiting import wait_for


def talk_of(session: Session) -> core.LearnerCore:
    """What its link says and hears."""
    assert isinstance(session._link, Link)
    return session._link.core


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # new memory is filled with NaN as well
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def flushed_denormals() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


Mode = Callable[[], AbstractContextManager[object]]


MODES: dict[str, Mode] = {
    "none": contextlib.nullcontext,
    "a default device": lambda: default_device("meta"),
    "a device context": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic": deterministic,
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "flushed denormals": flushed_denormals,
}


def one_round(syncer: ScriptedSyncer, session: Session, model: nn.Module, slot: int, mode: Mode) -> None:
    """A step, an answer, a merge, its adoption, and a look at the global weights, all inside `mode`."""
    assert syncer.plan is not None
    fragment, replica = syncer.plan.fragments[0], Replica(model, syncer.plan)
    anchor = cast_through(fragment, syncer.public[0])
    loss = torch.full((), 1.0, dtype=torch.float32, device="cpu")
    syncer.call(0, slot)
    wait_for(lambda: any(call.slot == slot for call in session._mailbox._calls), "the call is heard")
    move(model, -0.25)
    wanted = decode_delta("int8", anchor, encode_delta("int8", anchor, replica.vector(fragment)))
    with mode():
        assert session.step(tokens=1, loss=loss)
    _, delta = syncer.delta(slot=slot, name="me")
    assert torch.equal(delta, wanted)
    syncer.close_call(slot)
    syncer.merge(0, syncer.public[0] - delta, slot=slot)
    wait_for(lambda: session._mailbox._arrivals, "the merge waits to be adopted")
    with mode():
        assert session.step(tokens=1)
    adopted = replica.vector(fragment)
    move(model, 1.0)
    with mode(), session.global_weights():
        assert torch.equal(replica.vector(fragment), adopted)
    assert torch.equal(adopted, cast_through(fragment, syncer.public[0]))
    assert session.versions == tuple(syncer.versions)


def test_no_mode_of_torch_changes_a_bit_of_what_a_session_sends_and_adopts(broker: str) -> None:
    with syncer_at(broker) as syncer:
        model = model_of(-1.0)
        session = member(broker, model)
        memory = [p.data_ptr() for p in model.parameters()]
        for slot, (name, mode) in enumerate(MODES.items()):
            one_round(syncer, session, model, slot, mode)
            assert not any(p.is_inference() for p in model.parameters()), name
            assert [p.data_ptr() for p in model.parameters()] == memory, name
        assert talk_of(session).rejected.total() == 0
        sum(p.float().square().sum() for p in trained_of(model)).backward()  # type: ignore[union-attr]
        with torch.inference_mode(), torch.device("meta"):
            session.close("stopped")
        assert syncer.wait_for(Goodbye)


@pytest.mark.parametrize("name", ["a device context", "float64", "bfloat16", "inference mode", "flushed denormals"])
def test_a_join_inside_a_mode_of_torch_is_like_any_other(broker: str, name: str) -> None:
    with syncer_at(broker) as syncer:
        model = model_of(-1.0)
        with MODES[name]():
            session = member(broker, model)
        assert not any(t.is_inference() for t in [*model.parameters(), *model.buffers()])
        assert model.get_parameter("wide").eq(5).all()
        assert model.get_buffer("mean").eq(0).all()
        one_round(syncer, session, model, 0, contextlib.nullcontext)
        assert model.get_parameter("tiny").ne(0).all()
        assert talk_of(session).rejected.total() == 0
        session.close("stopped")


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_model_that_was_made_in_inference_mode_can_be_written(broker: str, where: str) -> None:
    with syncer_at(broker) as syncer, torch.inference_mode():
        model = model_of(-1.0)
        with torch.inference_mode(mode=where == "inside"), Observer(broker, model, run="r") as seen:
            assert seen.load() == tuple(syncer.versions)
        session = member(broker, model)
        with torch.inference_mode(mode=where == "inside"):
            assert session.step(tokens=1)
        session.close("stopped")
        assert model.get_parameter("wide").eq(5).all()
        assert model.get_buffer("mean").eq(0).all()
