"""Options that come from the environment: each of every command, and what is said where one cannot be right."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from decoupled_diloco.cli.commands import group, run_command
from decoupled_diloco.cli.environment import COMPOSE_ONLY, effective_settings
from decoupled_diloco.common.config import LearnerConfig, RunSettings, SyncerConfig, TaskSettings
from decoupled_diloco.common.environment import without_options


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from commands(inner, f"{name} {inner.name}")


ALL = dict(commands(group, "diloco"))


@pytest.fixture
def said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.chdir(tmp_path)
    yield monkeypatch
    assert not list(tmp_path.iterdir()), "nothing may be written before everything is checked"


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_command(list(arguments)) == 2
    (sentence,) = [line for line in capsys.readouterr().err.splitlines() if " settings " not in line]
    assert sentence.startswith("diloco: ")
    return sentence


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_option_has_a_variable_and_the_help_gives_the_rule(name: str) -> None:
    command = ALL[name]
    options = [o for o in command.params if isinstance(o, click.Option) and o.expose_value and not o.hidden]
    for option in options:
        assert option.envvar == f"DILOCO_{str(option.name).upper()}", option.opts
    if not options:
        return
    text = command.epilog or ""  # the help breaks lines at hyphens
    assert "can also be set by an environment variable" in text
    shown = "".join(command.get_help(command.make_context(name, [], resilient_parsing=True)).split())
    assert shown.endswith("".join(text.split()))
    for option in options:
        by_rule = "DILOCO_" + option.opts[-1].removeprefix("--").replace("-", "_").upper()
        if option.envvar != by_rule:
            assert f"{option.opts[-1]} as {option.envvar}" in text


def test_every_setting_of_a_run_is_taken_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"steps": "48", "quorum": "2", "gamma": "0.5", "codec_up": "int8", "adopt": "mix", "width": "64"}
    for name, text in given.items():
        monkeypatch.setenv(f"DILOCO_{name.upper()}", text)
    context = group.commands["up"].make_context("up", [])
    assert {name: str(context.params[name]) for name in given} == given


@pytest.mark.parametrize(("text", "runs"), [("0", False), ("false", False), ("no", False), ("1", True), ("", True)])
def test_a_switch_is_turned_by_words(monkeypatch: pytest.MonkeyPatch, text: str, *, runs: bool) -> None:
    monkeypatch.setenv("DILOCO_EVALUATOR", text)
    monkeypatch.setenv("DILOCO_AS_JSON", text)
    params = group.commands["up"].make_context("up", []).params
    assert params["evaluator"] is runs
    assert params["as_json"] is (runs and text != "")


def test_the_command_line_counts_more_than_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_STEPS", "48")
    assert group.commands["up"].make_context("up", ["--steps", "96"]).params["steps"] == 96


def test_empty_variables_are_as_if_they_were_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, command in ALL.items():
        bare = command.make_context(name, [], resilient_parsing=True).params
        with monkeypatch.context() as patch:
            for option in command.params:
                patch.setenv(f"DILOCO_{str(option.name).upper()}", "")
            assert command.make_context(name, [], resilient_parsing=True).params == bare


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("STEPS", "many", ["up"]),
        ("STEPS", "0", ["up"]),
        ("CODEC_UP", "int2", ["up"]),
        ("AS_JSON", "perhaps", ["up"]),
        ("DATA", "nowhere", ["up"]),
        ("RESUME", "nowhere", ["up"]),
        ("BROKER", "http://here:1", ["learner"]),
        ("JOIN_TIMEOUT_SECONDS", "0", ["learner"]),
        ("PORT", "70000", ["broker"]),
        ("LOG_LEVEL", "loud", ["broker"]),
        ("EVAL_EVERY", "nan", ["evaluator"]),
        ("INIT", "nowhere.safetensors", ["syncer"]),
    ],
)
def test_a_wrong_value_names_its_variable_and_not_the_option(
    said: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, text: str, arguments: list[str]
) -> None:
    said.setenv(f"DILOCO_{name}", text)
    said.setenv("DILOCO_OWN_MODEL", "")
    sentence = refusal(capsys, *arguments)
    assert f"DILOCO_{name}" in sentence
    assert f"--{name.lower().replace('_', '-')}" not in sentence


def test_of_two_settings_that_do_not_fit_only_the_one_from_a_variable_bears_its_name(
    said: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said.setenv("DILOCO_QUORUM", "3")
    sentence = refusal(capsys, "up", "--learners", "2")
    assert "DILOCO_QUORUM 3" in sentence
    assert "--learners 2" in sentence


def test_a_password_in_a_variable_is_told_by_nobody(
    said: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said.setenv("DILOCO_REDIS", "http://me:hidden@there")
    sentence = refusal(capsys, "up")
    assert "DILOCO_REDIS" in sentence
    assert "hidden" not in sentence


def test_unknown_variables_get_one_warning_that_names_what_was_meant(
    said: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said.setenv("DILOCO_SYNC_EVRY", "12")
    said.setenv("DILOCO_XYZZY", "hidden")
    said.setenv("DILOCO_PORTS", "7000-7003")
    run_command(["status"])
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "DILOCO_" in line]
    assert "DILOCO_SYNC_EVRY (did you mean DILOCO_SYNC_EVERY?)" in warning
    assert "DILOCO_XYZZY" in warning
    assert "hidden" not in warning
    assert "DILOCO_PORTS" not in warning


def test_a_name_that_another_command_reads_is_no_stranger(
    said: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said.setenv("DILOCO_STEPS", "12")
    run_command(["status"])
    assert "DILOCO_STEPS" not in capsys.readouterr().err


def test_every_variable_of_the_compose_files_is_an_option_s_or_one_of_theirs() -> None:
    told = "".join(path.read_text("utf-8") for path in (Path(__file__).parents[3] / "compose").glob("*.yaml"))
    named = set(re.findall(r"DILOCO_[A-Z_]+", told))
    options = {str(o.envvar) for command in ALL.values() for o in command.params if isinstance(o, click.Option)}
    assert named - options <= COMPOSE_ONLY
    assert named >= COMPOSE_ONLY
    assert not COMPOSE_ONLY & options


def test_children_get_no_option_behind_the_back_of_their_command_line() -> None:
    assert without_options({"PATH": "/bin", "DILOCO_STEPS": "3"}) == {"PATH": "/bin"}


def test_what_is_in_force_is_flat_and_without_a_password() -> None:
    config = SyncerConfig(
        settings=RunSettings(steps=7), task=TaskSettings(width=64), broker="tcp://here:1", directory=Path("x"),
        redis="redis://me:hidden@there:1/0",
    )  # fmt: skip
    rows = effective_settings(config)
    assert (rows["steps"], rows["width"], rows["redis"]) == (7, 64, "redis://me:***@there:1/0")
    assert "hidden" not in str(rows)
    assert effective_settings(LearnerConfig(broker="tcp://here:1", name="a"), device="cpu")["device"] == "cpu"


def test_a_process_begins_its_log_with_the_settings_in_force(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DILOCO_ORPHAN_TIMEOUT_SECONDS", "7")
    monkeypatch.setenv("DILOCO_LOG_FILE", str(tmp_path / "log.jsonl"))
    assert run_command(["learner", "--name", "a", "--broker", "nonsense"]) == 2
    first = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert (first["event"], first["name"], first["orphan_timeout_seconds"]) == ("settings", "a", 7)
    assert first["from_environment"] == ["orphan_timeout_seconds", "log_file"]
    assert re.search(r"settings .*orphan_timeout_seconds=7", capsys.readouterr().err)
