from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from decoupled_diloco.common.config import LearnerConfig, RunSettings, TaskSettings
from decoupled_diloco.common.errors import PeerLost, SettingError
from decoupled_diloco.common.fragments import Layout
from decoupled_diloco.common.wire import Alive, Beat, Goodbye, Hello
from decoupled_diloco.learner.model_layout import layout_of
from decoupled_diloco.learner.replica import Replica
from decoupled_diloco.learner.task.evaluator import main as evaluate_run
from decoupled_diloco.learner.task.main import main
from decoupled_diloco.learner.task.text import load_corpus
from decoupled_diloco.learner.task.transformer import Transformer
from decoupled_diloco.monitor.report import read_evaluations
from scripted_syncer import ScriptedSyncer, running_broker
from transport import free_ports
from waiting import wait_for

TASK = TaskSettings(layers=1, width=32, sequence_length=32, batch_sequences=2)
SETTINGS = RunSettings(run="text", fragments=2, sync_every=4, overlap=1)


class TextRun(ScriptedSyncer):
    """A run that trains the built-in model on a text with this hash ('' = any)."""

    task: TaskSettings | None = TASK
    data_hash = ""

    def __init__(self, address: str, layout: Layout | None = None) -> None:
        super().__init__(address, SETTINGS, layout)
        self.address = address

    def _beat(self) -> Beat:
        task = {} if self.task is None else self.task.to_map()
        return replace(super()._beat(), task=task, data_hash=self.data_hash)


@pytest.fixture
def run() -> Iterator[TextRun]:
    with running_broker() as address, TextRun(address) as syncer:
        syncer.verdict = syncer.seed_first
        yield syncer


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    for number, handler in before:
        signal.signal(number, handler)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_bytes(b"All work and no play makes a dull model. " * 100)
    return path


def config(run: TextRun) -> LearnerConfig:
    return LearnerConfig(broker=run.address, name="a", join_timeout_seconds=20)


def started(command: str, address: str, *arguments: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-P", "-m", "decoupled_diloco.cli", command, "--broker", address, *arguments]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> int:
    out, err = process.communicate(timeout=60)
    assert process.returncode in {0, 2, 3}, out + err
    return process.returncode


def test_a_learner_without_enough_text_reports_it_and_never_introduces_itself(run: TextRun, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_bytes(b"x" * 32)
    with pytest.raises(SettingError, match=r"short\.txt holds 32 tokens .* needs 33;"):
        main(config(run), data=tmp_path / "short.txt")
    assert run.all_of(Hello) == []


def test_a_run_of_somebodys_own_model_is_no_place_for_the_built_in_learner(run: TextRun, book: Path) -> None:
    run.task = None
    with pytest.raises(SettingError, match="run text trains a model of its learners' own; join it from your own"):
        main(config(run), data=book)


@pytest.mark.parametrize("device", ["warp", "cuda:99"])
def test_a_device_that_is_not_here_is_named(device: str) -> None:
    with pytest.raises(SettingError, match=f"--device {device} (is unknown; choose|cannot be used here: .+)"):
        main(LearnerConfig(broker="tcp://127.0.0.1:1", name="a"), device=device)


def test_where_no_run_is_heard_the_learner_gives_up_after_its_time_out() -> None:
    address = f"tcp://127.0.0.1:{free_ports()}"
    with pytest.raises(PeerLost, match=address):
        main(LearnerConfig(broker=address, name="a", join_timeout_seconds=0.5))


def test_a_learner_trains_from_the_first_seed_to_the_end_of_the_run(run: TextRun, book: Path) -> None:
    process = started("learner", run.address, "--name", "a", "--data", str(book), "--threads", "1")
    wait_for(lambda: any(alive.local_steps > 3 for alive in run.all_of(Alive, name="a")), "inner steps", 60)
    (hello, *_) = run.all_of(Hello)
    assert hello.data_hash == load_corpus(book, TASK.sequence_length).sha256
    assert run.layout == layout_of(Transformer(TASK, seed=0))
    run.call(0, slot=0)
    delta, values = run.delta(slot=0, name="a")
    assert delta.tokens_to - delta.tokens_from == (delta.steps_to - delta.steps_from) * TASK.tokens_per_step
    assert float(values.norm()) > 0
    run.finish()
    assert ended(process) == 0
    (*_, goodbye) = run.all_of(Goodbye)
    assert (goodbye.reason, goodbye.model_hash) == ("finished", run.model_hash)


def test_a_learner_that_is_asked_to_stop_says_goodbye_and_ends_well(run: TextRun, book: Path) -> None:
    process = started("learner", run.address, "--name", "a", "--data", str(book), "--threads", "1")
    wait_for(lambda: any(alive.local_steps > 3 for alive in run.all_of(Alive, name="a")), "inner steps", 60)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 0
    assert [goodbye.reason for goodbye in run.all_of(Goodbye)][-1] == "left"


def test_a_learner_with_a_text_of_its_own_warns_and_trains(run: TextRun, book: Path) -> None:
    run.data_hash = "ab" * 32
    process = started("learner", run.address, "--name", "a", "--data", str(book), "--threads", "1")
    wait_for(lambda: any(alive.local_steps > 0 for alive in run.all_of(Alive, name="a")), "inner steps", 60)
    process.send_signal(signal.SIGHUP)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 0, told
    assert "WARNING text_differs" in told
    assert [goodbye.reason for goodbye in run.all_of(Goodbye)][-1] == "left", "its terminal was closed"


def test_a_learner_that_still_waits_for_a_run_stops_at_once() -> None:
    process = started("learner", f"tcp://127.0.0.1:{free_ports()}", "--join-timeout", "500")
    assert process.stderr is not None
    wait_for(lambda: process.stderr is not None and "waiting" in process.stderr.readline(), "a learner that waits", 60)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 0


def test_the_evaluator_judges_version_zero_and_the_final_model_and_ends(book: Path) -> None:
    model = Transformer(TASK, seed=0)
    with running_broker() as address, TextRun(address, layout_of(model)) as run:
        assert run.plan is not None
        run.put([Replica(model, run.plan).vector(fragment) for fragment in run.plan.fragments], version=0)
        run.data_hash = load_corpus(book, TASK.sequence_length).sha256
        place = ["--data", str(book), "--dir", str(book.parent)]
        process = started("evaluator", address, *place, "--eval-every", "0.1")
        wait_for(lambda: len(read_evaluations(book.parent)) >= 2, "evaluations", 60)
        run.finish()
        assert ended(process) == 0
        assert run.all_of(Goodbye) == []
    rows = [(e.part, e.size) for e in read_evaluations(book.parent)]
    assert rows[0] == ("B", "full")
    assert rows[-2:] == [("A", "full"), ("B", "full")]
    assert json.loads((book.parent / "text.json").read_text())["sha256"] == run.data_hash


def test_an_evaluator_with_another_text_than_the_run_is_notified(run: TextRun, book: Path) -> None:
    run.data_hash = "ab" * 32
    with pytest.raises(SettingError, match=r"run text trains another text than .*book\.txt; give the same --data"):
        evaluate_run(config(run), book, 1.0)
    assert run.all_of(Hello) == []
