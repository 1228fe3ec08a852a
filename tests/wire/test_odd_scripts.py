"""Training scripts that are odd but honest: their torch modes, their forks, the limits that they run under."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from decoupled_diloco.common.codec import decode_delta, encode_delta
from decoupled_diloco.common.config import RunSettings
from decoupled_diloco.common.errors import DilocoError, SettingError
from decoupled_diloco.common.wire import Goodbye
from decoupled_diloco.learner import core, join_protocol
from decoupled_diloco.learner.link import Link
from decoupled_diloco.learner.observer import Observer
from decoupled_diloco.learner.replica import Replica, layout_of
from decoupled_diloco.learner.session import Session, join
from decoupled_diloco.syncer.global_model import cast_through
from scripted_syncer import ScriptedSyncer, running_broker
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from waiting import wait_for


@pytest.fixture(autouse=True)
def _sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_protocol, "HELLO_SECONDS", 0.05)
    monkeypatch.setattr(core, "ALIVE_SECONDS", 0.1)


@pytest.fixture(scope="module")
def broker() -> Iterator[str]:
    with running_broker() as address:
        yield address


def model_of(value: float, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Three trained tensors, one bf16 and one of denormal numbers, none as long as a block; a frozen one; a buffer."""
    model = nn.Module()
    model.register_parameter("tiny", nn.Parameter(torch.full((7,), 1e-40, dtype=torch.float32, device="cpu")))
    model.register_parameter("wide", nn.Parameter(torch.full((40, 50), value, dtype=dtype, device="cpu")))
    model.register_parameter("narrow", nn.Parameter(torch.full((40,), value, dtype=torch.bfloat16, device="cpu")))
    fixed = torch.full((3,), value, dtype=torch.float32, device="cpu")
    model.register_parameter("fixed", nn.Parameter(fixed, requires_grad=False))
    model.register_buffer("mean", torch.full((2,), value, dtype=torch.float32, device="cpu"))
    return model


@contextmanager
def syncer_at(broker: str, run: str = "r", **more: Any) -> Iterator[ScriptedSyncer]:
    """A seeded run: every fragment at version 1, all values 5, the static ones 0."""
    settings = RunSettings(run=run, fragments=1, overlap=1, codec_up="int8", codec_down="int4", **more)
    layout = layout_of(model_of(0.0))
    with ScriptedSyncer(broker, settings, layout) as syncer:
        assert syncer.plan is not None
        replica = Replica(model_of(5.0), syncer.plan)
        syncer.put([replica.vector(fragment) for fragment in syncer.plan.fragments], 1, static=bytes(20))
        yield syncer


def talk_of(session: Session) -> core.LearnerCore:
    """What its link says and hears."""
    assert isinstance(session._link, Link)
    return session._link.core


def member(broker: str, model: nn.Module, **more: Any) -> Session:
    trained = [p for p in model.parameters() if p.requires_grad]
    return join(broker, model, torch.optim.SGD(trained, lr=1.0), **({"name": "me", "run": "r"} | more))


# --- torch's modes ---------------------------------------------------------------------------------------------------
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


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def move(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for name in ("wide", "narrow"):
            model.get_parameter(name).add_(by)


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


# --- forks -----------------------------------------------------------------------------------------------------------
def in_fork(work: Callable[[], object]) -> str:
    """What `work` returns in a forked process, or the type and text of what it raises there."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of each fork beside a thread
        pid = os.fork()
    if pid == 0:
        try:
            said = str(work())
        except BaseException as error:  # noqa: BLE001 - it is what the test looks at
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said_there:
        answer = said_there.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return answer


def test_a_forked_process_that_ends_inside_the_loop_does_nothing_in_its_parents_name(
    broker: str, tmp_path: Path
) -> None:
    def leave(how: BaseException) -> None:
        with session, session.global_weights():
            raise how

    with syncer_at(broker) as syncer:
        model = model_of(-1.0)
        model.share_memory()
        session = member(broker, model, tape=tmp_path)
        move(model, 1.0)
        assert session.step(tokens=1)
        (tape,) = tmp_path.iterdir()
        before = tape.read_text()
        own = [p.detach().clone() for p in model.parameters()]
        assert in_fork(session.close) == "None"
        assert in_fork(lambda: session.__exit__(None, None, None)) == "None"
        for call in ("step()", "progress", "global_weights()"):
            work = {
                "step()": lambda: session.step(tokens=1),
                "progress": lambda: session.progress.fraction,
                "global_weights()": lambda: leave(SystemExit(0)),
            }[call]
            said = in_fork(work)
            assert said.startswith(f"DilocoError: session of me: {call} in process "), said
            assert f"a fork of process {os.getpid()}, which joined" in said
        with session.global_weights():
            assert in_fork(lambda: session.__exit__(SystemExit, SystemExit(0), None)) == "None"
        assert all(torch.equal(p.detach(), then) for p, then in zip(model.parameters(), own, strict=True))
        assert tape.read_text() == before
        assert session.step(tokens=1)
        assert not syncer.all_of(Goodbye)
        session.close("stopped")
        assert len(syncer.wait_for(Goodbye)) == 1


def test_a_process_that_is_forked_inside_global_weights_leaves_shared_parameters_alone(broker: str) -> None:
    with syncer_at(broker):
        model = model_of(-1.0)
        model.share_memory()
        session = member(broker, model)
        move(model, 1.0)
        looking = session.global_weights()
        looking.__enter__()
        shown = model.get_parameter("wide").detach().clone()
        assert in_fork(lambda: looking.__exit__(None, None, None)) == "False", "nothing is swallowed"
        assert torch.equal(model.get_parameter("wide").detach(), shown)
        looking.__exit__(None, None, None)
        assert model.get_parameter("wide").eq(6).all()
        session.close("stopped")


def test_a_forked_process_may_join_by_itself(broker: str) -> None:
    def work() -> str:
        torch.set_num_threads(1)
        with member(broker, model_of(-1.0), name="other") as other:
            return f"{other.step(tokens=1)} {other.name}"

    with syncer_at(broker) as syncer, member(broker, model_of(-1.0)) as session:
        assert in_fork(work) == "True other"
        assert [goodbye.name for goodbye in syncer.wait_for(Goodbye)] == ["other"]
        assert session.step(tokens=1)


def test_an_observer_is_not_at_work_in_a_forked_process(broker: str) -> None:
    with syncer_at(broker) as syncer, Observer(broker, model_of(0.0), run="r") as seen:
        assert in_fork(seen.close) == "None"
        for work in (seen.load, lambda: seen.beat, lambda: seen.progress):
            assert in_fork(work).startswith("DilocoError: observer ")
        assert seen.load() == tuple(syncer.versions)


def test_forked_workers_of_a_data_loader_work_beside_a_session(broker: str) -> None:
    data = torch.arange(8.0, device="cpu")
    with syncer_at(broker) as syncer, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = model_of(-1.0)
        with member(broker, model) as session:
            loader: Iterable[torch.Tensor] = DataLoader(
                TensorDataset(data), batch_size=2, num_workers=2, multiprocessing_context="fork"
            )
            for epoch in (1, 2):
                read = []
                for (batch,) in loader:
                    read.append(batch)
                    move(model, 0.5)
                    assert session.step(tokens=len(batch))
                assert torch.equal(torch.cat(read), data)
                assert session.tokens == 8 * epoch
            assert not syncer.all_of(Goodbye)


# --- a link that dies ------------------------------------------------------------------------------------------------
def die(thread: threading.Thread, how: type[BaseException]) -> None:
    """Have `how` raised in a thread that runs, wherever it is."""
    assert thread.ident is not None
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(how)) == 1
    wait_for(lambda: not thread.is_alive(), "the thread has ended")


@pytest.mark.parametrize("how", [SystemExit, MemoryError, KeyboardInterrupt, GeneratorExit, RuntimeError])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_the_links_thread_dies_of_the_next_step_says_so(broker: str, how: type[BaseException]) -> None:
    with syncer_at(broker):
        session = member(broker, model_of(-1.0))
        assert isinstance(session._link, Link)
        die(session._link._thread, how)
        for _ in range(2):
            with pytest.raises(DilocoError, match=rf"the link of me to tcp://.* failed: {how.__name__}"):
                session.step(tokens=1)
        session.close("failed")


def serves(thread: threading.Thread) -> bool:
    """Whether a link's thread has entered its loop; an exception raised in it before would never reach the link."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_name != "_serve":
        frame = frame.f_back
    return frame is not None


def test_a_join_whose_thread_dies_says_so_at_once(broker: str) -> None:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            member(broker, model_of(-1.0), run="nobodys", name="early")
        except DilocoError as error:
            raised.append(error)

    waiting = threading.Thread(target=work, daemon=True)
    waiting.start()
    links = wait_for(
        lambda: [t for t in threading.enumerate() if t.name == "diloco-link-early" and serves(t)], "its link is up"
    )
    die(links[0], SystemExit)
    waiting.join(10)
    assert "the link of early to" in str(raised[0])


# --- steps that are no steps, models that change ---------------------------------------------------------------------
def trained(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> None:
    """Gradients of `scale` are added, and the optimizer steps if they are finite, as under a gradient scaler."""
    sum(p.float().sum() * scale for p in trained_of(model)).backward()  # type: ignore[union-attr]
    if scale < float("inf"):
        optimizer.step()
        optimizer.zero_grad()


def test_what_was_not_stepped_is_not_sent(broker: str) -> None:
    model = model_of(-1.0)
    optimizer = torch.optim.SGD(trained_of(model), lr=0.25)
    with syncer_at(broker) as syncer, join(broker, model, optimizer, name="me", run="r") as session:
        syncer.call(0, 0)
        wait_for(lambda: session._mailbox._calls, "the call is heard")
        for _ in range(3):
            trained(model, optimizer, float("inf"))
            assert session.step(tokens=10)
            optimizer.zero_grad()
        sum(p.float().sum() for p in trained_of(model)).backward()  # type: ignore[union-attr]
        assert session.step(tokens=10)
        assert not session._mailbox._captures
        trained(model, optimizer)
        assert session.step(tokens=10)
        answer, _ = syncer.delta(slot=0, name="me")
        assert (answer.steps_from, answer.steps_to, answer.tokens_from, answer.tokens_to) == (0, 1, 0, 20)


def test_a_learner_whose_model_changes_leaves_with_a_sentence(broker: str) -> None:
    model = model_of(-1.0)
    optimizer = torch.optim.SGD(trained_of(model), lr=0.25)

    def script() -> None:
        with join(broker, model, optimizer, name="me", run="r") as session:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float32, device="cpu"))]})
            trained(model, optimizer)
            session.step(tokens=10)

    with syncer_at(broker) as syncer:
        with pytest.raises(SettingError, match=r"group 1 of SGD holds a tensor of shape \[3\]"):
            script()
        assert syncer.wait_for(Goodbye)[0].reason == "failed"
