"""Where tensors are made: device and type are named, whatever defaults the training script has set."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

ROOT = Path(__file__).parents[3]
PARTS = ("common", "learner", "syncer", "simulator", "monitor", "compose")
MAKERS = {maker.__name__ for maker in _device_constructors()}
"""torch's functions that ask for the default device where none is named."""


def calls_of_makers(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS:
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "torch":
                yield node


def test_the_search_finds_what_it_is_for(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("import torch\nx = torch.zeros(3)\ny = torch.zeros_like(x)\n")
    assert [node.lineno for node in calls_of_makers(path)] == [2]
    assert {"zeros", "empty", "arange", "linspace", "tensor", "full"} <= MAKERS


@pytest.mark.parametrize("part", PARTS)
def test_every_new_tensor_names_its_device_and_its_type(part: str) -> None:
    unnamed = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / part).rglob("*.py"))
        for node in calls_of_makers(path)
        if not {"device", "dtype"} <= {keyword.arg for keyword in node.keywords}
    ]
    assert unnamed == []
