"""join() before anything is connected: what is wrong is said at once, and little is loaded."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys

import pytest
import torch
from decoupled_diloco.common import wire
from decoupled_diloco.common.config import NAME_PATTERN
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.learner.learner_name import default_name
from decoupled_diloco.learner.session import join
from torch import nn


def test_joining_needs_no_redis_and_no_pictures() -> None:
    program = (
        "import sys, decoupled_diloco; decoupled_diloco.join; "
        "print([m for m in ('redis', 'matplotlib', 'decoupled_diloco.syncer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("address", "more", "said"),
    [
        ("localhost:5550", {"run": "r"}, "must look like tcp://HOST:5550"),
        ("tcp://127.0.0.1:5550", {"run": "Run One"}, "--run 'Run One' must match"),
        ("tcp://127.0.0.1:5550", {"run": "r", "name": "me/you"}, "--name 'me/you' must match"),
        ("tcp://127.0.0.1:5550", {"run": "r", "join_timeout_seconds": 0}, "--join-timeout must be greater"),
    ],
    ids=["address", "run", "name", "time-out"],
)
def test_wrong_arguments_are_found_before_anything_is_connected(address: str, more: dict[str, str], said: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(SettingError, match=said):
        join(address, model, torch.optim.SGD(model.parameters(), lr=1), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("module", "data_hash", "said"),
    [("w", "0" * 128, "data_hash"), ("w", "two\nlines", "data_hash"), ("x" * 600, "", "name")],
    ids=["a hash that is too long", "a hash of two lines", "a name that is too long"],
)
def test_what_no_syncer_would_understand_is_said_here_and_not_waited_for(
    module: str, data_hash: str, said: str
) -> None:
    model = nn.Module()
    model.register_parameter(module, nn.Parameter(torch.zeros(3)))
    with pytest.raises(SettingError, match=said):
        join("tcp://127.0.0.1:1", model, torch.optim.SGD(model.parameters(), lr=1), run="r", data_hash=data_hash,
             join_timeout_seconds=1)  # fmt: skip


def test_a_model_of_too_many_tensors_is_refused_before_anything_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_TENSORS", 7)
    with pytest.raises(SettingError, match="would not understand its layout: more than 7 tensors"):
        join("tcp://127.0.0.1:1", nn.Sequential(*(nn.Linear(1, 1) for _ in range(4))), None)


def test_a_model_whose_names_no_message_can_carry_is_refused_before_anything_is_connected() -> None:
    model = nn.Module()
    for _ in range(5000):
        name = secrets.token_hex(240)
        model.register_parameter(name, nn.Parameter(torch.zeros(1)))
    with pytest.raises(SettingError, match=r"5000 tensors take \d+ bytes, and a message carries \d+"):
        join("tcp://127.0.0.1:1", model, None)


@pytest.mark.parametrize("host", ["Box_7.Example.ORG", "---", "ü" * 90, "a" * 90])
def test_a_default_name_is_valid_whatever_the_machine_is_called(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    names = {default_name() for _ in range(20)}
    assert len(names) > 1
    assert all(NAME_PATTERN.fullmatch(name) for name in names)
