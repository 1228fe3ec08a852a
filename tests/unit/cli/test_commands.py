"""The command line: what it offers, and how it says no."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from decoupled_diloco.cli.commands import group, run_command
from decoupled_diloco.common.config import RunSettings, TaskSettings
from decoupled_diloco.common.run_folder import RunFolder, Setup
from decoupled_diloco.compose.ports import broker_port
from decoupled_diloco.compose.preflight import new_name, prepare
from decoupled_diloco.compose.up_config import UpConfig
from transport import free_ports

UP_OPTIONS = [
    "--learners",
    "--steps",
    "--quorum",
    "--grace-seconds",
    "--sync-every",
    "--fragments",
    "--overlap",
    "--codec-up",
    "--codec-down",
    "--outer-lr",
    "--outer-momentum",
    "--adopt",
    "--layers",
    "--width",
    "--batch-sequences",
    "--sequence-length",
    "--inner-lr",
    "--device",
    "--threads",
    "--eval-every",
    "--data",
    "--run",
    "--dir",
    "--resume",
    "--redis",
    "--redis-port",
    "--broker-port",
    "--seed",
    "--json",
]

Refuse = Callable[..., str]


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Run a command that must be refused with exit code 2 and one sentence; the sentence."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        assert run_command(list(arguments)) == 2
        told = capsys.readouterr()
        assert told.out == ""
        # What a process was told may stand before it, as the first line of its log.
        said = "".join(line for line in told.err.splitlines(keepends=True) if " settings " not in line)
        assert said.startswith("diloco: ")
        assert said.count("\n") == 1, told.err
        return said

    return run


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from decoupled_diloco.cli.commands import run_command; run_command(['--help']);"
        "heavy = {'torch', 'zmq', 'redis', 'matplotlib', 'rich', 'numpy'} & set(sys.modules);"
        "print(*heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert "up" in done.stdout
    assert done.stderr.split() == []


@pytest.mark.parametrize("name", sorted(group.commands))
def test_every_option_explains_itself_and_shows_its_default(name: str) -> None:
    for option in group.commands[name].params:
        if not isinstance(option, click.Option) or option.hidden:
            continue
        assert option.help, f"diloco {name} {option.opts[0]} has no help"
        has_default = (
            option.default not in (None, "") and not option.is_flag and isinstance(option.default, int | float | str)
        )
        assert option.show_default or not has_default, f"diloco {name} {option.opts[0]} hides its default"


def test_the_list_of_commands_tells_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        assert run_command(["--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:")[2]
    assert listed.count("\n") > len(group.commands)
    assert "..." not in listed


def test_up_takes_every_setting_of_a_run() -> None:
    known = {spelling for option in group.commands["up"].params for spelling in option.opts}
    assert set(UP_OPTIONS) <= known


def test_defaults_are_those_of_the_settings() -> None:
    context = group.commands["up"].make_context("up", [])
    assert RunSettings(**{name: context.params[name] for name in RunSettings().to_map()}) == RunSettings()
    assert TaskSettings(**{name: context.params[name] for name in TaskSettings().to_map()}) == TaskSettings()


def test_an_unknown_option_gets_a_suggestion(refuse: Refuse) -> None:
    assert "--learners" in refuse("up", "--lerners", "3")


def test_an_unknown_command_is_named(refuse: Refuse) -> None:
    assert "'trian'" in refuse("trian")


@pytest.mark.parametrize(
    "option", ["--learners", "--steps", "--quorum", "--sync-every", "--overlap", "--layers", "--batch-sequences",
               "--sequence-length", "--outer-lr", "--eval-every"],
)  # fmt: skip
@pytest.mark.parametrize("value", ["0", "-1"])
def test_counts_of_zero_and_below_are_refused(refuse: Refuse, option: str, value: str) -> None:
    assert option in refuse("up", option, value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--quorum", "3", "--learners", "2"], ["--quorum 3", "--learners 2"]),
        (["--grace-seconds", "-1"], ["--grace-seconds"]),
        (["--grace-seconds", "nan"], ["--grace-seconds"]),
        (["--fragments", "30", "--sync-every", "24"], ["--fragments 30", "--sync-every 24"]),
        (["--fragments", "4", "--overlap", "4"], ["--overlap 4", "--fragments 4"]),
        (["--run", "Bad Name"], ["--run", "Bad Name"]),
        (["--run", "名前"], ["--run"]),
        (["--width", "100"], ["--width"]),
        (["--codec-up", "int2"], ["int2", "int4"]),
        (["--steps", "many"], ["--steps", "many"]),
        (["--broker-port", "70000"], ["--broker-port"]),
        (["--redis", "redis://localhost", "--redis-port", "7000"], ["--redis-port"]),
        (["--redis", "http://localhost"], ["--redis"]),
        (["--resume", "nowhere"], ["nowhere"]),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_sentence(
    refuse: Refuse, tmp_path: Path, arguments: list[str], named: list[str]
) -> None:
    sentence = refuse("up", *arguments)
    assert all(word in sentence for word in named), sentence
    assert list(tmp_path.iterdir()) == [], "nothing may be written before everything is checked"


def test_more_fragments_than_tensors_are_refused_before_the_start(refuse: Refuse, tmp_path: Path) -> None:
    sentence = refuse("up", "--layers", "1", "--fragments", "200", "--sync-every", "200")
    assert "200 fragments" in sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [None, 0, 128])
def test_text_that_is_missing_empty_or_too_short_is_refused(refuse: Refuse, tmp_path: Path, size: int | None) -> None:
    text = tmp_path / "text"
    if size is not None:
        text.write_bytes(b"x" * size)
    assert "text" in refuse("up", "--data", str(text), "--sequence-length", "128")
    assert not (tmp_path / "runs").exists()


def test_text_of_one_sequence_and_its_target_is_enough(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"x" * 129)
    config = UpConfig(data=tmp_path / "text", directory=tmp_path / "run")
    prepared = prepare(config, RunSettings(), TaskSettings(sequence_length=128), ())
    prepared.lock.close()
    assert (tmp_path / "run" / "settings.json").exists()


def test_a_taken_port_is_named_and_by_default_avoided(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_ports() + 2  # not one that the system gives away: a neighbour of such a port may be taken too
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert str(port) in refuse("up", "--broker-port", str(port - 2))
        assert str(port) in refuse("up", "--redis-port", str(port))
        monkeypatch.setattr("decoupled_diloco.compose.ports.DEFAULT_PORT", port - 2)
        assert broker_port(0) >= port + 2


def test_two_runs_that_start_in_the_same_moment_do_not_choose_the_same_ports() -> None:
    ask = "from decoupled_diloco.compose.ports import broker_port; print(broker_port(0), flush=True); input()"
    children = [
        subprocess.Popen([sys.executable, "-P", "-c", ask], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        assert len({child.stdout.readline() for child in children if child.stdout}) == 3
    finally:
        for child in children:
            child.communicate("\n")


def test_a_folder_that_holds_another_run_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "runs" / "one", Setup(settings=RunSettings(run="one"), task=TaskSettings()))
    sentence = refuse("up", "--run", "one")
    assert "runs/one" in sentence
    assert "--resume" in sentence


def test_a_folder_with_other_things_in_it_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear all")
    assert "mine" in refuse("up", "--dir", "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]


def test_a_folder_that_cannot_be_made_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file/run" in refuse("up", "--dir", "file/run")


@pytest.fixture
def stopped(tmp_path: Path) -> RunFolder:
    """A run that was stopped after 40 of its 100 steps, on text of its own."""
    (tmp_path / "text").write_bytes(bytes(range(256)) * 20)
    config = UpConfig(learners=3, data=tmp_path / "text", directory=tmp_path / "old")
    prepared = prepare(config, RunSettings(steps=100), TaskSettings(), ())
    prepared.lock.close()
    return prepared.folder


def test_a_run_is_resumed_by_its_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_bytes(b"x" * 500)
    config = UpConfig(data=tmp_path / "text")
    prepare(config, RunSettings(run="mine"), TaskSettings(), {"run"}).lock.close()
    again = prepare(UpConfig(resume=Path("mine")), RunSettings(), TaskSettings(), {"resume"})
    again.lock.close()
    assert again.folder.name == "runs/mine"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["learner", "--threads", "-1"], "--threads"),
        (["learner", "--join-timeout", "0"], "--join-timeout must"),
        (["learner", "--orphan-timeout", "-1"], "--orphan-timeout must"),
        (["learner", "--data", "nowhere"], "nowhere"),
        (["evaluator", "--data", "nowhere"], "nowhere"),
        (["evaluator", "--eval-every", "0"], "--eval-every"),
        (["evaluator", "--eval-every", "nan"], "--eval-every"),
    ],
)
def test_what_a_learner_or_evaluator_cannot_use_is_refused_before_it_looks_for_a_run(
    refuse: Refuse, arguments: list[str], named: str
) -> None:
    assert named in refuse(*arguments)


def test_a_resumed_run_keeps_its_settings_and_may_have_more_steps(stopped: RunFolder) -> None:
    prepared = prepare(UpConfig(resume=stopped.path), RunSettings(steps=200), TaskSettings(), {"resume", "steps"})
    prepared.lock.close()
    assert prepared.setup.settings.steps == 200
    assert prepared.config.learners == 3
    assert not prepared.fresh


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--quorum", "2"], "--quorum"),
        (["--width", "64"], "--width"),
        (["--steps", "50"], "--steps 50"),
        (["--data", "other"], "text"),
    ],
)
def test_a_resumed_run_refuses_what_would_change_it(
    refuse: Refuse, stopped: RunFolder, arguments: list[str], named: str
) -> None:
    Path("other").write_bytes(b"another text" * 100)
    assert named in refuse("up", "--resume", str(stopped.path), *arguments)
    assert stopped.setup().settings.steps == 100


def test_a_resumed_run_is_where_it_was_unless_somebody_else_is_there(stopped: RunFolder) -> None:
    def ports() -> tuple[int, int]:
        prepared = prepare(UpConfig(resume=stopped.path), RunSettings(), TaskSettings(), {"resume"})
        prepared.lock.close()
        return prepared.config.broker_port, prepared.config.redis_port

    first = broker_port(0) + 40
    where = {"broker": f"tcp://127.0.0.1:{first}", "redis": f"redis://127.0.0.1:{first + 8}/0"}
    stopped.write_run_map(where)
    assert ports() == (first, first + 8)
    with socket.socket() as taken, socket.socket() as also:
        taken.bind(("127.0.0.1", first + 3))
        also.bind(("127.0.0.1", first + 8))
        assert ports()[0] not in (0, first)
        assert ports()[1] == 0
    stopped.write_run_map({"broker": "?", "redis": "redis://:***@elsewhere:6379/0"})
    assert ports()[0] > 0
    assert ports()[1] == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--own-model"], "--own-model"),
        (["--data", "other"], "--data other"),
        (["--layers", "3"], "--layers"),
        (["--steps", "50"], "--steps 50"),
    ],
)
def test_a_syncer_refuses_what_would_change_the_run_that_it_finds(
    refuse: Refuse, stopped: RunFolder, arguments: list[str], named: str
) -> None:
    Path("other").write_bytes(b"another text" * 100)
    assert named in refuse("syncer", "--dir", str(stopped.path), *arguments)


def test_a_syncer_refuses_to_begin_from_a_file_that_is_not_there(refuse: Refuse, tmp_path: Path) -> None:
    assert "nowhere.safetensors" in refuse("syncer", "--run", "one", "--init", "nowhere.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_wants_more_steps_to_continue(refuse: Refuse, stopped: RunFolder) -> None:
    (stopped.path / "summary.json").write_text(json.dumps({"state": "finished", "t": 100, "steps": 100}))
    assert "--steps" in refuse("up", "--resume", str(stopped.path))


def test_one_folder_has_one_up_at_a_time(refuse: Refuse, stopped: RunFolder) -> None:
    with stopped.lock() or pytest.fail("nobody holds it"):
        assert stopped.is_up()
        assert "up already" in refuse("up", "--resume", str(stopped.path))
    assert not stopped.is_up()


def test_status_without_a_run_says_what_to_do(refuse: Refuse) -> None:
    assert "diloco up" in refuse("status")
    assert "nothere" in refuse("status", "nothere")


def test_without_a_name_the_newest_run_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in ("zeroth", "first"):
        RunFolder.create(tmp_path / "runs" / run, Setup(settings=RunSettings(run=run), task=None))
    os.utime(tmp_path / "runs" / "zeroth", (1, 1))
    for command in ("status", "report"):
        assert run_command([command]) == 0
        assert "first" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["sample", "export", "report", "watch"])
def test_where_no_run_is_a_look_says_what_to_do(refuse: Refuse, command: str) -> None:
    assert "diloco up" in refuse(command)


@pytest.mark.parametrize("command", ["sample", "export", "report"])
def test_looking_at_a_run_that_is_not_there_is_refused(refuse: Refuse, command: str) -> None:
    assert "nothere" in refuse(command, "nothere")


@pytest.mark.parametrize("address", ["5550", "http://here:1", "tcp://here", "tcp://here:99999"])
def test_a_malformed_address_is_refused(refuse: Refuse, address: str) -> None:
    assert address in refuse("learner", "--broker", address)


def test_names_of_runs_are_made_of_the_time_and_never_taken_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = new_name()
    assert re.fullmatch(r"run-\d{8}-\d{6}", first)
    from datetime import datetime

    now = datetime.strptime(first, "run-%Y%m%d-%H%M%S").astimezone()
    (tmp_path / "runs" / first).mkdir(parents=True)
    assert new_name(now) == f"{first}-2"


def test_an_odd_folder_name_can_be_written_and_shown(tmp_path: Path) -> None:
    odd = tmp_path / ("Läufe \U0001f600 \udcff\x1b[31m" + "x" * 150)
    folder = RunFolder.create(odd, Setup(settings=RunSettings(), task=None))
    assert folder.setup().task is None
    assert folder.name.isprintable()
