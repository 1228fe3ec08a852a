"""Processes whose peers are gone, or were never there; ports that somebody has; places with difficult names."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from run import MODEL, SCHEDULE, START_SECONDS, STOP_SECONDS, TEXT, Process, Run, is_alive
from transport import free_ports
from waiting import wait_for

pytestmark = pytest.mark.timeout(400)  # whole runs, on a machine that may be busy with others


@pytest.fixture(scope="module")
def lonely(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A learner that looks for a broker where none is, while the other tests go on."""
    address = f"tcp://127.0.0.1:{free_ports()}"
    with Process(
        tmp_path_factory.mktemp("lonely"), "learner", "--broker", address, "--name", "one", "--join-timeout", "12"
    ) as learner:
        yield learner


@pytest.mark.usefixtures("lonely")
def test_learner_and_syncer_end_in_time_and_well_when_they_are_asked_to_after_the_broker_has_gone(
    tmp_path: Path,
) -> None:
    port = free_ports()
    at = ["--broker", f"tcp://127.0.0.1:{port}"]
    text = ["--data", TEXT]
    syncs = [*at, "--run", "it", "--steps", "100000", *MODEL, *SCHEDULE, *text]
    with (
        Process(tmp_path, "broker", "--port", str(port)) as broker,
        Process(tmp_path, "--log-file", "syncer.jsonl", "syncer", *syncs) as syncer,
        Process(tmp_path, "learner", *at, "--name", "one", "--threads", "1", *text) as learner,
    ):
        wait_for(lambda: "merged" in _log(tmp_path / "syncer.jsonl"), "rounds are merged", START_SECONDS)
        broker.child.kill()
        broker.child.wait()
        merged = _log(tmp_path / "syncer.jsonl").count("merged")
        learner.signal(signal.SIGTERM)
        syncer.signal(signal.SIGTERM)
        assert learner.wait(STOP_SECONDS) == 0, learner.output
        assert syncer.wait(STOP_SECONDS) == 0, syncer.output
    assert "goodbye_not_sent" in learner.output
    assert merged > 0
    summary = json.loads((tmp_path / "runs" / "it" / "summary.json").read_text())
    assert summary["state"] == "stopped"
    assert summary["tokens_reported"] == sum(summary[f"tokens_{what}"] for what in ("merged", "pending", "lost"))
    assert list((tmp_path / "runs" / "it" / "global").glob("checkpoint-*"))


def _log(path: Path) -> list[str]:
    """The line that is just being written is left out."""
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line)["event"] for line in whole.splitlines()]


@pytest.mark.parametrize("option", ["--broker-port", "--redis-port"])
def test_a_port_that_another_process_has_is_named_and_nothing_is_begun(tmp_path: Path, option: str) -> None:
    port = free_ports() + 2  # not one that the system gives away: a neighbour of such a port may be taken too
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        first = port - 2 if option == "--broker-port" else port  # one of the broker's four
        with Run(tmp_path, option, str(first)) as run:
            assert run.wait() == 2
            assert f"port {port} on 127.0.0.1 is taken" in run.error_sentence
            assert option in run.error_sentence
        assert not run.folder.path.exists()


def test_a_run_in_a_place_of_umlauts_blanks_and_pictures_needs_no_locale(tmp_path: Path) -> None:
    bare = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": None, "PYTHONIOENCODING": None, "PYTHONCOERCECLOCALE": "0"}
    place = tmp_path / "Läufe für 2 🚀"
    folder = place / "Größe ½"
    with Run(place, "--dir", str(folder), steps=60, evaluator=True, environment=bare) as run:
        run.folder = type(run.folder)(folder)
        told = run.final_figures()
    assert told["steps"] == 60
    for name in ("store", "broker", "syncer", "learner-1", "evaluator"):
        assert name == "store" or run.log(name), name
        assert not run.folder.stderr(name).exists() or not run.folder.stderr(name).read_text(), name
    for command in (["report", str(folder)], ["sample", str(folder), "--bytes", "5"], ["status", str(folder)]):
        with Process(place, *command, environment=bare) as looked:
            assert looked.wait() == 0, looked.output
            assert "Traceback" not in looked.output
    assert not any(is_alive(pid) for pid in run.folder.run_map()["processes"].values())
    assert {"model.safetensors", "loss.png", "metrics.csv"} <= {path.name for path in folder.iterdir()}


def test_a_learner_that_finds_no_broker_reports_it_every_few_seconds_and_gives_up_in_time(lonely: Process) -> None:
    assert lonely.wait(60) == 3
    waits = [line for line in lonely.output.splitlines() if " waiting " in line]
    assert len(waits) == 2, lonely.output
    last = lonely.output.splitlines()[-1]
    assert last.startswith("diloco: a beat of any run was not heard at tcp://127.0.0.1:"), last
