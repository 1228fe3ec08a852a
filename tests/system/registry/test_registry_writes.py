"""What a registry writes to Redis, and again after Redis has lost it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from decoupled_diloco.common.errors import PeerLost, SettingError
from decoupled_diloco.common.redis_keys import RedisKeys
from decoupled_diloco.common.registry import Registry, list_runs, read_status
from decoupled_diloco.common.registry_buffer import WAITING_EVENTS
from decoupled_diloco.common.registry_writer import STREAM_EVENTS
from decoupled_diloco.compose.embedded_redis import EmbeddedRedis
from registry_and_redis import KEYS, RegistryAndRedis, logger_into
from waiting import wait_for


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


def test_a_forgotten_learner_is_gone_and_starts_again(full_pair: RegistryAndRedis) -> None:
    full_pair.registry.forget_learner("a")
    wait_for(lambda: full_pair.client.zrange(KEYS.learners, 0, -1) == ["b"], "the learner left the set")
    assert not full_pair.client.exists(KEYS.learner("a"))
    full_pair.registry.publish_learner("a", 3.0, host="new")
    wait_for(lambda: full_pair.client.hgetall(KEYS.learner("a")) == {"host": "new"}, "it begins anew")
    assert not full_pair.logged("registry_lost")


def test_a_flushed_store_is_whole_again_and_one_warning_reports_it(full_pair: RegistryAndRedis) -> None:
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


def test_a_key_of_another_type_is_reported_and_the_rest_continues(full_pair: RegistryAndRedis) -> None:
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
