from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
import structlog
from decoupled_diloco.cli.commands import run_command
from decoupled_diloco.common import redis_client, registry_writer
from decoupled_diloco.common.errors import DilocoError, PeerLost, SettingError
from decoupled_diloco.common.redis_keys import RedisKeys
from decoupled_diloco.common.registry import Registry, check_connection, list_runs, read_status, redact_url
from decoupled_diloco.common.registry_buffer import WAITING_EVENTS
from decoupled_diloco.common.registry_preflight import check_redis, redis_advice
from decoupled_diloco.common.registry_writer import STREAM_EVENTS
from decoupled_diloco.compose.embedded_redis import EmbeddedRedis
from stores import TlsFront
from waiting import wait_for

KEYS = RedisKeys("run")
SECRET = "p@s:s#w/o?r%d$ü&+=%41"  # noqa: S105 - no password; every character that URLs, files and shells treat in their own way


class RegistryAndRedis:
    """A store, a registry that writes to it, and the lines that it logged."""

    def __init__(self, directory: Path) -> None:
        self.store = EmbeddedRedis(directory)
        self.store.start()
        self.client: Any = redis.Redis.from_url(self.store.url, decode_responses=True)
        self.lines: list[dict[str, Any]] = []
        self.registry = Registry(self.store.url, "run", logger_into(self.lines))

    def close(self) -> None:
        self.thaw()
        self.registry.close()
        self.client.close()
        self.store.stop()

    def freeze(self) -> None:
        os.kill(self.store.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        if self.store.running:
            os.kill(self.store.pid, signal.SIGCONT)

    def publish_everything(self) -> None:
        self.registry.publish_run(state="running", step=41, steps_total=600, tokens_merged=10**12)
        for name in ("a", "b"):
            self.registry.publish_learner(name, 1_700_000_000.5, tokens_reported=2**40, host="house", loss=1.25)
        for fragment in range(3):
            self.registry.publish_fragment(
                fragment, merged_at=50.5 - fragment, version=fragment + 7, contributors=("a", "b"), delta_norm=0.5
            )
        self.registry.event("joined", learner="a", incarnation=3)
        self.registry.write_epoch(5)

    def seen(self) -> dict[str, Any]:
        """All that the store holds, without what says when it was written or that it was lost."""
        seen: dict[str, Any] = {
            "epoch": self.client.get(KEYS.epoch),
            "learners": self.client.zrange(KEYS.learners, 0, -1),
            "fragments": self.client.zrange(KEYS.fragments, 0, -1, withscores=True),
        }
        for key in (KEYS.run, KEYS.learner("a"), KEYS.learner("b"), *map(KEYS.fragment, range(3))):
            seen[key] = self.client.hgetall(key)
            seen[key].pop("updated_at", None)
        seen["events"] = [kind for kind in self.kinds() if not kind.startswith("registry_")]
        return seen

    def kinds(self) -> list[str]:
        return [row["kind"] for _, row in self.client.xrange(KEYS.events)]

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]


def logger_into(lines: list[dict[str, Any]]) -> Any:
    def keep(_: Any, method: str, event: Any) -> Any:
        lines.append({**event, "level": method})
        raise structlog.DropEvent

    return structlog.wrap_logger(None, processors=[keep], wrapper_class=structlog.make_filtering_bound_logger(0))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[RegistryAndRedis]:
    pair = RegistryAndRedis(tmp_path / "store")
    yield pair
    pair.close()


@pytest.fixture
def full_pair(pair: RegistryAndRedis) -> RegistryAndRedis:
    pair.publish_everything()
    wait_for(lambda: len(pair.seen()["events"]) == 1, "everything is written")
    return pair


def test_everything_published_can_be_read_as_plain_text(full_pair: RegistryAndRedis) -> None:
    client = full_pair.client
    assert client.hget(KEYS.run, "tokens_merged") == "1000000000000"
    assert client.zscore(KEYS.learners, "a") == 1_700_000_000.5
    assert client.hgetall(KEYS.learner("a")) == {"tokens_reported": str(2**40), "host": "house", "loss": "1.25"}
    fragment = {"version": "9", "contributors": "a b", "delta_norm": "0.5", "merged_at": "48.5"}
    assert client.hgetall(KEYS.fragment(2)) == fragment
    assert client.zrange(KEYS.fragments, 0, -1, withscores=True) == [("2", 48.5), ("1", 49.5), ("0", 50.5)]
    assert client.get(KEYS.epoch) == "5"
    ((_, event),) = client.xrange(KEYS.events)
    assert abs(float(event.pop("at")) - time.time()) < 60
    assert event == {"kind": "joined", "learner": "a", "incarnation": "3"}
    assert {client.type(key) for key in client.scan_iter()} == {"hash", "zset", "stream", "string"}
    assert full_pair.registry.healthy
    assert full_pair.lines == []


def test_what_a_monitor_reads_is_what_was_published(full_pair: RegistryAndRedis) -> None:
    status = read_status(full_pair.store.url, "run")
    assert status["run"]["step"] == 41
    assert status["epoch"] == 5
    assert status["learners"]["b"] == {
        "last_seen": 1_700_000_000.5,
        "tokens_reported": 2**40,
        "host": "house",
        "loss": 1.25,
    }
    assert list(status["fragments"]) == [0, 1, 2]
    assert status["fragments"][1]["version"] == 8
    assert status["events"][0]["kind"] == "joined"
    assert list_runs(full_pair.store.url) == ["run"]
    assert full_pair.registry.stored_epoch() == 5
    assert full_pair.registry.stored_versions() == {0: 7, 1: 8, 2: 9}
    assert read_status(full_pair.store.url, "other")["learners"] == {}


def test_values_are_one_line_and_finite(pair: RegistryAndRedis) -> None:
    host = "x\ny\x1b[2J"
    pair.registry.publish_learner("a", 1.0, loss=float("nan"), host=host, step_seconds=None, live=True, at=Path("x y"))
    wait_for(lambda: pair.client.exists(KEYS.learner("a")), "the learner is written")
    row = pair.client.hgetall(KEYS.learner("a"))
    assert row == {"loss": "", "host": r"x\ny\x1b[2J", "step_seconds": "", "live": "1", "at": "x y"}
    assert read_status(pair.store.url, "run")["learners"]["a"]["loss"] is None
    with pytest.raises(TypeError, match="not bytes"):
        pair.registry.publish_run(packed=b"\x00")


@pytest.mark.parametrize("name", ["a*", "a:b", "a\nb", "", "A", "../a", "a" * 41])
def test_no_name_reaches_another_key(name: str) -> None:
    with pytest.raises(SettingError, match="must match"):
        Registry(None, "run", logger_into([])).publish_learner(name, 1.0)
    with pytest.raises(SettingError, match="must match"):
        RedisKeys(name)


def test_two_runs_with_a_common_prefix_do_not_mix(pair: RegistryAndRedis) -> None:
    other = Registry(pair.store.url, "run2", logger_into([]))
    pair.registry.publish_fragment(1, version=1)
    other.publish_fragment(10, version=2)
    other.publish_run(step=2)
    other.write_epoch(9)
    other.close()
    wait_for(lambda: pair.registry.stored_versions() == {1: 1}, "the first run has its own fragment")
    assert pair.registry.stored_epoch() == 0
    assert list_runs(pair.store.url) == ["run2"]


def test_a_forgotten_learner_is_gone_and_begins_anew(full_pair: RegistryAndRedis) -> None:
    full_pair.registry.forget_learner("a")
    wait_for(lambda: full_pair.client.zrange(KEYS.learners, 0, -1) == ["b"], "the learner left the set")
    assert not full_pair.client.exists(KEYS.learner("a"))
    full_pair.registry.publish_learner("a", 3.0, host="new")
    wait_for(lambda: full_pair.client.hgetall(KEYS.learner("a")) == {"host": "new"}, "it begins anew")
    assert not full_pair.logged("registry_lost")


def test_a_flushed_store_is_whole_again_and_one_warning_says_so(full_pair: RegistryAndRedis) -> None:
    before = full_pair.seen()
    full_pair.client.flushall()
    wait_for(lambda: full_pair.seen() == before, "everything is written anew")
    wait_for(lambda: "registry_lost" in full_pair.kinds(), "the stream tells it too")
    (line,) = full_pair.logged("registry_lost")
    assert line["level"] == "warning"
    assert "vanished" in line["reason"]


@pytest.mark.parametrize("key", [KEYS.learners, KEYS.learner("b"), KEYS.fragments, KEYS.epoch, KEYS.events])
def test_a_single_deleted_key_comes_back(full_pair: RegistryAndRedis, key: str) -> None:
    before = full_pair.seen()
    full_pair.client.delete(key)
    wait_for(lambda: full_pair.seen() == before, f"{key} is written anew")
    wait_for(lambda: len(full_pair.logged("registry_lost")) == 1, "a warning names the key")
    assert full_pair.logged("registry_lost")[0]["reason"].endswith(key)


def test_a_restarted_store_is_whole_again(full_pair: RegistryAndRedis) -> None:
    before = full_pair.seen()
    full_pair.store.stop()
    wait_for(lambda: not full_pair.registry.healthy, "the outage is seen")
    full_pair.registry.event("lost", learner="b")
    full_pair.store.start()
    before["events"].append("lost")
    wait_for(lambda: full_pair.seen() == before, "everything is back")
    wait_for(lambda: full_pair.registry.healthy, "it says so")
    assert len(full_pair.logged("registry_lost")) == 1
    assert len(full_pair.logged("registry_back")) == 1
    full_pair.store.stop()
    full_pair.store.start()
    wait_for(lambda: full_pair.seen() == before, "everything is back after an instant restart too")


def test_no_caller_waits_for_a_frozen_store_and_memory_stays_bounded(full_pair: RegistryAndRedis) -> None:
    registry = full_pair.registry
    full_pair.freeze()
    slowest = 0.0
    for number in range(10_000):
        started = time.thread_time()
        registry.publish_run(step=number)
        registry.publish_learner("a", 1.0, tokens_reported=2**40 + number)
        registry.publish_fragment(number % 3, version=100 + number)
        registry.event("merged", number=number)
        slowest = max(slowest, time.thread_time() - started)
    wait_for(lambda: full_pair.logged("registry_lost"), "the outage is told once")
    assert slowest < 1, f"one round of updates took {slowest} s of this thread's own time"
    board = registry._pending
    assert len(board._events) + len(registry._writer._session._unsure) <= 2 * WAITING_EVENTS  # type: ignore[union-attr]
    assert len(board._state.rows) == 6
    full_pair.thaw()
    wait_for(lambda: full_pair.client.hget(KEYS.run, "step") == "9999", "the newest state arrives")
    wait_for(lambda: "registry_back" in full_pair.kinds(), "the events that found room arrive")
    (line,) = full_pair.logged("registry_back")
    arrived = [row["number"] for _, row in full_pair.client.xrange(KEYS.events) if "number" in row]
    assert arrived[-1] == "9999"
    assert len(set(arrived)) == len(arrived)
    assert line["dropped_events"] == 10_000 - len(arrived)
    assert len(full_pair.logged("registry_lost")) == 1


@pytest.mark.parametrize("fragments", [1, 100], ids=["a write that is executed late", "a write that is cut off"])
def test_after_a_frost_nothing_goes_back_and_no_event_comes_twice(pair: RegistryAndRedis, fragments: int) -> None:
    steps: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        client: Any = redis.Redis.from_url(pair.store.url, decode_responses=True, socket_timeout=60)
        while not stop.wait(0.001):
            steps.append(int(client.hget(KEYS.run, "step") or 0))
        client.close()

    watcher = threading.Thread(target=watch, daemon=True)
    pair.registry.publish_run(step=1)
    wait_for(lambda: pair.registry.healthy, "the registry is connected")
    watcher.start()
    pair.freeze()
    for fragment in range(fragments):
        pair.registry.publish_fragment(fragment, version=1, padding="x" * 900)
    pair.registry.publish_run(step=2)
    pair.registry.event("merged")
    wait_for(lambda: pair.logged("registry_lost"), "the outage is seen")
    pair.registry.publish_run(step=3)
    pair.thaw()
    wait_for(lambda: "registry_back" in pair.kinds(), "the store is back")
    wait_for(lambda: steps[-1] == 3, "the newest state is seen")
    stop.set()
    watcher.join(10)
    assert steps == sorted(steps)
    assert pair.kinds().count("merged") == 1


def test_reading_from_a_frozen_store_ends(full_pair: RegistryAndRedis) -> None:
    full_pair.freeze()
    assert full_pair.registry.stored_epoch() == 0
    with pytest.raises(PeerLost, match="no Redis answers"):
        read_status(full_pair.store.url, "run")
    assert len(full_pair.logged("registry_unreadable")) == 1


def test_a_store_that_comes_late_is_filled(tmp_path: Path) -> None:
    store = EmbeddedRedis(tmp_path)
    store.start()
    store.stop()
    lines: list[dict[str, Any]] = []
    registry = Registry(store.url, "run", logger_into(lines))
    registry.publish_run(step=1)
    registry.event("seeded")
    wait_for(lambda: lines, "the missing store is told")
    with store:
        wait_for(lambda: list_runs(store.url) == ["run"], "the run appears")
        registry.close()
        assert read_status(store.url, "run")["events"][0]["kind"] == "seeded"


def test_close_writes_what_is_left_and_gives_up_on_a_store_that_is_frozen(full_pair: RegistryAndRedis) -> None:
    full_pair.registry.publish_run(state="finished")
    full_pair.registry.event("finished")
    full_pair.registry.close()
    assert full_pair.client.hget(KEYS.run, "state") == "finished"
    assert full_pair.kinds()[-1] == "finished"
    other = Registry(full_pair.store.url, "other", logger_into([]))
    full_pair.freeze()
    other.publish_run(state="finished")
    other.close()


def test_the_stream_is_capped(pair: RegistryAndRedis) -> None:
    pair.client.xadd(KEYS.events, {"kind": "old"})
    pipe = pair.client.pipeline(transaction=False)
    for _ in range(STREAM_EVENTS + 2_000):
        pipe.xadd(KEYS.events, {"kind": "old"})
    pipe.execute()
    pair.registry.event("joined", kind="?")
    wait_for(lambda: pair.client.xrevrange(KEYS.events, count=1)[0][1]["kind"] == "joined", "the event is written")
    assert pair.client.xlen(KEYS.events) < STREAM_EVENTS + 1_000


def test_a_key_of_another_type_is_told_and_the_rest_goes_on(full_pair: RegistryAndRedis) -> None:
    full_pair.client.set(KEYS.run, "mine")
    full_pair.registry.publish_fragment(0, version=99)
    wait_for(lambda: full_pair.logged("registry_lost"), "the refusal is told")
    assert f"redis-cli DEL {KEYS.run}" in full_pair.logged("registry_lost")[0]["reason"]
    wait_for(lambda: full_pair.client.hget(KEYS.fragment(0), "version") == "99", "other keys are written")
    full_pair.client.delete(KEYS.run)
    wait_for(lambda: full_pair.registry.healthy, "it heals when the key is gone")
    assert full_pair.kinds().count("joined") == 1


def test_garbage_in_the_store_counts_as_nothing(pair: RegistryAndRedis) -> None:
    pair.client.set(KEYS.epoch, b"\xff\xfe")
    pair.client.hset(KEYS.fragment(300), mapping={"version": "-3", "other": b"\xff"})
    pair.client.hset(KEYS.fragment(0), "version", "0")
    pair.client.hset(KEYS.fragment(1), "version", "12")
    assert pair.registry.stored_epoch() == 0
    assert pair.registry.stored_versions() == {0: 0, 1: 12}


def test_nobody_can_drive_epochs_or_versions_through_the_store_to_where_no_message_can(pair: RegistryAndRedis) -> None:
    pair.client.set(KEYS.epoch, str(2**53 - 1))
    pair.client.hset(KEYS.fragment(0), "version", str(2**53))
    pair.client.hset(KEYS.fragment(1), "version", "12")
    assert pair.registry.stored_epoch() == 0
    assert pair.registry.stored_versions() == {1: 12}


def test_without_a_url_every_method_does_nothing() -> None:
    registry = Registry(None, "run", logger_into([]))
    registry.publish_run(step=1)
    registry.publish_learner("a", 1.0)
    registry.publish_fragment(0, version=1)
    registry.event("joined")
    registry.write_epoch(3)
    registry.forget_learner("a")
    assert registry.stored_epoch() == 0
    assert registry.stored_versions() == {}
    assert registry.healthy
    registry.close()


# --- the URL ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A store with a password for everybody and a user of its own with the same."""
    directory = tmp_path_factory.mktemp("guarded")
    rules = f"user default on allcommands allkeys allchannels >{SECRET}\n"
    rules += f"user ann on allcommands ~dd:* >{SECRET}\n"
    (directory / "users.acl").write_text(rules)
    with EmbeddedRedis(directory, options=("--aclfile", str(directory / "users.acl"))) as store:
        yield store


@pytest.mark.parametrize("user", ["", "ann"])
def test_user_password_and_database_come_from_the_url(guarded: EmbeddedRedis, user: str) -> None:
    url = f"redis://{user}:{quote(SECRET, safe='')}@127.0.0.1:{guarded.port}"
    check_connection(url)
    registry = Registry(f"{url}/3", "run", logger_into([]))
    registry.publish_run(step=1)
    registry.close()
    assert read_status(f"{url}/3", "run")["run"]["step"] == 1
    assert read_status(f"{url}?db=3", "run")["run"]["step"] == 1
    assert list_runs(f"{url}/0") == []


def test_a_password_file_holds_it_as_it_is(guarded: EmbeddedRedis, tmp_path: Path) -> None:
    file = tmp_path / "geheim 1"
    file.write_text(SECRET + "\n")
    for user in ("", "ann@"):
        check_connection(f"redis://{user}127.0.0.1:{guarded.port}/0?password_file={quote(str(file))}")
    with pytest.raises(SettingError, match="cannot be read"):
        check_connection(f"redis://127.0.0.1:{guarded.port}/0?password_file=/nowhere")


def test_a_password_file_that_is_away_while_the_store_is_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []

    def connect(url: str) -> Any:
        try:
            return redis_client.connect(url)
        except SettingError as wrong:
            refused.append(str(wrong))
            raise

    monkeypatch.setattr(registry_writer, "connect", connect)
    file, away = tmp_path / "password", tmp_path / "away"
    file.write_text(SECRET)
    lines: list[dict[str, Any]] = []
    with EmbeddedRedis(tmp_path / "store", options=("--requirepass", SECRET)) as store:
        url = f"redis://127.0.0.1:{store.port}/0?password_file={quote(str(file))}"
        registry = Registry(url, "run", logger_into(lines))
        registry.publish_run(step=1)
        wait_for(lambda: list_runs(url) == ["run"], "the run appears")
        file.rename(away)
        store.stop()
        wait_for(lambda: lines, "the loss is told")
        registry.publish_run(step=2)
        wait_for(lambda: refused, "the file is missed")
        store.start()
        away.rename(file)
        wait_for(lambda: list_runs(url) == ["run"], "the run appears again")
        assert read_status(url, "run")["run"]["step"] == 2
        registry.close()


@pytest.mark.parametrize("login", ["", ":wrong-%s@", "ann:wrong-%s@", "nobody:%s@"])
def test_a_wrong_password_is_called_authentication_and_not_shown(guarded: EmbeddedRedis, login: str) -> None:
    url = f"redis://{login.replace('%s', quote(SECRET, safe=''))}127.0.0.1:{guarded.port}/0"
    with pytest.raises(SettingError, match="authentication failed at redis://") as caught:
        check_connection(url)
    lines: list[dict[str, Any]] = []
    registry = Registry(url, "run", logger_into(lines))
    wait_for(lambda: lines, "the registry tells it")
    registry.close()
    for text in (str(caught.value), repr(caught.value.__cause__), str(lines)):
        assert "authentication" in text or "None" in text
        assert SECRET not in text
        assert quote(SECRET, safe="") not in text


def test_a_password_that_nobody_asked_for_is_called_authentication(full_pair: RegistryAndRedis) -> None:
    with pytest.raises(SettingError, match="authentication failed"):
        check_connection(full_pair.store.url.replace("//", "//:p@"))


def test_a_database_that_does_not_exist_is_named(full_pair: RegistryAndRedis) -> None:
    with pytest.raises(SettingError, match="database number"):
        check_connection(full_pair.store.url.replace("/0", "/999"))


def test_tls_works_with_the_authority_and_fails_cleanly_without(full_pair: RegistryAndRedis, tmp_path: Path) -> None:
    with TlsFront(tmp_path, behind=full_pair.store.port) as front:
        url = f"rediss://localhost:{front.port}/0"
        trusted = f"{url}?ssl_ca_certs={quote(str(front.certificate))}"
        check_connection(trusted)
        assert read_status(trusted, "run")["epoch"] == 5
        with pytest.raises(SettingError, match=r"certificate of rediss://localhost.*is not trusted.*ssl_ca_certs"):
            check_connection(url)
        with pytest.raises(SettingError, match="does not exist"):
            check_connection(f"{url}?ssl_ca_certs=/nowhere.pem")
        with pytest.raises(PeerLost):
            check_connection(f"redis://localhost:{front.port}/0")
    with pytest.raises(PeerLost, match="with TLS"):
        check_connection(f"rediss://127.0.0.1:{full_pair.store.port}/0")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://host:80/0",
        "redis://",
        "redis://:6379/0",
        "redis://host:6379/three",
        "redis://host:6379/3/4",
        "redis://host:99999/0",
        "redis://:geheim#1@host:6379/0",
        "redis://:geheim/1@host:6379/0",
        "redis://:geheim?1@host:6379/0",
        "redis://u:1/geheim@host:6379/0",
        "redis://[geheim/0",
        "redis://host:6379/0?password=geheim",
        "redis://host:6379/0?socket_timeout=99",
    ],
)
def test_a_malformed_url_is_refused_without_showing_secrets(url: str) -> None:
    with pytest.raises(SettingError) as caught:
        Registry(url, "run", logger_into([]))
    if "@" in url or "password" in url:
        assert "geheim" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_host_that_does_not_exist_or_cannot_be_a_name_is_peer_lost() -> None:
    with pytest.raises(PeerLost, match=r"no Redis answers .* host name nowhere.invalid cannot be resolved"):
        check_connection("redis://nowhere.invalid:6379/0")
    with pytest.raises(PeerLost, match="no Redis answers"):
        check_connection(f"redis://{'x' * 300}:6379/0")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://:geheim@host/0", "redis://:***@host/0"),
        ("redis://ann:geheim@host/0", "redis://ann:***@host/0"),
        ("redis://geheim@host/0", "redis://:***@host/0"),
        ("redis://ann:geh@ei/m@host/0", "redis://ann:***@host/0"),
        ("ann:geheim@host", "ann:***@host"),
        ("rediss://h/0?ssl_password=geheim&db=3", "rediss://h/0?ssl_password=***&db=3"),
        ("redis://:a://geheim@host/0", "redis://:***@host/0"),
    ],
)
def test_a_shown_url_hides_the_password(url: str, shown: str) -> None:
    assert redact_url(url) == shown


def test_a_user_who_may_not_write_is_told(guarded: EmbeddedRedis) -> None:
    admin: Any = redis.Redis(port=guarded.port, password=SECRET)
    admin.execute_command("ACL", "SETUSER", "reader", "on", "+@read", "+ping", "~dd:*", ">p")
    admin.close()
    lines: list[dict[str, Any]] = []
    registry = Registry(f"redis://reader:p@127.0.0.1:{guarded.port}/0", "run", logger_into(lines))
    registry.publish_run(step=1)
    wait_for(lambda: lines, "the refusal is told")
    registry.close()
    assert "may not" in lines[0]["reason"]
    assert not registry.healthy


def test_the_rights_that_the_page_names_are_enough(guarded: EmbeddedRedis) -> None:
    page = (Path(__file__).parents[2] / "docs" / "redis.md").read_text(encoding="utf-8")
    (rights, keys) = re.findall(r"A user needs `([^`]*)` and the keys `([^`]*)`", page)[0]
    admin: Any = redis.Redis(port=guarded.port, password=SECRET)
    admin.execute_command("ACL", "SETUSER", "clerk", "on", *rights.split(), keys, ">p")
    admin.close()
    url, lines = f"redis://clerk:p@127.0.0.1:{guarded.port}/5", list[dict[str, Any]]()
    check_redis(url, "run")
    registry = Registry(url, "run", logger_into(lines))
    registry.publish_run(step=1)
    registry.publish_learner("a", 1.0, loss=1.0)
    registry.forget_learner("b")
    registry.event("joined")
    registry.write_epoch(2)
    registry.close()
    assert lines == []
    assert registry.stored_epoch() == 2
    assert list_runs(url) == ["run"]
    assert read_status(url, "run")["learners"]["a"]["loss"] == 1


@pytest.mark.parametrize(
    ("left_out", "named"),
    [
        ("-xadd", "XADD"), ("-zadd", "ZADD"), ("-hset", "HSET"), ("-exists", "EXISTS"), ("-multi", "MULTI"),
        ("-exec", "EXEC"), ("-xrevrange -del", "DEL, XREVRANGE"), ("resetkeys ~dd:other:*", "GET, SETNX"),
    ],
)  # fmt: skip
def test_a_right_that_a_user_lacks_is_named_before_anything_starts(
    guarded: EmbeddedRedis, left_out: str, named: str
) -> None:
    admin: Any = redis.Redis(port=guarded.port, password=SECRET)
    rights = ["+@read", "+@write", "+@transaction", "+ping", "+select"]
    admin.execute_command("ACL", "SETUSER", "poor", "reset", "on", *rights, "~dd:*", *left_out.split(), ">p")
    with pytest.raises(SettingError, match=f"poor.*may not do what the run's figures need: .*{named}.*docs/redis.md"):
        check_redis(f"redis://poor:p@127.0.0.1:{guarded.port}/0", "run")
    admin.execute_command("ACL", "SETUSER", "poor", "reset", "on", *rights, "~dd:run:*", ">p")
    check_redis(f"redis://poor:p@127.0.0.1:{guarded.port}/0", "run")
    assert admin.keys("dd:run:*") == [], "looking writes nothing"
    admin.close()


def test_a_cluster_is_refused_in_one_sentence_whether_or_not_it_serves_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with EmbeddedRedis(tmp_path, options=("--cluster-enabled", "yes")) as store:
        refused = pytest.raises(SettingError, match="is a cluster, and all keys of a run must be at one server")
        with refused:
            check_redis(store.url, "run")
        client: Any = redis.Redis(port=store.port)
        client.response_callbacks.clear()
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        wait_for(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER INFO"), "it serves all keys")
        client.close()
        with refused:
            check_redis(store.url, "run")
        lines: list[dict[str, Any]] = []
        registry = Registry(store.url, "run", logger_into(lines))
        registry.publish_run(step=1)
        registry.event("joined")
        wait_for(lambda: lines, "the refusal is told")
        registry.close()
        assert "is a cluster" in lines[0]["reason"], "a store that became one while it was away"
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        for command in (["up"], ["syncer", "--own-model"]):
            assert run_command([*command, "--redis", store.url]) == 2
            assert "is a cluster" in capsys.readouterr().err
        assert list(Path().iterdir()) == [], "before anything is written"


def test_a_replica_is_refused_and_a_full_store_is_no_setting_error(pair: RegistryAndRedis) -> None:
    pair.client.config_set("maxmemory", 1)
    with pytest.raises(DilocoError, match=r"refuses: .*maxmemory") as caught:
        check_redis(pair.store.url, "run")
    assert not isinstance(caught.value, SettingError)
    pair.client.config_set("maxmemory", 0)
    pair.client.execute_command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(SettingError, match="is a replica, which takes no writes"):
        check_redis(pair.store.url, "run")
    pair.client.execute_command("REPLICAOF", "NO", "ONE")
    check_redis(pair.store.url, "run")


@pytest.mark.parametrize(
    ("limit", "policy", "warned"),
    [(10**9, "allkeys-lru", True), (10**9, "allkeys-random", True), (0, "allkeys-lru", False),
     (10**9, "volatile-ttl", False), (10**9, "noeviction", False)],
)  # fmt: skip
def test_an_eviction_policy_that_may_throw_the_run_away_is_said(
    pair: RegistryAndRedis, limit: int, policy: str, *, warned: bool
) -> None:
    pair.client.config_set("maxmemory", limit)
    pair.client.config_set("maxmemory-policy", policy)
    said = redis_advice(pair.store.url)
    assert len(said) == warned
    assert all(f"1,000,000,000 bytes (maxmemory-policy {policy})" in sentence for sentence in said)


def test_a_store_that_hides_its_settings_or_is_away_gets_no_advice(guarded: EmbeddedRedis) -> None:
    admin: Any = redis.Redis(port=guarded.port, password=SECRET)
    admin.config_set("maxmemory", 10**9)
    admin.config_set("maxmemory-policy", "allkeys-lru")
    try:
        for rights, says in (("+ping", 0), ("+info", 1), ("+config|get", 1)):
            admin.execute_command("ACL", "SETUSER", "blind", "reset", "on", rights, "~dd:*", ">p")
            assert len(redis_advice(f"redis://blind:p@127.0.0.1:{guarded.port}/0")) == says
    finally:
        admin.config_set("maxmemory", 0)
        admin.close()
    assert redis_advice("redis://127.0.0.1:1/0") == []
    assert redis_advice("redis://127.0.0.1/0?password_file=/nowhere") == []


def test_a_full_store_is_told(pair: RegistryAndRedis) -> None:
    pair.client.config_set("maxmemory", 1)
    pair.registry.publish_run(step=1)
    wait_for(lambda: pair.logged("registry_lost"), "the refusal is told")
    assert "refuses" in pair.logged("registry_lost")[0]["reason"]
    pair.client.config_set("maxmemory", 0)
    wait_for(lambda: pair.registry.healthy, "it heals")


def test_importing_the_registry_loads_no_torch() -> None:
    code = "import sys, decoupled_diloco.common.registry; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True, timeout=60)
    assert done.stdout.strip() == b"False"
