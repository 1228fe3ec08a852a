"""What training makes of buffers and frozen parameters reaches the file: real learners, syncer and broker."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from decoupled_diloco.common.codec import digest
from decoupled_diloco.common.config import CHUNK_BYTES, RunSettings
from decoupled_diloco.common.fragments import Layout, TensorSpec
from decoupled_diloco.common.run_folder import RunFolder, Setup
from decoupled_diloco.common.static_tensor_format import pack
from decoupled_diloco.common.wire import Beat, Buffers, Call, Goodbye, split
from decoupled_diloco.compose.final_report import export_model
from decoupled_diloco.learner import departure, syncer_contact
from decoupled_diloco.learner.replica import layout_of
from decoupled_diloco.learner.session import Session, join
from decoupled_diloco.syncer import final_buffers, loop
from decoupled_diloco.syncer.checkpoint import Checkpoints
from safetensors.torch import load, load_file
from scripted_learner import ScriptedLearner
from scripted_syncer import ScriptedSyncer, running_broker
from syncer_run import SyncerRun, syncer_run
from torch import Tensor, nn
from waiting import wait_for


class Normed(nn.Module):
    """Batch norm, and a teacher that follows by a moving average."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.student = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.teacher = nn.Linear(8, 1).requires_grad_(False)
        self.backbone = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.student[:2](x)
        return self.teacher(hidden)  # type: ignore[no-any-return]


def train(address: str, name: str, into: dict[str, Any]) -> None:
    """A whole training script, until the run is over."""
    model = Normed(seed=len(name))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    data = torch.Generator().manual_seed(len(name))
    with join(address, model, optimizer, name=name, run="run") as session:
        while True:
            x = torch.randn(16, 4, generator=data) * 3 + 5
            loss = (model.student(x) - x.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(model.teacher.parameters(), model.student[2].parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
            if not session.step(tokens=16, loss=float(loss.detach())):
                break
    into[name] = model.eval()


def trained(run: SyncerRun, *names: str) -> dict[str, Normed]:
    into: dict[str, Any] = {}
    threads = [threading.Thread(target=train, args=(run.address, name, into), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(into) == len(names) or run.failure, "all learners have ended", 120)
    return into


def test_the_file_has_the_statistics_and_the_teacher_of_the_learner_that_the_summary_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LINGER_SECONDS", 0.2)
    x = torch.randn(32, 4) * 3 + 5
    with syncer_run(tmp_path, steps=6) as run:
        models = trained(run, "a", "bb")
        wait_for(lambda: not run._thread.is_alive(), "the syncer goes")
        summary = json.loads((tmp_path / "summary.json").read_text())
        source = models[summary["buffers_from"]]
        assert summary["buffers"] == 5, "three of the batch norm, two of the teacher, none of the backbone"
        assert summary["unconfirmed"] == {}
        stored = load_file(tmp_path / "model.safetensors")
        for name, tensor in source.state_dict().items():
            assert torch.equal(stored[name], tensor), name
        read = Normed(seed=9)
        read.load_state_dict(stored)
        assert torch.equal(read.eval()(x), source(x))

        (tmp_path / "model.safetensors").unlink()
        RunFolder(tmp_path).write_setup(Setup(settings=run.settings, task=None))
        exported = load_file(export_model(RunFolder(tmp_path)))
        assert all(torch.equal(exported[name], stored[name]) for name in stored)

        run.start()
        late = Normed(seed=7)
        with join(run.address, late, torch.optim.SGD(late.student.parameters(), lr=1.0), name="late") as session:
            assert session.finished
        assert all(torch.equal(tensor, stored[name]) for name, tensor in late.state_dict().items())


def test_a_learner_cut_off_at_the_end_gets_the_final_model_from_a_syncer_that_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving, cut, into = threading.Event(), threading.Event(), dict[str, Any]()
    save = Checkpoints.save

    def cut_off(checkpoints: Checkpoints, state: Any, bookkeeping: Any, **more: Any) -> Any:
        if bookkeeping["phase"] == "finished":
            saving.set()
            assert cut.wait(60)
        return save(checkpoints, state, bookkeeping, **more)

    monkeypatch.setattr(Checkpoints, "save", cut_off)
    for name, seconds in (("RETURN_SECONDS", 1000.0), ("RETURN_LINGER_SECONDS", 0.1)):
        monkeypatch.setattr(loop, name, seconds)
    with syncer_run(tmp_path, steps=6) as run:
        run.stop()
        run.start(drain_seconds=0.3)
        learner = threading.Thread(target=train, args=(run.address, "a", into), daemon=True)
        learner.start()
        wait_for(lambda: saving.is_set() or run.failure, "the final model is being saved", 60)
        run.broker.stop()
        run.broker.join()
        cut.set()
        wait_for(lambda: not run._thread.is_alive(), "the syncer goes, although it reached no learner")
        assert json.loads((tmp_path / "summary.json").read_text())["unconfirmed"] == {"a": "no goodbye"}
        before = (tmp_path / "model.safetensors").read_bytes()
        assert learner.is_alive()
        assert not into, "it still trains"

        run.start_broker()
        run.start(drain_seconds=60.0)
        wait_for(lambda: into or run.failure, "the learner has ended")
        wait_for(lambda: not run._thread.is_alive(), "the syncer goes once it is confirmed")
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary["unconfirmed"] == {}
        assert load(before).keys() == load_file(tmp_path / "model.safetensors").keys()
        parameters = {name for name, _ in into["a"].student.named_parameters(prefix="student")}
        assert all(torch.equal(load(before)[name], into["a"].state_dict()[name]) for name in parameters)
        stored = load_file(tmp_path / "model.safetensors")
        assert summary["buffers_from"] == "a"
        assert all(torch.equal(tensor, stored[name]) for name, tensor in into["a"].state_dict().items())


LARGE = Layout(
    (
        TensorSpec(name="w", shape=(40,), dtype="float32"),
        TensorSpec(name="teacher", shape=(3, CHUNK_BYTES // 8), dtype="float32", kind="buffer"),
    )
)


def ended(run: SyncerRun, *names: str) -> tuple[list[ScriptedLearner], str]:
    """Learners that are written by hand, of a run that they have just brought to its end."""
    learners = [run.learner(name) for name in names]
    for learner in learners:
        learner.join()

    def finished() -> str:
        for learner in learners:
            learner.listen()
            calls = [m for m in learner.heard if isinstance(m, Call)]
            learner.heard = [m for m in learner.heard if not isinstance(m, Call)]
            learner.alive()
            for call in calls:
                learner.step()
                learner.bulk.send(learner.delta(call))
        beats = [m for m in learners[0].heard if isinstance(m, Beat) and m.state == "finished"]
        return beats[-1].model_hash if beats else ""

    return learners, wait_for(finished, "the run is finished")


def parts(learner: ScriptedLearner, value: float) -> list[Buffers]:
    moved = pack(LARGE, {0: torch.full((3, CHUNK_BYTES // 8), value).numpy().tobytes()})
    own: dict[str, Any] = {
        "run": learner.run.settings.run, "name": learner.name, "incarnation": learner.incarnation,
        "epoch": learner.epoch, "fragment": learner.run.plan.static_index, "digest": digest(moved),
    }  # fmt: skip
    return [Buffers(**own, **part) for part in split(moved)]


def test_the_learner_that_is_asked_dies_after_a_part_and_another_one_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LINGER_SECONDS", 0.1)
    loops, writes = set[int](), list[int]()
    write = Checkpoints.write_buffers

    def noted(checkpoints: Checkpoints, *what: Any) -> None:
        writes.append(threading.get_ident())
        write(checkpoints, *what)
        raise OSError("No space left on device")  # behind the write: the model has them all the same

    monkeypatch.setattr(Checkpoints, "write_buffers", noted)
    with syncer_run(tmp_path, layout=LARGE, steps=1, fragments=1, overlap=1) as run:
        (a, b), model_hash = ended(run, "a", "b")
        loops.add(run._thread.ident or 0)

        def asked(learner: ScriptedLearner) -> bool:
            learner.goodbye("finished", model_hash, buffers=1)
            learner.listen()
            beats = [m for m in learner.heard if isinstance(m, Beat)]
            return beats[-1].buffer_source == (learner.name, 1)

        wait_for(lambda: asked(a), "a is asked")
        a.bulk.send(parts(a, 1.0)[0])

        def one_part_is_here() -> bool:
            assembly = run.syncer.current.buffers._assembly
            return assembly is not None and len(assembly.missing) == 1

        wait_for(lambda: asked(a) and one_part_is_here(), "one part is here")
        a.close()
        run._learners.remove(a)
        with monkeypatch.context() as sooner:
            sooner.setattr(final_buffers, "SILENCE_SECONDS", 0.5)
            wait_for(lambda: asked(b), "b is asked, since a is dead")
        for part in parts(b, 2.0):
            b.bulk.send(part)
        wait_for(lambda: not run._thread.is_alive(), "the syncer goes")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["buffers_from"], summary["buffers_failed"]) == ("b", ["a fell silent"])
    assert torch.all(load_file(tmp_path / "model.safetensors")["teacher"] == 2.0)
    assert len(writes) == 1
    assert not loops & set(writes), "the loop does not wait for the disk"


# --- a learner and a scripted syncer ---------------------------------------------------------------------------------
@pytest.fixture
def syncer(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedSyncer]:
    """Everything happens ten times as often as in a real run."""
    monkeypatch.setattr(departure, "GOODBYE_SECONDS", 0.1)
    monkeypatch.setattr(departure, "RESEND_SECONDS", 0.1)
    monkeypatch.setattr(syncer_contact, "BEAT_SECONDS", 0.2)
    settings = RunSettings(run="r", fragments=2, overlap=1, codec_up="f32", codec_down="f32")
    with running_broker() as address, ScriptedSyncer(address, settings, layout_of(Normed())) as running:
        running.address = address  # type: ignore[attr-defined]
        running.put([torch.zeros(f.length) for f in running.plan.fragments], 1, bytes(running.layout.static_bytes))  # type: ignore[union-attr]
        yield running


def finished(syncer: ScriptedSyncer) -> tuple[Normed, Session]:
    """A learner whose loop has just ended with the run; all that moved is how many batches were counted."""
    model = Normed()
    optimizer = torch.optim.SGD(model.student.parameters(), lr=0.0)
    session = join(syncer.address, model, optimizer, name="me", run="r")  # type: ignore[attr-defined]
    syncer.finish()

    def over() -> bool:
        model.student(torch.randn(8, 4))
        optimizer.step()
        return not session.step(tokens=1)

    wait_for(over, "the run is over")
    return model, session


def test_a_learner_gives_its_buffers_when_it_is_asked_again_if_need_be_and_leaves_when_they_are_held(
    syncer: ScriptedSyncer,
) -> None:
    _, session = finished(syncer)
    closing = threading.Thread(target=session.close, daemon=True)
    closing.start()
    assert syncer.wait_for(Goodbye, buffers=1)
    syncer.beat_more = {"buffer_source": ("other", 5)}
    assert syncer.wait_for(Goodbye, 2, buffers=1), "it waits, and says so each second"
    assert not syncer.all_of(Buffers)
    syncer.beat_more = {"buffer_source": (session.name, session.incarnation)}
    [sent] = syncer.wait_for(Buffers)
    assert (sent.fragment, sent.epoch) == (2, 1)
    assert len(syncer.wait_for(Buffers, 2)) == 2, "as long as it is asked"
    assert closing.is_alive()
    syncer.beat_more |= {"buffers_held": True}
    closing.join(30)
    assert not closing.is_alive()


def test_a_learner_leaves_a_syncer_that_is_gone_before_it_took_the_buffers(syncer: ScriptedSyncer) -> None:
    _, session = finished(syncer)
    syncer.beating = False
    session.close()
    assert session._link.join_thread(0)
