from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis
from decoupled_diloco.common.config import RunSettings
from decoupled_diloco.common.log import get_logger
from decoupled_diloco.common.registry import Registry
from decoupled_diloco.compose.store import EmbeddedStore
from decoupled_diloco.syncer.figures import Figures
from decoupled_diloco.syncer.members import Member
from decoupled_diloco.syncer.rounds import Rounds
from decoupled_diloco.syncer.telling import Teller, run_figures
from waiting import wait_for

PAGE = (Path(__file__).parents[2] / "docs" / "redis.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\|[^|]*\| `(redis-cli -p \$PORT [^`]*)` \|$", PAGE, flags=re.MULTILINE)


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Any]:
    """A client of a store that holds what a syncer tells of a run with one learner and one fragment."""
    with EmbeddedStore(tmp_path) as store, redis.Redis.from_url(store.url, decode_responses=True) as client:
        registry = Registry(store.url, "run", get_logger("syncer"))
        teller = Teller(registry, get_logger("syncer"), "run")
        rounds = Rounds(RunSettings(sync_every=2, overlap=1), [10], 1)
        fragment = SimpleNamespace(index=0, parameters=10)
        teller.fragments(cast("Any", SimpleNamespace(plan=SimpleNamespace(fragments=[fragment]), versions=[1])), t=4)
        teller.run(run_figures(rounds, Figures(10, 1.0), "running", 0.0) | {"model_hash": "", "save_error": ""})
        teller.member(Member(name="learner-1", incarnation=3, joined_at=0.0, heard_at=0.0), rounds, 1.0)
        teller.event("joined", learner="learner-1")
        registry.write_epoch(1)
        registry.close()
        wait_for(lambda: client.exists("dd:run:events"), "the run is shown")
        yield client


def test_each_of_ten_questions_is_answered_by_its_one_command(shown: Any) -> None:
    assert len(COMMANDS) == 10
    for command in COMMANDS:
        words = shlex.split(command)[3:]
        if words[:2] == ["--scan", "--pattern"]:
            answer = list(shown.scan_iter(match=words[2]))
        else:
            answer = shown.execute_command(*words)
        assert answer, f"{command} shows nothing"
        assert None not in (answer if isinstance(answer, list) else [answer]), f"{command} names an unknown field"


def test_the_page_names_every_field_and_every_key(shown: Any) -> None:
    sections = re.split(r"^### `dd:RUN:(\w+)", PAGE, flags=re.MULTILINE)
    text_of = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert {key.split(":")[2] for key in shown.scan_iter()} == set(text_of)
    for key in ("dd:run:run", "dd:run:learner:learner-1", "dd:run:fragment:0"):
        told = set(re.findall(r"`(\w+)`", text_of[key.split(":")[2]]))
        unnamed = set(shown.hkeys(key)) - told
        assert not unnamed, f"{key} has fields that docs/redis.md does not explain: {sorted(unnamed)}"
