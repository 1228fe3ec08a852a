"""The store at the end of a run, and at the start of a syncer: a syncer's process, and a real store with a password."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from by_hand import events, learner, syncer
from decoupled_diloco.common.redis_client import connect
from decoupled_diloco.compose.embedded_redis import EmbeddedRedis
from run import Process
from scripted_syncer import running_broker
from waiting import wait_for

pytestmark = pytest.mark.timeout(300)  # whole runs, on a machine that may be busy with others

SECRET = "p@s:s#w/o?r%d$ü&+=%41 ' x"  # noqa: S105 - no password; what URLs, files and shells treat in their own way


@dataclass
class Guarded:
    """A store with a password and a disk of its own, and the URL by which a syncer gets in."""

    store: EmbeddedRedis
    directory: Path
    url: str

    @property
    def client(self) -> Any:
        return connect(self.url)

    def end(self) -> int | None:
        """Its exit code; None while it is there."""
        return self.store._child.poll() if self.store._child else None


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    directory, password = tmp_path / "store", tmp_path / "the password"
    password.write_text(SECRET + "\n", encoding="utf-8")
    with EmbeddedRedis(directory, options=("--requirepass", SECRET)) as store:
        yield Guarded(store, directory, f"redis://127.0.0.1:{store.port}/0?password_file={quote(str(password))}")


def whole_run(place: Path, broker: str, url: str, *more: str) -> None:
    with syncer(place, broker, *more, redis=url) as served, learner(place, broker) as trained:
        assert trained.wait(120) == 0, trained.output
        assert served.wait(60) == 0, served.output


def test_a_finished_run_tells_the_store_to_save_and_end_and_all_of_it_is_in_the_file(
    tmp_path: Path, guarded: Guarded
) -> None:
    with running_broker() as broker:
        whole_run(tmp_path, broker, guarded.url, "--stop-redis")
    wait_for(lambda: guarded.end() is not None, "the store has ended")
    assert guarded.end() == 0
    (told,) = events(tmp_path, "redis_stopped", "redis_not_stopped")
    assert told["event"] == "redis_stopped"
    assert (guarded.directory / "dump.rdb").stat().st_size > 0
    guarded.store.start()
    assert guarded.client.hget("dd:it:run", "state") == "finished"
    assert SECRET not in (tmp_path / "syncer.jsonl").read_text()


def test_a_run_that_is_only_stopped_leaves_the_store_alone(tmp_path: Path, guarded: Guarded) -> None:
    with (
        running_broker() as broker,
        syncer(tmp_path, broker, "--stop-redis", steps=10**6, redis=guarded.url) as served,
        learner(tmp_path, broker) as trained,
    ):
        wait_for(lambda: int(guarded.client.hget("dd:it:run", "merges") or 0) > 0, "it trains", 90)
        served.signal(15)
        assert served.wait(30) == 0, served.output
        trained.signal(15)
        trained.wait(30)
    assert guarded.end() is None
    assert guarded.client.ping()
    assert not events(tmp_path, "redis_stopped", "redis_not_stopped")


@pytest.mark.parametrize("trouble", ["cannot save", "is away", "does not allow it"])
def test_a_store_that_does_not_end_costs_one_warning_and_not_the_run(
    tmp_path: Path, guarded: Guarded, trouble: str
) -> None:
    url = guarded.url
    if trouble == "cannot save":
        (guarded.directory / "dump.rdb").mkdir()
    elif trouble == "does not allow it":
        guarded.client.execute_command("ACL", "SETUSER", "ann", "on", "+@all", "-shutdown", "~*", f">{SECRET}")
        url = url.replace("//", "//ann@")
    else:
        guarded.store.stop()
    with running_broker() as broker:
        whole_run(tmp_path, broker, url, "--stop-redis")
    (told,) = events(tmp_path, "redis_stopped", "redis_not_stopped")
    assert (told["event"], told["level"]) == ("redis_not_stopped", "warning")
    assert SECRET not in str(told)
    assert json.loads((tmp_path / "runs" / "it" / "summary.json").read_text())["state"] == "finished"
    if trouble != "is away":
        assert guarded.client.ping()


@pytest.mark.parametrize("login", ["", ":geheim@", "nobody@"])
def test_a_syncer_with_a_wrong_password_reports_it_in_one_sentence_and_makes_no_run(
    tmp_path: Path, guarded: Guarded, login: str
) -> None:
    url = f"redis://{login}127.0.0.1:{guarded.store.port}/0"
    if login == "nobody@":
        url = guarded.url.replace("//", "//nobody@")
    with syncer(tmp_path, "tcp://127.0.0.1:1", redis=url) as served:
        assert served.wait(60) == 2
        assert "authentication failed at redis://" in served.error_sentence
        assert SECRET not in served.output
        assert "geheim" not in served.output
    assert not (tmp_path / "runs").exists()


def test_to_stop_a_store_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with Process(tmp_path, "syncer", "--stop-redis", environment={"DILOCO_REDIS": ""}) as served:
        assert served.wait(60) == 2
        assert "--stop-redis needs --redis" in served.error_sentence


def test_the_password_appears_in_no_command_line_and_no_log(tmp_path: Path, guarded: Guarded) -> None:
    with running_broker() as broker, syncer(tmp_path, broker, redis=guarded.url) as served:
        wait_for(lambda: guarded.client.hget("dd:it:run", "state") == "waiting", "the syncer is in the store", 60)
        arguments = Path(f"/proc/{served.pid}/cmdline").read_bytes()
        assert SECRET.encode() not in arguments
        assert SECRET not in served.output
        assert SECRET not in (tmp_path / "syncer.jsonl").read_text()
