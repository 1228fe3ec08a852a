"""SECURITY.md: each attack that it lists has its test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
ROWS = [line.split(" | ") for line in PAGE.partition("## Tested attacks")[2].splitlines() if line.startswith("| ")][1:]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)


def test_each_line_of_the_table_names_one_test() -> None:
    assert len(ROWS) == len(NAMED) > 30
    for row in ROWS:
        assert len(row) == 4, row
        assert re.fullmatch(r"`tests/[\w/]+\.py::test_\w+` \|", row[3]), row


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[name for _, name in NAMED])
def test_the_test_is_there(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], f"{file} has no {name}"


def test_no_line_is_there_twice() -> None:
    assert len(set(NAMED)) == len(NAMED)
