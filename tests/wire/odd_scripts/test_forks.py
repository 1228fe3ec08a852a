"""A script that forks, a link that dies, steps that are no steps."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from decoupled_diloco.common.errors import DilocoError, SettingError
from decoupled_diloco.common.wire import Goodbye
from decoupled_diloco.learner.link import Link
from decoupled_diloco.learner.observer import Observer
from decoupled_diloco.learner.session import join
from odd_scripts import member, model_of, move, syncer_at, trained, trained_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from waiting import wait_for


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


def die(thread: threading.Thread, how: type[BaseException]) -> None:
    """Have `how` raised in a thread that runs, wherever it is."""
    assert thread.ident is not None
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(how)) == 1
    wait_for(lambda: not thread.is_alive(), "the thread has ended")


@pytest.mark.parametrize("how", [SystemExit, MemoryError, KeyboardInterrupt, GeneratorExit, RuntimeError])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_the_links_thread_dies_of_the_next_step_reports_it(broker: str, how: type[BaseException]) -> None:
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


def test_a_join_whose_thread_dies_reports_it_at_once(broker: str) -> None:
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
