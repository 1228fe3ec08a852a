"""`diloco up` with all its real processes: one run to its end, and one that is treated badly."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from decoupled_diloco.cli.commands import run_command
from decoupled_diloco.common.run_folder import RunFolder
from decoupled_diloco.monitor.status import RunSource, RunStatus
from waiting import wait_for

DILOCO = [sys.executable, "-P", "-m", "decoupled_diloco.cli"]
TINY = ["--layers", "2", "--width", "64", "--sequence-length", "64", "--batch-sequences", "4", "--threads", "1"]
KEYS = {
    "run", "steps", "cycles", "merges", "learners", "val_loss_first", "val_loss_last", "tokens_reported",
    "tokens_merged", "tokens_pending", "tokens_lost", "faults", "uptime", "merge_participation", "goodput",
    "useful_share", "stall_share", "bytes_up", "bytes_down", "bytes_f32_allreduce", "model_hash", "seconds",
}  # fmt: skip
FOR_EVER = str(10**7)


class Up:
    """One `diloco up` as a child, in a folder of its own."""

    def __init__(self, place: Path, *arguments: str, reader_of_display: bool = False) -> None:
        """`reader_of_display`: what is shown goes into a pipe, `process.stderr`, and not into a file."""
        self.place = place
        self.out, self.err = place / "out.txt", place / "err.txt"
        with self.out.open("a") as out, self.err.open("a") as err:
            self.process = subprocess.Popen(
                [*DILOCO, "up", *arguments], cwd=place, stdout=out, start_new_session=True,
                stderr=subprocess.PIPE if reader_of_display else err,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Also a test that failed leaves nothing behind: with `up`, all its children go."""
        self.process.kill()
        self.process.wait()

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.place / "runs" / "it")

    def told(self) -> str:
        return f"{self.out.read_text()}\n{self.err.read_text()}"

    def now(self) -> RunStatus:
        assert self.process.poll() is None, self.told()
        where = self.folder.run_map()
        return (
            RunSource("it", where["redis"], self.folder).read()
            if "redis" in where
            else RunStatus(run="it", state="starting")
        )

    def merges(self) -> int:
        return int(self.now().summary.get("merges", 0))

    def pid(self, name: str) -> int:
        return int(self.folder.run_map()["processes"].get(name, 0))

    def wait_for_merges(self, more: int, why: str) -> None:
        """So many merges from now on."""
        goal = self.merges() + more
        wait_for(lambda: self.merges() >= goal, f"{why}: {goal} merges", 60)

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(30)


# --- one run to its end ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of a run `it` that went through its 60 steps."""
    place = tmp_path_factory.mktemp("finished")
    with Up(place, "--run", "it", "--steps", "60", "--json", "--tape", *TINY, reader_of_display=True) as up:
        assert up.process.stderr is not None
        up.process.stderr.readline()
        up.process.stderr.close()  # as `head -1` does
        assert up.process.wait(120) == 0, up.told()
    return place


@pytest.fixture
def figures(finished: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((finished / "out.txt").read_text().splitlines()[-1])
    return told


def test_a_run_ends_with_one_line_of_json_and_nothing_else_on_stdout(finished: Path, figures: dict[str, Any]) -> None:
    assert set(figures) == KEYS
    assert (finished / "out.txt").read_text().count("\n") == 1
    assert figures["run"] == "it"
    assert figures["steps"] == 60
    assert figures["cycles"] >= 2
    assert figures["merges"] > 0
    assert figures["faults"] == 0
    assert figures["model_hash"]


def test_a_run_whose_display_lost_its_reader_went_on_and_says_so_in_its_log(finished: Path) -> None:
    events = [json.loads(line) for line in RunFolder(finished / "runs" / "it").log("up").read_text().splitlines()]
    lost = [(event["stream"], event["reason"]) for event in events if event["event"] == "display_lost"]
    assert lost == [("stderr", "Broken pipe")]


def test_the_ledger_of_a_finished_run_agrees_to_the_token(figures: dict[str, Any]) -> None:
    whole = figures["tokens_merged"] + figures["tokens_pending"] + figures["tokens_lost"]
    assert figures["tokens_reported"] == whole
    assert figures["tokens_pending"] == 0
    assert figures["tokens_reported"] == sum(row["tokens_reported"] for row in figures["learners"])
    assert [row["name"] for row in figures["learners"]] == ["learner-1", "learner-2"]
    for row in figures["learners"]:
        assert set(row) == {"name", "local_steps", "tokens_reported", "tokens_merged", "stall_share"}
        assert row["tokens_reported"] % 256 == 0


def test_a_run_learns_and_its_shares_are_shares(figures: dict[str, Any]) -> None:
    assert figures["val_loss_last"] < figures["val_loss_first"]
    for name in ("uptime", "merge_participation", "goodput", "useful_share", "stall_share"):
        assert 0 <= figures[name] <= 1, name


def test_a_run_leaves_its_results_in_its_folder_and_no_process(finished: Path) -> None:
    folder = RunFolder(finished / "runs" / "it")
    left = {path.name for path in folder.path.iterdir()}
    expected = {"settings.json", "summary.json", "model.safetensors", "metrics.csv", "loss.png", "evaluations.jsonl"}
    assert expected <= left
    assert any((folder.path / "global").glob("checkpoint-*"))
    for name in ("up", "broker", "syncer", "evaluator", "learner-1", "learner-2"):
        lines = folder.log(name).read_text().splitlines()
        assert lines, name
        assert all({"ts", "level", "process", "event"} <= set(json.loads(line)) for line in lines)
    assert folder.run_map()["processes"] == {}
    assert not folder.is_up()


def test_a_finished_run_can_be_looked_at(
    finished: Path, figures: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told_by(*arguments: str) -> str:
        assert run_command(list(arguments)) == 0
        return capsys.readouterr().out

    monkeypatch.chdir(finished)
    told = json.loads(told_by("status", "it", "--json"))
    assert {name: told[name] for name in KEYS} == figures
    assert told["state"] == "finished"
    assert "validation loss" in told_by("status", "it")
    assert "loss.png" in told_by("report", "it")
    assert told_by("sample", "it", "--prompt", "import ", "--bytes", "20").startswith("import ")
    assert told_by("export", "it", "--to", "copy.safetensors").strip() == "copy.safetensors"
    model = finished / "runs" / "it" / "model.safetensors"
    assert (finished / "copy.safetensors").read_bytes() == model.read_bytes()


def test_a_finished_run_that_was_taped_is_done_again_to_the_same_bits(
    finished: Path, figures: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["replay", str(finished / "runs" / "it"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["model_hash"], told["merges"]) == (figures["model_hash"], figures["merges"])
    assert told["complete"]


# --- one run that is treated badly -----------------------------------------------------------------------------------
@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    long = ["--steps", FOR_EVER, "--checkpoint-every", "50", "--redis-port", str(port)]
    with Up(tmp_path, "--run", "it", *long, *TINY) as up:
        wait_for(lambda: f"redis-cli -p {port} HGETALL dd:it:run" in up.told(), "the store's port is shown", 60)
        wait_for(lambda: up.merges() > 0, "the first merge", 60)
        yield up


def test_every_process_may_be_killed_and_the_run_may_be_stopped_and_resumed(up: Up, tmp_path: Path) -> None:
    _a_learner_from_outside_joins_and_leaves(up)
    for names in (["learner-1", "evaluator", "store"], ["broker"], ["syncer"]):
        _kill(up, names)
    assert up.folder.run_map()["faults"] == 5
    step = up.now().t

    assert up.interrupt() == 0, up.told()
    assert "diloco up --resume runs/it" in up.told()
    reached = up.folder.summary()["t"]
    assert reached >= step

    with Up(tmp_path, "--resume", "runs/it") as again:
        wait_for(lambda: again.now().t > reached, "the resumed run is past where the first part stopped", 60)
        pids = list(again.folder.run_map()["processes"].values())
        again.process.send_signal(signal.SIGINT)
        again.process.send_signal(signal.SIGTERM)
        assert again.process.wait(10) == 130
        wait_for(lambda: not any(_lives(pid) for pid in pids), "nobody is left")


def _a_learner_from_outside_joins_and_leaves(up: Up) -> None:
    broker = up.folder.run_map()["broker"]
    with subprocess.Popen([*DILOCO, "learner", "--broker", broker, "--name", "guest"], stderr=subprocess.PIPE) as guest:
        try:
            wait_for(lambda: _learner(up, "guest").get("tokens_merged", 0) > 0, "the guest's work is merged", 60)
            told = up.now().figures()
            assert set(told) >= KEYS
            assert told["processes"]["guest"] == guest.pid
            assert told["processes"]["learner-1"] == up.pid("learner-1")
        finally:
            guest.send_signal(signal.SIGINT)
            assert guest.stderr is not None
            said = guest.stderr.read().decode()
            assert guest.wait(30) == 0, said
    wait_for(lambda: _learner(up, "guest").get("state") == "left", "the guest has left")


def _learner(up: Up, name: str) -> dict[str, Any]:
    return next((dict(row) for row in up.now().learners if row["name"] == name), {})


def _kill(up: Up, names: list[str]) -> None:
    """kill -9; each is started again under its name, a learner as another incarnation, and merging goes on."""
    old = {name: up.pid(name) for name in names}
    before = {name: _learner(up, name).get("incarnation") for name in names}
    for pid in old.values():
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: all(up.pid(name) not in (0, pid) for name, pid in old.items()), f"{names} are started again")
    for name in [name for name in names if name.startswith("learner")]:
        _wait_for_another(up, name, before[name])
    up.wait_for_merges(5, f"after the death of {', '.join(names)}")


def _wait_for_another(up: Up, name: str, incarnation: str | None) -> None:
    wait_for(lambda: _learner(up, name).get("incarnation", incarnation) != incarnation, f"{name} is another one")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- runs that cannot begin ------------------------------------------------------------------------------------------
def test_a_learner_that_cannot_begin_ends_the_run_with_its_own_sentence(tmp_path: Path) -> None:
    with Up(tmp_path, "--run", "it", "--device", "nonsense", *TINY) as up:
        assert up.process.wait(60) == 2, up.told()
    assert up.err.read_text().strip().startswith("diloco: --device nonsense")
    assert not up.folder.path.exists(), "the same command must work once the device is right"


def test_ctrl_c_before_anything_was_trained_leaves_nothing_behind(tmp_path: Path) -> None:
    with Up(tmp_path, "--run", "it", *TINY) as up:
        wait_for(lambda: "is starting" in up.told() or up.process.poll() is not None, "it has begun to start", 60)
        assert up.interrupt() == 0, up.told()
    assert not up.folder.path.exists()
