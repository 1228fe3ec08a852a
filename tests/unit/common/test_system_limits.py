"""Few open files, few threads: the limit is named, and nothing is left open. Each in the process or a child of it."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from child import output_of
from decoupled_diloco.broker.__main__ import ConnectionLimit
from decoupled_diloco.broker.broker import Broker
from decoupled_diloco.common.config import BrokerConfig
from decoupled_diloco.common.errors import LimitReached
from decoupled_diloco.common.system_limits import check_room
from decoupled_diloco.compose.processes import spawn
from decoupled_diloco.learner.discover import discover
from decoupled_diloco.learner.observer import Observer
from decoupled_diloco.learner.session import join
from decoupled_diloco.monitor.ping import ping
from decoupled_diloco.syncer.transport import Transport
from torch import nn
from transport import free_ports

NOWHERE = "tcp://127.0.0.1:1"
FEW_THREADS = (  # root is above the limit
    "import os, resource",
    "os.getuid() or os.setuid(54321)",
    "resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))",
)


def open_files() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@contextmanager
def few_files(more: int) -> Iterator[None]:
    """So many more files may be opened than are open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(name) for name in open_files()}
    free = [number for number in range(soft) if number not in taken]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[more], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def joins() -> None:
    join(NOWHERE, nn.Linear(2, 2), None, run="r", name="me")


NEEDS: dict[str, tuple[Callable[[], object], str]] = {
    "a join": (joins, "learner me needs"),
    "an observer": (lambda: Observer(NOWHERE, nn.Linear(2, 2), run="r", name="eye"), "observer eye needs"),
    "looking for a run": (lambda: discover(NOWHERE), "looking for a run needs"),
    "a syncer": (lambda: Transport(NOWHERE, "r", lambda *_: None), "the syncer of run r needs"),
    "a broker": (lambda: Broker(BrokerConfig(port=free_ports())).start(), "the broker needs"),
    "a ping": (lambda: ping(NOWHERE), "a ping needs"),
}


@pytest.mark.parametrize("what", NEEDS)
def test_a_process_that_opens_sockets_names_the_limit_of_open_files_before_it_opens_any(what: str) -> None:
    work, said = NEEDS[what]
    before = open_files()
    with few_files(12), pytest.raises(LimitReached, match=rf"^{said} \d+ more open files: this .* \(ulimit -n\)"):
        work()
    assert open_files() == before


def test_a_process_that_cannot_be_started_for_want_of_files_reports_it(tmp_path: Path) -> None:
    with few_files(2), pytest.raises(LimitReached, match=r"cannot be started .* \(ulimit -n\)"):
        spawn([sys.executable, "-c", "pass"], tmp_path / "err", threads=1)


def test_a_want_of_threads_or_processes_is_named() -> None:
    said = output_of(
        "from pathlib import Path",
        "from decoupled_diloco.common.errors import LimitReached",
        "from decoupled_diloco.common.system_limits import check_room",
        "from decoupled_diloco.compose.processes import spawn",
        *FEW_THREADS,
        "for work in (lambda: check_room('me', files=0, threads=2),",
        "             lambda: spawn([sys.executable], Path(os.devnull), threads=1)):",
        "    try: work()",
        "    except LimitReached as wrong: print(wrong)",
    )
    first, second = said.splitlines()
    assert first.startswith("me needs 2 more threads: its user may have 1 processes and threads at a time (ulimit -u)")
    assert second.startswith("a process of the run cannot be started (")
    assert "(ulimit -u)" in second


@pytest.mark.parametrize("command", ["broker", "ping"])
def test_a_command_under_a_limit_ends_with_one_sentence(command: str) -> None:
    said = output_of(
        "from decoupled_diloco.cli.commands import run_command",
        "import contextlib, io, resource",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))",
        "with contextlib.redirect_stderr(io.StringIO()) as error:",
        f"    code = run_command([{command!r}])",
        "print(code, error.getvalue().splitlines()[-1])",
    )
    assert said.startswith("1 diloco: ")
    assert "may have 20 files open at a time (ulimit -n)" in said


def test_a_broker_says_once_that_it_is_full_and_once_that_it_has_room_again(capsys: pytest.CaptureFixture[str]) -> None:
    room = ConnectionLimit()
    with few_files(3):
        room.look()
        room.look()
    room.look()
    room.look()
    said = capsys.readouterr().err
    assert said.count("broker_full") == said.count("broker_has_room") == 1
    assert "no further client can connect" in said


def test_room_that_is_there_is_only_looked_at() -> None:
    before = open_files()
    check_room("me", files=50, threads=3)
    assert open_files() == before
