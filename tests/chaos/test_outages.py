"""One run that goes on whatever is done round it: to its store, to its learners, on its broker."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from probe import Probe, altered, malformed
from run import (
    FRAGMENTS,
    MODEL,
    SCHEDULE,
    TEXT,
    Process,
    Run,
    check_token_ledger,
    is_alive,
    resident_mib,
    wait_until_ended,
)
from waiting import wait_for

pytestmark = pytest.mark.timeout(400)  # whole runs, on a machine that may be busy with others

HEAL_SECONDS = 10.0
"""Two beats are meant; a busy machine may need longer."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run `a`, which goes on until it is asked to stop. No test ends it, and none may cost it a process."""
    with Run(tmp_path_factory.mktemp("outages"), run="a") as run:
        yield run.wait_until_training()
        assert run.run_map["faults"] == 0
        left = run.pids()
        assert run.interrupt() == 0, run.output
        wait_until_ended(left)
        names = {row["name"] for row in run.figures["learners"]}
        assert names == {"learner-1", "learner-2"} | ({"guest"} if run.events("syncer", "left") else set())


def join(run: Run, name: str, *, of: str = "a") -> Process:
    where = ["--broker", run.broker, "--run", of, "--name", name]
    return Process(run.place, "learner", *where, "--data", TEXT, "--threads", "1")


# --- the store -------------------------------------------------------------------------------------------------------
def test_what_is_taken_from_the_store_is_there_again_within_a_beat_or_two(run: Run) -> None:
    before = {name: run.figure(name) for name in ("merges", "step", "tokens_reported", "tokens_merged")}
    keys = set(run.store.keys("dd:a:*"))
    run.store.flushall()
    wait_for(lambda: keys <= set(run.store.keys("dd:a:*")), "every key is written anew", HEAL_SECONDS)
    for name, value in before.items():
        assert run.figure(name) >= value, name
    for key in ("run", "learners", "learner:learner-1", f"fragment:{FRAGMENTS - 1}", "events", "epoch"):
        run.store.delete(f"dd:a:{key}")
        wait_for(lambda key=key: run.store.exists(f"dd:a:{key}"), f"dd:a:{key} is back", HEAL_SECONDS)  # type: ignore[misc]
    assert set(run.store.zrange("dd:a:learners", 0, -1)) >= {"learner-1", "learner-2"}
    assert run.events("syncer", "registry_lost")
    assert not run.events("syncer", "lost"), "nobody is thrown out because the store forgot"


def test_a_store_that_does_not_move_does_not_stop_the_run(run: Run) -> None:
    pids = run.pids()
    with run.frozen("store"):
        wait_for(lambda: _missed(run), "the syncer misses the store")
        before = len(run.events("syncer", "merged"))
        wait_for(lambda: len(run.events("syncer", "merged")) > before + 10 * FRAGMENTS, "rounds go on")
    wait_for(lambda: run.events("syncer", "registry_back"), "the store is written again", HEAL_SECONDS)
    run.wait_for_versions(1, "after the store stood still")
    assert len(_missed(run)) == 1
    assert run.pids() == pids


def _missed(run: Run) -> list[str]:
    reasons = [row["reason"] for row in run.events("syncer", "registry_lost")]
    return [reason for reason in reasons if reason.startswith("no Redis answers")]


# --- learners --------------------------------------------------------------------------------------------------------
def test_a_learner_that_slept_through_many_versions_takes_the_current_state_and_nothing_ancient_is_merged(
    run: Run,
) -> None:
    with run.frozen("learner-1"):
        wait_for(lambda: run.learner("learner-1")["state"] == "lost", "it is missed")
        merged, slept = run.merged_of("learner-1"), len(run.events("syncer", "merged"))
        run.wait_for_versions(20, "while one sleeps")
    wait_for(lambda: run.merged_of("learner-1") > merged, "its work is merged again")
    assert run.learner("learner-1")["state"] == "live"
    rows = run.events("syncer", "merged")[slept:]
    back = next(row for row in rows if "learner-1" in row["learners"].split(","))
    newest = max(row["tokens"] for row in rows if row["learners"] == "learner-2")
    assert back["tokens"] < 20 * newest, "what it did before its sleep is not in there"
    assert not run.events("learner-1", "not_finite")


def test_a_live_name_is_refused_to_a_second_learner_and_the_first_continues(run: Run) -> None:
    incarnation, joined = run.learner("learner-2")["incarnation"], run.learner("learner-2")["joined_at"]
    merged = run.merged_of("learner-2")
    with join(run, "learner-2") as second:
        assert second.wait(90) == 2
        assert "the name learner-2 is in use by a learner that is alive" in second.output
    wait_for(lambda: run.merged_of("learner-2") > merged, "the first one's work is merged")
    assert run.learner("learner-2")["incarnation"] == incarnation
    assert abs(float(run.learner("learner-2")["joined_at"]) - float(joined)) < 1


def test_a_learner_from_outside_joins_a_run_and_leaves_it_when_asked_to(run: Run) -> None:
    with join(run, "guest") as guest:
        wait_for(lambda: run.merged_of("guest") > 0, "the guest's work is merged", 90)
        guest.signal(signal.SIGTERM)
        assert guest.wait(15) == 0, guest.output
    wait_for(lambda: run.learner("guest")["state"] == "left", "the guest has left")
    wait_for(lambda: run.learner("guest")["tokens_pending"] == "0", "nothing of the guest is pending", HEAL_SECONDS)
    check_token_ledger({name: int(value) for name, value in run.learner("guest").items() if name.startswith("tokens_")})


# --- others on the same broker ---------------------------------------------------------------------------------------
def test_two_runs_on_one_broker_and_one_store_do_not_meet_though_name_and_model_are_alike(
    run: Run, tmp_path: Path
) -> None:
    shape = [*MODEL, *SCHEDULE, "--steps", "300", "--seed", "5"]
    where = ["--broker", run.broker, "--redis", run.store_url, "--run", "a2", "--dir", str(tmp_path / "a2")]
    before = {name: run.figure(name) for name in ("epoch", "tokens_merged")}
    with (
        Process(tmp_path, "syncer", *where, *shape, "--data", TEXT) as syncer,
        join(run, "learner-1", of="a2") as one,
    ):
        wait_for(lambda: run.merged_of("learner-1", "a2") > 0, "the second run merges", 90)
        run.wait_for_versions(2, "the first run beside the second")
        assert syncer.wait(90) == 0, syncer.output
        assert one.wait(30) == 0, one.output
    told = run.redis_hash("dd:a2:run")
    assert told["state"] == "finished"
    assert told["model_hash"][:16] in one.output
    check_token_ledger({name: int(value) for name, value in told.items() if name.startswith("tokens_")})
    assert run.store.zrange("dd:a2:learners", 0, -1) == ["learner-1"]
    assert run.figure("epoch") == before["epoch"]
    assert run.figure("tokens_merged") > before["tokens_merged"]
    assert not [row for row in run.events("syncer", "rejected") if row["reason"] == "run"]
    assert not run.events("syncer", "reset")


def test_whatever_a_stranger_publishes_rounds_close_memory_stays_and_nothing_is_written(
    run: Run, tmp_path: Path
) -> None:
    trap, pids = tmp_path / "trap", run.pids()
    with Probe(run.broker, "a") as probe:
        run.wait_for_versions(1, "before the attack")
        before = {name: resident_mib(run.pid_of(name)) for name in ("syncer", "broker")}
        old = probe.delta()
        for number in range(5):
            genuine = probe.delta()
            for frames in malformed("a", genuine, trap):
                probe.publish(frames)
            for changes in altered(genuine):
                probe.send(genuine, **changes)
            probe.send(genuine)
            probe.send(old)
            probe.send_raw(number)
        sent_mib = probe.sent_bytes / 2**20
        run.wait_for_versions(3, "after the attack")
        grown = {name: resident_mib(run.pid_of(name)) - mib for name, mib in before.items()}
    assert not trap.exists()
    assert run.pids() == pids
    assert max(grown.values()) < sent_mib, (grown, sent_mib)
    reasons = {row["reason"] for row in run.events("syncer", "rejected")}
    assert {"header", "field", "frames", "checksum", "chunk", "topic", "stranger", "epoch"} <= reasons, reasons
    assert all(is_alive(pid) for pid in pids)
    for name in ("syncer", "broker"):
        assert not [row for row in run.log(name) if row["level"] == "error"]
