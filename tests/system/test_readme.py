"""What README.md shows, run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import click
import pytest
from decoupled_diloco.cli.commands import group
from waiting import wait_for

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
DILOCO = [sys.executable, "-P", "-m", "decoupled_diloco.cli"]
STEPS = "60"


def the_script() -> str:
    (script,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return str(script)


def test_the_example_fits_on_a_screen() -> None:
    lines = [line for line in the_script().splitlines() if line.strip()]
    assert len(lines) <= 30


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def started(stack: ExitStack, place: Path, *command: str) -> subprocess.Popen[str]:
    """A process that is gone when the test is over."""
    process = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    stack.callback(process.communicate)  # these two run in the opposite order
    stack.callback(process.kill)
    return process


def test_the_example_trains_in_a_project_that_has_a_common_of_its_own(tmp_path: Path, stack: ExitStack) -> None:
    from decoupled_diloco.compose.ports import broker_port

    port = broker_port(0)
    address = f"tcp://127.0.0.1:{port}"
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").write_text("MINE = True\n")
    script = the_script().replace("tcp://127.0.0.1:5560", address)
    assert script != the_script()
    (tmp_path / "train.py").write_text(f"import common\n\nassert common.MINE\n{script}")

    started(stack, tmp_path, *DILOCO, "broker", "--port", str(port))
    settings = ["--broker", address, "--run", "mine", "--own-model", "--steps", STEPS]
    syncer = started(stack, tmp_path, *DILOCO, "--log-level", "warning", "syncer", *settings)
    learners = [started(stack, tmp_path, sys.executable, "train.py") for _ in range(2)]
    told = [learner.communicate(timeout=120)[0] for learner in learners]
    for learner, said in zip(learners, told, strict=True):
        assert learner.returncode == 0, said
        assert re.search(r": loss \d+\.\d\d$", said.strip()), said
    losses = {said.split()[-1] for said in told}
    assert len(losses) == 1, "all hold the same final weights, and judge them alike"
    wait_for(lambda: syncer.poll() is not None, "the syncer ends with the run")
    assert syncer.returncode == 0, syncer.communicate()[0]
    assert (tmp_path / "runs" / "mine" / "model.safetensors").exists()


def commands() -> list[list[str]]:
    """Every `diloco ...` line of the README, without its shell ends."""
    lines = re.findall(r"^    (diloco .*)$", README, re.MULTILINE)
    return [re.sub(r"\s*(#.*|&)$", "", line).split() for line in lines]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_in_the_readme_exists_with_these_options(command: list[str]) -> None:
    meant: click.Command = group
    for word in command[1:]:
        if not isinstance(meant, click.Group):
            break
        meant = meant.commands[word]
    known = {spelling for option in meant.params for spelling in option.opts}
    assert [word for word in command if word.startswith("--") and word not in known] == []


def test_every_option_in_the_readme_exists_and_has_the_default_that_it_says() -> None:
    params = [*group.commands["up"].params, *group.commands["syncer"].params]
    options = {spelling: option for option in params for spelling in option.opts}
    rows = re.findall(r"^\| (`--.*?) \| .* \| (.*?) \|$", README, re.MULTILINE)
    assert len(rows) > 10
    for spelled, default in rows:
        for option, told in zip(re.findall(r"`(--.*?)`", spelled), default.split(", "), strict=False):
            assert isinstance(options[option], click.Option)
            value = options[option].default
            if isinstance(value, int | float | str) and value is not False:
                assert told == f"{value:g}" if isinstance(value, float) else told == str(value), option


def test_nothing_is_linked_that_is_not_there() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (Path(__file__).parents[2] / link).exists()] == []
