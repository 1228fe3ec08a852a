"""docs/protocol.md says what the code does."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from decoupled_diloco.common.wire import BOTH_PLANES, FRAGMENT_KINDS, MESSAGES, NAMED_KINDS, PROTOCOL, Plane

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
ROWS = dict(re.findall(r"^\| (\w+) \| [LOS ]+ \| (.*) \|$", PAGE, re.MULTILINE))
FIELDS = dict(re.findall(r"^### (\w+)\n(?:(?!###)[^\n]*\n)*?Fields: `([^`]*)`", PAGE, re.MULTILINE))


def test_the_page_names_the_protocol_s_version() -> None:
    assert f"Version: {PROTOCOL} (`PROTOCOL`" in PAGE


def test_the_page_lists_every_kind_and_no_other() -> None:
    assert set(ROWS) == set(MESSAGES)
    assert set(FIELDS) == set(MESSAGES)


@pytest.mark.parametrize("kind", sorted(MESSAGES))
def test_the_page_has_the_plane_topic_payload_and_fields_of(kind: str) -> None:
    message = MESSAGES[kind]
    plane, topic, payload = (cell.strip() for cell in ROWS[kind].split("|"))
    assert plane == ("both" if kind in BOTH_PLANES else "control" if message.PLANE is Plane.CONTROL else "bulk")
    parts = ["RUN", kind, *(["FRAGMENT"] if kind in FRAGMENT_KINDS else []), *(["NAME"] if kind in NAMED_KINDS else [])]
    assert topic == ("`_/beat/RUN/`" if kind == "beat" else f"`{'/'.join(parts)}/`")
    assert (payload != "-") == message.HAS_PAYLOAD
    assert sorted(FIELDS[kind].split()) == sorted(f.name for f in fields(message) if "check" in f.metadata)
