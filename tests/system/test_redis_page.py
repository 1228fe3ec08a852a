"""docs/redis.md: its ten commands, run as they stand there against a live run, and its list of keys and fields."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis
from decoupled_diloco.common.config import RunSettings
from decoupled_diloco.common.log import get_logger
from decoupled_diloco.common.registry import Registry
from decoupled_diloco.compose.embedded_redis import EmbeddedRedis
from decoupled_diloco.syncer.membership import Member
from decoupled_diloco.syncer.rounds import Rounds
from decoupled_diloco.syncer.run_metrics import RunMetrics
from decoupled_diloco.syncer.telemetry import Telemetry, run_figures
from run import FRAGMENTS, Run
from waiting import wait_for

pytestmark = pytest.mark.timeout(300)  # a whole run, on a machine that may be busy with others

PAGE = (Path(__file__).parents[2] / "docs" / "redis.md").read_text(encoding="utf-8")
QUESTIONS = dict(re.findall(r"^\| ([^|]*?\?)[^|]* \| `(redis-cli [^`]*)` \|$", PAGE, flags=re.MULTILINE))
STAND_IN = """#!{python}
import sys
import redis
client = redis.Redis(port=int(sys.argv[2]), decode_responses=True, protocol=2)
client.response_callbacks.clear()
def show(answer):
    for part in answer if isinstance(answer, list) else [answer]:
        show(part) if isinstance(part, list) else print("" if part is None else part)
words, cursor = sys.argv[3:], "0"
if words[0] != "--scan":
    show(client.execute_command(*words) or "")
    sys.exit()
while True:
    cursor, found = client.execute_command("SCAN", cursor, "MATCH", words[2])
    show(found)
    if cursor == "0":
        break
"""
"""What redis-cli prints into a pipe. The page's commands are tried with it everywhere, so that a machine with a
redis-cli and one without see the same; `test_the_stand_in_prints_what_redis_cli_prints` holds it against the real one.
"""


def with_stand_in(tools: Path, store_url: str) -> dict[str, str]:
    """An environment in which `redis-cli` is the stand-in, and $PORT the store's."""
    tools.mkdir()
    (tools / "redis-cli").write_text(STAND_IN.replace("{python}", sys.executable))
    (tools / "redis-cli").chmod(0o755)
    port = store_url.rpartition(":")[2].partition("/")[0]
    return {**os.environ, "PORT": port, "PATH": f"{tools}:{os.environ['PATH']}"}


def typed(command: str, environment: Mapping[str, str]) -> list[str]:
    """The lines that `command` prints in a shell."""
    done = subprocess.run(
        ["bash", "-euc", command], env=environment, capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    assert "ERR" not in done.stdout, done.stdout
    return done.stdout.splitlines()


class Asked:
    """A live run called `run`, and a shell in which the page's commands are typed."""

    def __init__(self, run: Run, tools: Path) -> None:
        self.run = run
        self.environment = with_stand_in(tools, run.store_url)

    def answer(self, question: str, command: str = "") -> list[str]:
        """The lines that the page's command for `question` prints."""
        return typed(command or QUESTIONS[question], self.environment)

    def numbers(self, question: str) -> list[float]:
        return [float(line) for line in self.answer(question)]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    place = tmp_path_factory.mktemp("asked")
    with Run(place, run="run") as run:
        yield Asked(run.wait_until_training(), place / "tools")


@pytest.fixture
def sleeper(asked: Asked) -> Iterator[str]:
    """A learner that neither steps nor sends."""
    with asked.run.frozen("learner-2"):
        yield "learner-2"


def test_there_are_ten_questions_with_one_command_each() -> None:
    assert len(QUESTIONS) == 10
    assert len(set(QUESTIONS.values())) == 10
    assert not [command for command in QUESTIONS.values() if re.search(r"[;&\n]", command)]


def test_the_run_is_listed_and_trains(asked: Asked) -> None:
    assert asked.answer("Which runs are there?") == ["dd:run:run"]
    state, step, total = asked.answer("Does it train, and how far is it?")
    assert state == "running"
    assert int(total) == asked.run.figure("steps_total")
    wait_for(lambda: int(asked.answer("Does it train, and how far is it?")[1]) > int(step), "the step grows")


def test_all_who_are_here_are_named(asked: Asked) -> None:
    wait_for(lambda: set(asked.answer("Who is here?")) == {"learner-1", "learner-2"}, "both are here")


def test_tokens_are_all_accounted_for_in_the_run_and_of_one_learner(asked: Asked) -> None:
    def balanced(question: str) -> bool:
        reported, merged, pending, lost = asked.numbers(question)
        assert reported == merged + pending + lost
        return merged > 0

    for question in ("How many tokens of all learners went in?", "Did the work of one learner arrive in the model?"):
        wait_for(lambda question=question: balanced(question), "tokens are merged")  # type: ignore[misc]
    one = asked.numbers("Did the work of one learner arrive in the model?")
    assert one[0] < asked.numbers("How many tokens of all learners went in?")[0]


def test_what_is_seen_is_fresh(asked: Asked) -> None:
    def fresh() -> bool:
        return abs(time.time() - asked.numbers("Is what I see fresh?")[0]) < 5

    wait_for(fresh, "the last full write was a moment ago")


def test_a_learner_that_does_not_move_is_not_here_and_is_the_one_behind(asked: Asked, sleeper: str) -> None:
    wait_for(lambda: asked.answer("Who is here?") == ["learner-1"], "it is not here")
    wait_for(lambda: asked.answer("Who is behind?")[0] == sleeper, "it is the one behind", 60)
    rows = asked.answer("Who is behind?")
    assert rows[3] == "lost"
    assert (rows[4], rows[7]) == ("learner-1", "live")
    assert int(rows[1]) < int(rows[5])
    assert float(rows[2]) > 0


def test_what_happened_in_the_last_minute_is_reported_and_nothing_older(asked: Asked, sleeper: str) -> None:
    question = "What happened in the last minute?"
    wait_for(lambda: "lost" in asked.answer(question), "the loss is told")
    said = asked.answer(question)
    assert sleeper in said
    assert "merged" in said
    in_an_hour = QUESTIONS[question].replace("date +%s", "date -d '+1 hour' +%s")
    assert [line for line in asked.answer(question, in_an_hour) if line] == []


def test_where_nothing_is_merged_the_reason_and_the_fragment_are_named(asked: Asked, sleeper: str) -> None:
    with asked.run.frozen("learner-1"):
        question = "Why is nothing merged?"
        wait_for(lambda: asked.answer(question)[1:3] == ["0 of 1", "0"], "nobody is there to answer")
        assert asked.answer(question)[0] == "running"
        wait_for(lambda: "learner-1 has not been heard for" in asked.answer(question)[-1], "the sentence says whom")
        merged_at = {p: float(asked.run.redis_hash(f"dd:run:fragment:{p}")["merged_at"]) for p in range(FRAGMENTS)}
        fragment, when = asked.numbers("Which fragment is stuck?")
        assert int(fragment) == min(merged_at, key=lambda p: merged_at[p])
        assert when == min(merged_at.values())
        assert when < max(merged_at.values())
    asked.run.wait_for_versions(1, "all go on", "run")
    assert asked.numbers("Which fragment is stuck?")[1] > when


# --- keys and fields -------------------------------------------------------------------------------------------------
@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Any]:
    """A client of a store that holds what a syncer tells of a run with one learner and one fragment."""
    with EmbeddedRedis(tmp_path) as store, redis.Redis.from_url(store.url, decode_responses=True) as client:
        registry = Registry(store.url, "run", get_logger("syncer"))
        teller = Telemetry(registry, get_logger("syncer"), "run")
        rounds = Rounds(RunSettings(sync_every=2, overlap=1), [10], 1)
        fragment = SimpleNamespace(index=0, parameters=10)
        teller.publish_fragments(
            cast("Any", SimpleNamespace(plan=SimpleNamespace(fragments=[fragment]), versions=[1])), t=4
        )
        teller.publish_run(
            run_figures(rounds, RunMetrics(10, 1.0), "running", 0.0)
            | {"model_hash": "", "saved_at": 1.0, "save_error": "", "blocked": "", "blocked_seconds": ""}
        )
        teller.publish_learner(Member(name="learner-1", incarnation=3, joined_at=0.0, heard_at=0.0), rounds, 1.0)
        teller.event("joined", learner="learner-1")
        registry.write_epoch(1)
        registry.close()
        wait_for(lambda: client.exists("dd:run:events"), "the run is shown")
        yield client


def test_the_page_names_every_field_and_every_key(shown: Any) -> None:
    sections = re.split(r"^### `dd:RUN:(\w+)", PAGE, flags=re.MULTILINE)
    text_of = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert {key.split(":")[2] for key in shown.scan_iter()} == set(text_of)
    for key in ("dd:run:run", "dd:run:learner:learner-1", "dd:run:fragment:0"):
        told = set(re.findall(r"`(\w+)`", text_of[key.split(":")[2]]))
        unnamed = set(shown.hkeys(key)) - told
        assert not unnamed, f"{key} has fields that docs/redis.md does not explain: {sorted(unnamed)}"


def test_the_stand_in_lists_more_keys_than_one_scan_holds(shown: Any, tmp_path: Path) -> None:
    shown.mset({f"dd:more-{number}:run": "" for number in range(300)})
    port = shown.connection_pool.connection_kwargs["port"]
    environment = with_stand_in(tmp_path / "tools", f"redis://127.0.0.1:{port}/0")
    listed = typed(QUESTIONS["Which runs are there?"], environment)
    assert set(listed) == {"dd:run:run", *(f"dd:more-{number}:run" for number in range(300))}


@pytest.mark.tools
def test_the_stand_in_prints_what_redis_cli_prints(shown: Any, tmp_path: Path) -> None:
    real = shutil.which("redis-cli") or shutil.which("valkey-cli")
    if not real:
        pytest.skip("this machine has no redis-cli to compare the stand-in with")
    port = shown.connection_pool.connection_kwargs["port"]
    environment = with_stand_in(tmp_path / "tools", f"redis://127.0.0.1:{port}/0")
    for command in (*QUESTIONS.values(), "redis-cli -p $PORT XRANGE dd:nowhere:events - +"):
        assert typed(command, environment) == typed(command.replace("redis-cli", f"'{real}'"), environment), command
