"""Which run and which name a key stands for, before anything connects."""

from __future__ import annotations

import random
import secrets
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from decoupled_diloco.common.auth_keys import Key, Role, held_key, new_key
from decoupled_diloco.common.config import NAME_PATTERN
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.learner.discover import discover
from decoupled_diloco.learner.learner_name import default_name, resolve_name
from decoupled_diloco.learner.observer import Observer
from decoupled_diloco.learner.session import join
from torch import nn

NOBODY = "tcp://127.0.0.1:1"
CONTAINER = "0123456789ab"
"""What Docker calls a container that was not given a host name."""


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return made(tmp_path, "learner", "site-7")


def made(place: Path, role: Role, name: str, run: str = "r") -> Path:
    file = place / f"{name}.key"
    new_key(place / "keys", role=role, run=run, name=name).save(file)
    return file


@pytest.mark.parametrize("name", ["a", "site-7", "a" * 33, "a" * 34, "a" * 38, "a" * 39, "a" * 40])
@pytest.mark.parametrize("host", [CONTAINER, "Box_7.Example.ORG", "---", "ü" * 90, "a" * 90])
def test_a_name_made_from_a_key_is_one_that_it_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, host: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    key = Key.load(made(tmp_path, "learner", name))
    for _ in range(20):
        assert key.may_be_called(default_name(key)), default_name(key)
        assert NAME_PATTERN.fullmatch(default_name(key))


def test_replicas_that_share_a_key_are_called_after_their_containers(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = Key.load(key_file)
    monkeypatch.setattr(socket, "gethostname", lambda: CONTAINER)
    name = default_name(key)
    assert name.startswith(f"site-7-{CONTAINER}-")
    assert len({default_name(key) for _ in range(20)}) > 1


def test_two_learners_of_one_host_and_key_are_called_differently_wherever_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = iter(["1a2b", "3c4d"])
    monkeypatch.setattr(secrets, "token_hex", lambda size: next(marks) if size == 2 else f"{random.getrandbits(32):x}")
    key = Key.load(made(tmp_path, "learner", "a" * 35))
    assert [default_name(key), default_name(key)] == [f"{'a' * 35}-1a2b", f"{'a' * 35}-3c4d"]


def test_run_and_name_are_the_keys_where_they_are_not_given(key_file: Path) -> None:
    assert resolve_name("", "site-7-b", key_file, "learner") == {"run": "r", "name": "site-7-b"}
    assert resolve_name("r", "site-7", key_file, "learner") == {"run": "r", "name": "site-7"}
    assert resolve_name("", None, key_file, "learner", otherwise="evaluator")["name"].startswith("site-7-")


def test_without_a_key_they_are_what_is_given() -> None:
    assert resolve_name("", "any", None, "learner") == {"run": "", "name": "any"}
    assert resolve_name("x", None, None, "observer", otherwise="evaluator") == {"run": "x", "name": "evaluator"}


WRONG: list[Any] = [
    pytest.param({"run": "other"}, r"the key .*site-7\.key is for the run r, not for --run other", id="run"),
    pytest.param({"name": "site-8"}, r"permits only the names site-7 and site-7-\*, not --name site-8", id="name"),
    pytest.param(
        {"name": "site-70"}, r"permits only the names site-7 and site-7-\*, not --name site-70", id="a longer name"
    ),
    pytest.param({"key": Path("/nowhere/k")}, r"the key file /nowhere/k cannot be read", id="no file"),
]


@pytest.mark.parametrize(("changed", "said"), WRONG)
def test_what_a_key_does_not_allow_is_said_before_anything_connects(
    key_file: Path, changed: dict[str, Any], said: str
) -> None:
    model = nn.Linear(2, 2)
    given = {"key": key_file, **changed}
    with pytest.raises(SettingError, match=said):
        join(NOBODY, model, torch.optim.SGD(model.parameters(), lr=1), join_timeout_seconds=60, **given)
    with pytest.raises(SettingError, match=said):
        Observer(NOBODY, model, join_timeout_seconds=60, **given)
    if "name" not in changed:
        with pytest.raises(SettingError, match=said):
            discover(NOBODY, given.get("run", ""), 60, given["key"])


def test_a_key_of_another_role_does_not_serve(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    file = made(tmp_path, "observer", "eye")
    with pytest.raises(SettingError, match=r"eye\.key is for observers and cannot be used here; .* --role learner"):
        join(NOBODY, model, torch.optim.SGD(model.parameters(), lr=1), key=file)
    with pytest.raises(SettingError, match=r"is for syncers .* --role observer"):
        Observer(NOBODY, model, key=made(tmp_path, "syncer", "s"))
    with pytest.raises(SettingError, match=r"is for observers .* --role syncer"):
        held_key(file, "syncer")
