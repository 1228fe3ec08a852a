"""Presets: what they change, what is given beside them, and where they cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from decoupled_diloco.cli.commands import group, run_command
from decoupled_diloco.cli.options import _help
from decoupled_diloco.cli.syncer import syncer_config
from decoupled_diloco.common.config import PRESETS, RunSettings, SyncerConfig, preset
from decoupled_diloco.common.errors import SettingError


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_s_settings_go_together(name: Any) -> None:
    settings = RunSettings(**preset(name, learners=3))
    assert settings.quorum == (1 if name == "decoupled" else 3)
    assert (settings == RunSettings()) == (name == "decoupled")


def test_a_wait_for_all_must_know_how_many() -> None:
    with pytest.raises(SettingError, match="give their number as --quorum"):
        preset("diloco", None)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_syncer_continues_with_what_its_folder_has(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = place / "runs" / "it"
    run.mkdir(parents=True)
    (run / "settings.json").write_text(json.dumps({}))
    arguments = ["syncer", "--broker", "tcp://127.0.0.1:1", "--run", "it", "--preset", "diloco", "--quorum", "2"]
    assert run_command(arguments) == 2
    assert "leave --preset out" in capsys.readouterr().err


def test_up_continues_with_what_its_run_has(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["up", "--resume", "it", "--preset", "diloco"]) == 2
    assert "leave --preset out" in capsys.readouterr().err
    assert not list(place.iterdir())


def test_the_syncer_s_own_folder_is_the_one_that_its_setting_documents(place: Path) -> None:
    context = group.commands["syncer"].make_context("syncer", ["--run", "it", "--own-model"])
    config = syncer_config(context.params, {"run", "own_model"})
    assert config.directory.absolute() == (place / "runs" / "it" / "global").absolute()
    assert _help(SyncerConfig, "directory").startswith("The folder global of the run's folder")
