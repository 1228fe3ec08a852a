"""Looking at a run without a vote, and hearing which runs there are, over a real broker and real sockets."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import msgpack
import pytest
import torch
import zmq
from decoupled_diloco.common.config import RunSettings
from decoupled_diloco.common.errors import PeerLost, Refused, SettingError
from decoupled_diloco.common.sockets import Address, PublishSocket
from decoupled_diloco.common.wire import PROTOCOL, Alive, Delta, Goodbye, Hello, beat_topic
from decoupled_diloco.learner import discover as discovering
from decoupled_diloco.learner.discover import discover
from decoupled_diloco.learner.observer import Observer
from decoupled_diloco.learner.replica import Replica, layout_of
from scripted_syncer import ScriptedSyncer, running_broker
from torch import nn
from waiting import wait_for


@pytest.fixture
def address() -> Iterator[str]:
    with running_broker() as at:
        yield at


def model_of(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(20, 10), nn.BatchNorm1d(10))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


@contextlib.contextmanager
def syncer_at(address: str, run: str = "seen") -> Iterator[ScriptedSyncer]:
    """A seeded run whose values are all 5, but for a batch norm that has seen 3 batches."""
    settings = RunSettings(run=run, fragments=2, overlap=1, codec_down="int8")
    model = model_of(5.0)
    model[1].num_batches_tracked.fill_(3)  # type: ignore[index]
    with ScriptedSyncer(address, settings, layout_of(model)) as syncer:
        assert syncer.plan is not None
        replica = Replica(model, syncer.plan)
        syncer.put([replica.vector(f) for f in syncer.plan.fragments], 4, replica.static_bytes())
        yield syncer


def test_an_observer_sees_the_public_model_move_and_end_and_says_nothing(address: str) -> None:
    model = model_of(0.0)
    with syncer_at(address) as syncer:
        with Observer(address, model, run="seen", name="eye") as seen:
            assert model[1].num_batches_tracked == 3  # type: ignore[index]
            assert (model[0].weight == 0).all()  # type: ignore[index]
            assert seen.load() == (4, 4)
            assert (model[0].weight == 5).all()  # type: ignore[index]
            new = syncer.merge(0, syncer.public[0] + 1)
            wait_for(lambda: seen.versions == (5, 4), "the observer follows")
            seen.load()
            assert torch.equal(model[0].weight.detach().view(-1), new[:200])  # type: ignore[index]
            assert not seen.finished
            assert seen.beat.state == "running"
            syncer.finish()
            wait_for(lambda: seen.finished, "the observer holds the final model")
            assert seen.load() == (6, 5)
            assert seen.progress.fraction == 1.0
        assert {hello.role for hello in syncer.all_of(Hello)} == {"observer"}
        for kind in (Alive, Delta, Goodbye):
            assert not syncer.all_of(kind)


def test_an_observer_with_another_model_is_refused(address: str) -> None:
    with syncer_at(address) as syncer:
        syncer.verdict = lambda _: {"verdict": "refused", "reason": "the run has 0.weight"}
        with pytest.raises(Refused, match=r"the run has 0\.weight"):
            Observer(address, nn.Linear(2, 2), run="seen")


def test_an_observer_of_a_run_that_is_not_seeded_waits_for_it(address: str) -> None:
    with syncer_at(address) as syncer:
        syncer.verdict = lambda _: (
            {"verdict": "wait", "reason": "no version 0 yet"} if len(syncer.all_of(Hello)) < 3 else syncer.welcome(_)
        )
        with Observer(address, model_of(0.0), run="seen") as seen:
            assert seen.versions == (4, 4)


# --- discovery -------------------------------------------------------------------------------------------------------
def test_the_only_run_at_an_address_is_found(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovering, "LISTEN_SECONDS", 0.4)
    monkeypatch.setattr(discovering, "SINCE_FIRST_SECONDS", 0.3)
    with syncer_at(address):
        beat = discover(address)
        assert beat.run == "seen"
        assert beat.settings["fragments"] == 2


def test_of_several_runs_the_named_one_is_taken_and_without_a_name_all_are_listed(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovering, "LISTEN_SECONDS", 0.4)
    monkeypatch.setattr(discovering, "SINCE_FIRST_SECONDS", 0.3)
    with syncer_at(address, "seen"), syncer_at(address, "seen2"):
        assert discover(address, "seen").run == "seen"
        with pytest.raises(SettingError, match=r"several runs are at .*: seen, seen2; choose one with --run"):
            discover(address)


def test_an_address_without_a_run_is_said_to_have_none(address: str) -> None:
    with pytest.raises(PeerLost, match=r"a beat of any run was not heard at .* for 0\.3 s"):
        discover(address, timeout_seconds=0.3)
    with pytest.raises(PeerLost, match="a beat of run other was not heard"):
        discover(address, "other", timeout_seconds=0.3)
    with pytest.raises(SettingError, match="--run 'Other!' must match"):
        discover(address, "Other!")


def proven(up: PublishSocket) -> bool:
    up.read_subscriptions()
    return up.proven


def test_a_syncer_of_another_version_is_named_as_the_reason(address: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    up = PublishSocket(context, Address.parse(address).control_in, hwm_messages=10)
    wait_for(lambda: proven(up), "the path is open")
    frames = [beat_topic("newer"), msgpack.packb({"protocol": PROTOCOL + 1})]
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.02):
            up.socket.send_multipart(frames)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(PeerLost, match="only one of another version is heard"):
            discover(address, "newer", timeout_seconds=1)
    finally:
        stop.set()
        thread.join()
        up.close()
        context.destroy(0)
