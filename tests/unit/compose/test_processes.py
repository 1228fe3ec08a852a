"""Child processes: restarts, back-off, false starts, stop. All children are real, small processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from decoupled_diloco.compose.processes import (
    FIRST_DELAY_SECONDS,
    LONGEST_DELAY_SECONDS,
    Child,
    ChildProcesses,
    Exit,
    spawn,
)
from decoupled_diloco.compose.signals import StopRequest
from waiting import wait_for

SLEEPS = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPS


@pytest.fixture
def family() -> Iterator[ChildProcesses]:
    family = ChildProcesses()
    yield family
    family.kill()


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "child.err"


def python(code: str, output: Path) -> subprocess.Popen[bytes]:
    return spawn([sys.executable, "-S", "-c", code], output, threads=1)


def is_up(output: Path) -> bool:
    return output.exists() and "up" in output.read_text()


def the_exit(family: ChildProcesses) -> Exit:
    return wait_for(lambda: family.poll(time.monotonic()), "the child ended")[0]


def test_a_killed_child_starts_again_after_a_moment(family: ChildProcesses, output: Path) -> None:
    child = family.add("a", lambda: python(SLEEPS, output))
    pid = child.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    ended = the_exit(family)
    assert (ended.name, ended.code, ended.starts) == ("a", -9, 1)
    assert ended.describe() == "killed by signal 9"
    wait_for(lambda: family.poll(time.monotonic()) == [] and child.pid, "it runs again", 10)
    assert child.pid != pid
    assert child.starts == 2


def test_a_child_gets_no_option_behind_the_back_of_its_command_line(
    family: ChildProcesses, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_STEPS", "1")
    family.add("a", lambda: python("import os; print('found', os.environ.get('DILOCO_STEPS'))", output))
    assert the_exit(family).code == 0
    assert output.read_text() == "found None\n"


def test_the_delay_doubles_up_to_its_limit_and_a_long_life_forgives(output: Path) -> None:
    child, now = Child("a", lambda: python("raise SystemExit(3)", output)), 0.0
    delays = []
    for _ in range(9):
        child.start(now)
        wait_for(lambda: child.process is None or child.process.poll() is not None, "it ended")
        child.poll(now)
        delays.append((child.restart_at or 0) - now)
        now += 1
    assert delays[:4] == [FIRST_DELAY_SECONDS * 2**n for n in range(4)]
    assert delays[-1] == LONGEST_DELAY_SECONDS
    assert child.false_starts == 9
    child.start(now)
    wait_for(lambda: child.process is None or child.process.poll() is not None, "it ended")
    child.poll(now + 100)
    assert child.restart_at == now + 100 + FIRST_DELAY_SECONDS
    assert child.false_starts == 0


@pytest.mark.parametrize(
    ("code", "began", "counts"),
    [
        ("import os; os.abort()", None, True),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", None, False),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", True, False),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", False, True),
        ("raise SystemExit(3)", True, True),
        ("pass", False, False),
    ],
    ids=["aborts", "is killed", "is killed at work", "is killed before it began", "fails at work", "ends well"],
)
def test_a_start_is_false_if_the_child_fails_by_itself_or_never_begins(
    output: Path, code: str, began: bool | None, counts: bool
) -> None:
    limits = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "
    child = Child("a", lambda: python(limits + code, output), None if began is None else lambda: began)
    child.start(0.0)
    assert wait_for(lambda: child.poll(1.0), "it ended")
    assert child.false_starts == int(counts)


def test_a_child_that_never_begins_has_a_false_start_however_long_that_takes(output: Path) -> None:
    child = Child("a", lambda: python("raise SystemExit(3)", output), lambda: False)
    child.start(0.0)
    assert wait_for(lambda: child.poll(70.0), "it ended")
    assert child.false_starts == 1


def test_a_child_that_ends_well_is_left_alone(family: ChildProcesses, output: Path) -> None:
    child = family.add("a", lambda: python("pass", output))
    assert the_exit(family).code == 0
    assert child.restart_at is None
    assert family.pids() == {}


def test_one_that_ends_well_again_and_again_starts_after_the_same_delays_as_one_that_fails(output: Path) -> None:
    child, now, delays = Child("a", lambda: python("pass", output)), 0.0, []
    for _ in range(3):
        child.start(now)
        wait_for(lambda: child.process is None or child.process.poll() is not None, "it ended")
        child.poll(now)
        child.schedule_restart(now)
        delays.append((child.restart_at or 0) - now)
    assert delays == [FIRST_DELAY_SECONDS * 2**n for n in range(3)]
    assert child.false_starts == 0


def test_a_start_that_fails_is_tried_again(output: Path) -> None:
    starts: list[OSError | subprocess.Popen[bytes]] = [OSError("no such file"), python("pass", output)]

    def launch() -> subprocess.Popen[bytes]:
        first = starts.pop(0)
        if isinstance(first, OSError):
            raise first
        return first

    child = Child("a", launch)
    failed = child.restart(0.0)
    assert failed is not None
    assert failed.describe() == "no such file"
    assert child.restart_at == FIRST_DELAY_SECONDS
    assert child.restart(1.0) is None
    wait_for(lambda: child.poll(2.0), "the second start ended")


def test_a_stubborn_child_is_killed_at_the_deadline_and_the_others_end_well(
    family: ChildProcesses, tmp_path: Path
) -> None:
    family.add("kind", lambda: python(SLEEPS, tmp_path / "kind"))
    family.add("stubborn", lambda: python(STUBBORN, tmp_path / "stubborn"))
    wait_for(lambda: is_up(tmp_path / "kind") and is_up(tmp_path / "stubborn"), "both are up")
    assert family.stop(["kind", "stubborn"], time.monotonic() + 0.5) == ["stubborn"]
    assert family.running(["kind", "stubborn"]) == []


def test_a_child_leads_a_session_of_its_own(family: ChildProcesses, output: Path) -> None:
    child = family.add("a", lambda: python(SLEEPS, output))
    assert child.pid is not None
    assert os.getsid(child.pid) == child.pid


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    child_code = (
        "import sys, os; from decoupled_diloco.compose.processes import die_with; die_with(int(sys.argv[1]));"
        "open(sys.argv[2], 'w').write(str(os.getpid())); import time; time.sleep(600)"
    )
    parent_code = (
        "import sys, os, subprocess, time;"
        "command = [sys.executable, '-P', '-c', sys.argv[1], str(os.getpid()), sys.argv[2]];"
        "subprocess.Popen(command, start_new_session=True);"
        "time.sleep(600)"
    )
    told = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", parent_code, child_code, str(told)]) as parent:
        try:
            pid = int(wait_for(lambda: told.exists() and told.read_text(), "the child is up"))
        finally:
            parent.kill()
    wait_for(lambda: not _lives(pid), "the child is gone as well")


def _lives(pid: int) -> bool:
    """Zombies count as gone: here nobody may be there to bury them."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_first_signal_requests_a_stop_and_the_second_ends_the_process(tmp_path: Path) -> None:
    code = (
        "from decoupled_diloco.compose.signals import StopRequest; import time\n"
        "with StopRequest() as request:\n"
        "    request.on_second = lambda: print('at once', flush=True)\n"
        "    print('up', flush=True)\n"
        "    while not request.requested: time.sleep(0.01)\n"
        "    print('requested', flush=True)\n"
        "    time.sleep(600)\n"
    )
    output = tmp_path / "out"
    with output.open("w") as file, subprocess.Popen([sys.executable, "-P", "-c", code], stdout=file) as process:
        wait_for(lambda: "up" in output.read_text(), "it is up")
        process.send_signal(signal.SIGINT)
        wait_for(lambda: "requested" in output.read_text(), "the signal was handled")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert output.read_text().endswith("at once\n")


def test_signal_handlers_are_restored_after_the_with_block() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as request:
        assert signal.getsignal(signal.SIGINT) != before
        assert not request.requested
    assert signal.getsignal(signal.SIGINT) == before
