"""A run that needs both of its learners: below the quorum it says so, waits, and goes on when they are two again."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import pytest
from probe import Probe, altered
from run import TEXT, Process, Run, wait_until_ended
from waiting import wait_for

pytestmark = pytest.mark.timeout(400)  # whole runs, on a machine that may be busy with others


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    slowly = ["--sync-every", "120"]  # an attempt lasts long enough to be answered by a stranger as well
    with Run(tmp_path_factory.mktemp("quorum"), "--quorum", "2", *slowly) as run:
        yield run.wait_until_training()


def test_one_of_two_is_killed_the_run_reports_it_and_continues_with_its_replacement(run: Run) -> None:
    before = run.learner("learner-2")["incarnation"]
    run.kill("learner-2")
    wait_for(lambda: run.redis_hash("dd:it:run")["quorum_state"] == "1 of 2", "it says that it is below the quorum")
    wait_for(
        lambda: any(row["sentence"].startswith("1 of the 2 learners") for row in run.events("syncer", "blocked")),
        "the syncer's log says so too",
    )
    wait_for(lambda: run.learner("learner-2")["incarnation"] != before, "another learner-2 has joined", 90)
    run.wait_for_versions(2, "with the replacement")
    assert run.redis_hash("dd:it:run")["quorum_state"] == "met"
    assert run.run_map["faults"] == 1
    counts = [row["contributors"] for row in run.events("syncer", "merged")]
    assert set(counts) == {2}, "nothing was merged below the quorum"


def test_forged_answers_to_an_open_call_are_refused_for_what_they_are_and_the_genuine_ones_are_merged(
    run: Run,
) -> None:
    absent = {"name": "learner-2", "incarnation": int(run.learner("learner-2")["incarnation"])}
    absent |= {"tokens_from": 10**9, "tokens_to": 10**9 + 1}  # beyond all that it has reported
    wanted = {"scale", "size", "empty", "stale", "attempt", "late", "duplicate", "stranger", "epoch", "fragment"}

    def refused() -> bool:
        genuine = probe.delta()
        for changes in altered(genuine):
            probe.send(genuine, **changes)  # in the name of one that has answered
            probe.send(genuine, **{**absent, **changes})  # and of one that has not
        probe.send(genuine, **absent)
        return wanted <= {row["reason"] for row in run.events("syncer", "rejected")}

    with Probe(run.broker, "it") as probe:
        merges = len(run.events("syncer", "merged"))
        with run.frozen("learner-2"):  # below the quorum, calls stay open
            wait_for(refused, "every forgery was refused for its reason", 60)
        run.wait_for_versions(2, "after the forgeries")
    for row in run.events("syncer", "merged")[merges:]:
        assert row["learners"] == "learner-1,learner-2", row
        assert row["tokens"] < 10**7, row
    assert run.run_map["faults"] == 1


def test_a_learner_whose_name_was_taken_while_it_slept_costs_the_run_nothing_but_its_place(run: Run) -> None:
    incarnation = run.learner("learner-1")["incarnation"]
    where = ["--broker", run.broker, "--run", "it", "--name", "learner-1"]
    with contextlib.ExitStack() as stack:
        with run.frozen("learner-1") as frozen:
            wait_for(lambda: run.learner("learner-1")["state"] == "lost", "it is missed")
            other = stack.enter_context(Process(run.place, "learner", *where, "--data", TEXT, "--threads", "1"))
            wait_for(lambda: run.learner("learner-1")["incarnation"] != incarnation, "another one has its name", 90)
        wait_for(lambda: run.pid_of("learner-1") != frozen, "the first one learns of it and ends")
        taken = run.learner("learner-1")["incarnation"]
        run.wait_for_versions(1, "with the other one")
        assert run.learner("learner-1")["incarnation"] == taken
        other.signal(signal.SIGTERM)
        assert other.wait(15) == 0, other.output
    wait_for(lambda: run.learner("learner-1")["incarnation"] != taken, "the name is free again, and taken", 90)
    run.wait_for_versions(1, "with the learner that was started again")


def test_when_the_one_that_keeps_all_alive_is_killed_no_process_is_left(run: Run) -> None:
    pids = run.pids()
    assert len(pids) == 6
    run.child.kill()
    wait_until_ended(pids)
    assert not run.folder.is_up()
