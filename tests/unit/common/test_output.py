"""Output that nobody takes ends no program: pipes without a reader, full disks, closed descriptors, lost terminals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WORK = """
import sys, time
from pathlib import Path
import click
from rich.console import Console
from rich.live import Live
from decoupled_diloco.cli.commands import _open_log, group, main
from decoupled_diloco.common.log import get_logger
from decoupled_diloco.common.output import make_stdout_expendable

@group.command()
@click.option("--live", is_flag=True)
@click.pass_context
def work(context, *, live):
    _open_log(context, "worker", object())
    make_stdout_expendable()
    console = Console(force_terminal=live)
    with Live(console=console, auto_refresh=False) as shown:
        for number in range(5):
            print("printed", number, flush=True)
            click.echo(f"echoed {number}")
            console.print("shown", number)
            shown.update(str(number), refresh=True)
            get_logger("worker").warning("worked", number=number)
    Path("done").touch()
    print("last words, flushed at the end")
    return 0

import decoupled_diloco.cli.commands as cli
cli.effective_settings = lambda config, **more: {}
main(sys.argv[1:])
"""


@contextlib.contextmanager
def descriptor(kind: str) -> Iterator[int]:
    """Something to write to that takes nothing."""
    if kind == "pipe":
        read, write = os.pipe()
        os.close(read)
    elif kind == "disk":
        write = os.open("/dev/full", os.O_WRONLY)
    else:
        master, write = os.openpty()
        os.close(master)
    try:
        yield write
    finally:
        os.close(write)


def run(
    place: Path, arguments: list[str], out: int | None = None, err: int | None = None, around: str = ""
) -> subprocess.CompletedProcess[bytes]:
    """A Python program with these descriptors; `around`: redirections by a shell."""
    command = [sys.executable, "-P", *arguments]
    if around:
        command = ["sh", "-c", f'exec "$@" {around}', "sh", *command]
    return subprocess.run(
        command, cwd=place, stdin=subprocess.DEVNULL, check=False, timeout=60, start_new_session=True,
        stdout=subprocess.PIPE if out is None else out, stderr=subprocess.PIPE if err is None else err,
    )  # fmt: skip


def lost(file: Path) -> list[tuple[str, str]]:
    events: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    return [(event["stream"], event["reason"]) for event in events if event["event"] == "display_lost"]


REASONS = {"pipe": "Broken pipe", "disk": "No space left on device", "terminal": "Input/output error"}


@pytest.mark.parametrize("kind", REASONS)
def test_a_display_that_cannot_be_written_is_given_up_and_the_work_continues(tmp_path: Path, kind: str) -> None:
    arguments = ["-c", WORK, "--log-file", "log", "work", *(["--live"] if kind != "disk" else [])]
    with descriptor(kind) as nowhere:
        done = run(tmp_path, arguments, out=nowhere, err=nowhere)
    assert done.returncode == 0
    assert (tmp_path / "done").exists()
    told = (tmp_path / "log").read_text()
    assert told.count('"event":"worked"') == 5
    assert sorted(lost(tmp_path / "log")) == [("stderr", REASONS[kind]), ("stdout", REASONS[kind])]


def test_descriptors_that_are_closed_from_the_start_get_no_text_of_ours_and_no_file(tmp_path: Path) -> None:
    done = run(tmp_path, ["-c", WORK, "--log-file", "log", "work"], around="<&- >&- 2>&-")
    assert done.returncode == 0
    assert (tmp_path / "done").exists()
    told = (tmp_path / "log").read_text().splitlines()
    assert all(line.startswith('{"ts":') for line in told), "what was printed went into the log file"
    assert [stream for stream, _ in lost(tmp_path / "log")] == ["stderr", "stdout"]


def test_a_full_pipe_that_does_not_block_loses_nothing_that_is_read_in_time(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    code = (
        "import decoupled_diloco.common.output as output; output.protect()\n"
        "for number in range(30_000): print('line', number)\n"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", code], cwd=tmp_path, stdout=write) as child:
        os.close(write)
        with open(read) as pipe:  # noqa: PTH123 a descriptor
            assert [line.split() for line in pipe] == [["line", str(number)] for number in range(30_000)]
    assert child.returncode == 0


RESULT = ["-m", "decoupled_diloco.cli", "--version"]


def test_a_result_that_cannot_be_written_is_an_error_except_where_its_reader_had_enough(tmp_path: Path) -> None:
    with descriptor("disk") as nowhere:
        full = run(tmp_path, RESULT, out=nowhere)
    assert (full.returncode, full.stderr) == (
        1, b"diloco: standard output could not be written: No space left on device\n",
    )  # fmt: skip
    closed = run(tmp_path, RESULT, around=">&-")
    assert (closed.returncode, closed.stderr) == (
        1, b"diloco: standard output could not be written: Bad file descriptor\n",
    )  # fmt: skip
    with descriptor("pipe") as nowhere:
        left = run(tmp_path, RESULT, out=nowhere)
    assert (left.returncode, left.stderr) == (0, b"")


def test_an_error_that_cannot_be_said_keeps_its_exit_code(tmp_path: Path) -> None:
    with descriptor("pipe") as nowhere:
        assert run(tmp_path, ["-m", "decoupled_diloco.cli", "status", "nothing"], err=nowhere).returncode == 2
    assert run(tmp_path, ["-m", "decoupled_diloco.cli", "status", "nothing"], around="2>&-").returncode == 2


def test_the_figures_of_a_run_that_do_not_arrive_are_an_error_once_all_is_saved(tmp_path: Path) -> None:
    code = (
        "import sys; from decoupled_diloco.common.output import protect; protect()\n"
        "from decoupled_diloco.cli.commands import run_command; import decoupled_diloco.compose.up as module\n"
        "module.up = lambda *_: module._deliver('{}', 'runs/it') or 0\n"
        "sys.exit(run_command(['up', '--json']))\n"
    )
    for kind in ("pipe", "disk"):
        with descriptor(kind) as nowhere:
            done = run(tmp_path, ["-c", code], out=nowhere)
        assert done.returncode == 1
        assert done.stderr.decode() == (
            f"diloco: the figures of runs/it could not be written to standard output: {REASONS[kind]}; "
            "the run is saved, and `diloco status runs/it --json` prints them again\n"
        )


def test_a_watch_that_nobody_sees_ends(tmp_path: Path) -> None:
    code = (
        "import sys; from decoupled_diloco.common.output import protect; protect()\n"
        "from decoupled_diloco.monitor.status import RunStatus; from decoupled_diloco.monitor.watch import follow\n"
        "class Source:\n"
        "    def read(self): return RunStatus(run='it', state='running', t=1, steps=9)\n"
        "sys.exit(follow(Source()))\n"
    )
    with descriptor("pipe") as nowhere:
        assert run(tmp_path, ["-c", code], out=nowhere).returncode == 0


def test_a_program_that_joins_a_run_keeps_its_exit_code_when_its_log_lines_have_no_reader(tmp_path: Path) -> None:
    code = "from decoupled_diloco.common.log import get_logger; get_logger('learner').info('joined')"
    with descriptor("pipe") as nowhere:
        assert run(tmp_path, ["-c", code], err=nowhere).returncode == 0
    assert run(tmp_path, ["-c", code], around="2>&-").returncode == 0
    assert b" learner joined" in run(tmp_path, ["-c", code]).stderr


def test_under_nohup_a_closed_terminal_is_no_stop_request(tmp_path: Path) -> None:
    code = (
        "import os, signal; from decoupled_diloco.compose.signals import StopRequest\n"
        "signal.signal(signal.SIGHUP, signal.{before})\n"
        "with StopRequest() as request:\n"
        "    os.kill(os.getpid(), signal.SIGHUP); print(request.requested)\n"
    )
    for before, requested in ((signal.SIG_IGN, b"False\n"), (signal.SIG_DFL, b"True\n")):
        assert run(tmp_path, ["-c", code.replace("{before}", before.name)]).stdout == requested


def test_a_closing_terminal_is_one_stop_request_even_if_it_signals_twice(tmp_path: Path) -> None:
    up = (
        "import os, signal; from decoupled_diloco.compose.signals import StopRequest\n"
        "with StopRequest() as request:\n"
        "    for number in ({first}, signal.SIGHUP, signal.SIGHUP): os.kill(os.getpid(), number)\n"
        "    print(request.requested, request.count)\n"
    )
    for first in ("signal.SIGHUP", "signal.SIGINT"):
        assert run(tmp_path, ["-c", up.replace("{first}", first)]).stdout == b"True 1\n"
    learner = (
        "import os, signal; from decoupled_diloco.learner.task.startup import StopFlag\n"
        "stop = StopFlag(); stop.interrupts = False\n"
        "for _ in range(2): os.kill(os.getpid(), signal.SIGHUP)\n"
        "print(stop.requested.is_set())\n"
    )
    assert run(tmp_path, ["-c", learner]).stdout == b"True\n"


INTERRUPTED = """
import signal, sys
from decoupled_diloco.common.output import protect

armed = False

def interrupt(*_):
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)
protect()
for number in range(200):
    try:
        armed = True
        sys.stdout.write(f"{number}\\n")  # whole: print() writes the end of a line apart
        sys.stdout.flush()
        armed = False
    except KeyboardInterrupt:
        pass
signal.signal(signal.SIGINT, signal.SIG_IGN)
"""


def test_a_line_that_is_interrupted_as_it_goes_out_is_written_once() -> None:
    command = [sys.executable, "-P", "-c", INTERRUPTED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = []
        for line in child.stdout:
            lines.append(int(line))
            child.send_signal(signal.SIGINT)
    assert child.returncode == 0
    assert lines == sorted(set(lines)), lines
    assert len(lines) > 1
