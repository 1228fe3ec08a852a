"""A learner on a CUDA device: copies that are only queued hold the right values, and a whole session works."""

from __future__ import annotations

import pytest
import torch
from decoupled_diloco.common.config import RunSettings
from decoupled_diloco.common.fragments import balanced_plan
from decoupled_diloco.learner.replica import Replica, close_holes, layout_of
from decoupled_diloco.learner.session import join
from decoupled_diloco.learner.training_checks import LossWatch
from scripted_syncer import ScriptedSyncer, running_broker
from torch import Tensor, nn
from waiting import wait_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDTH = 4096


def replica_of(dtype: torch.dtype) -> tuple[nn.Module, Replica]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)).to("cuda", dtype)
    return model, Replica(model, balanced_plan(layout_of(model), 1))


def capture(replica: Replica) -> tuple[Tensor, tuple[torch.cuda.Event, ...]]:
    fragment = replica.plan.fragments[0]
    out = replica.new_buffer(fragment.length)
    assert out.is_pinned()
    return out, replica.capture(fragment, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_queued_capture_holds_the_model_as_it_was_although_training_went_on(dtype: torch.dtype) -> None:
    model, replica = replica_of(dtype)
    fragment = replica.plan.fragments[0]
    before = replica.vector(fragment)
    busy = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        busy = busy @ busy  # the copies queue behind this
    out, events = capture(replica)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    for event in events:
        event.synchronize()
    close_holes(fragment, out)
    assert torch.equal(out, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adoption_from_pinned_memory_rounds_like_a_cpu(dtype: torch.dtype) -> None:
    model, replica = replica_of(dtype)
    fragment = replica.plan.fragments[0]
    replica.overwrite(fragment, torch.randn(fragment.length).pin_memory())
    public = torch.randn(fragment.length)
    replica.overwrite(fragment, public.pin_memory())
    span = fragment.spans[0]
    expected = public[span.offset : span.stop].view(span.tensor.shape).to(dtype)
    assert torch.equal(model.get_parameter(span.tensor.name).detach().cpu(), expected)


def test_a_loss_on_the_device_is_noticed_without_waiting_for_it() -> None:
    watch = LossWatch()
    watch.take(torch.tensor(2.0, device="cuda"))
    watch.take(torch.tensor(float("nan"), device="cuda"))
    torch.cuda.synchronize()
    assert not watch.take(None)
    assert watch.value == 2.0


def test_a_session_on_a_device_answers_adopts_and_ends() -> None:
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = RunSettings(run="gpu", fragments=2, overlap=1)
    with running_broker() as address, ScriptedSyncer(address, settings) as syncer:
        syncer.verdict = syncer.seed_first
        with join(address, model, optimizer, name="me", run="gpu") as session:

            def step() -> bool:
                loss = model(torch.randn(8, 64, device="cuda")).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                return session.step(tokens=8, loss=loss)

            step()
            syncer.call(0, slot=0)
            wait_for(lambda: session._mailbox._calls, "the call is heard")
            step()
            _, delta = syncer.delta(slot=0, name="me")
            assert delta.any()
            new = syncer.merge(0, syncer.public[0] - delta)
            syncer.close_call(0)
            wait_for(lambda: session._mailbox._arrivals, "the update waits")
            step()
            assert torch.equal(model.weight.detach().cpu().view(-1), new[:4096])
            syncer.finish()
            wait_for(lambda: not step(), "the run is over")
        assert torch.equal(model.weight.detach().cpu().view(-1), syncer.public[0][:4096])
