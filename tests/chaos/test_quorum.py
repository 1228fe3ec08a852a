"""A run that needs both of its learners: below the quorum it says so, waits, and goes on when they are two again."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest
from house import TEXT, House, Process, wait_until_gone
from probe import Probe, altered
from waiting import wait_for

pytestmark = pytest.mark.timeout(400)  # whole runs, on a machine that may be busy with others


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    slowly = ["--sync-every", "120"]  # an attempt lasts long enough to be answered by a stranger as well
    with House(tmp_path_factory.mktemp("quorum"), "--quorum", "2", *slowly) as house:
        yield house.wait_until_it_runs()


def test_one_of_two_is_killed_the_run_says_so_and_goes_on_with_its_replacement(house: House) -> None:
    before = house.learner("learner-2")["incarnation"]
    house.kill("learner-2")
    wait_for(lambda: house.row("dd:it:run")["quorum_state"] == "1 of 2", "it says that it is below the quorum")
    wait_for(
        lambda: any(row["sentence"].startswith("1 of the 2 learners") for row in house.events("syncer", "blocked")),
        "the syncer's log says so too",
    )
    wait_for(lambda: house.learner("learner-2")["incarnation"] != before, "another learner-2 has joined", 90)
    house.wait_for_versions(2, "with the replacement")
    assert house.row("dd:it:run")["quorum_state"] == "met"
    assert house.told["faults"] == 1
    counts = [row["contributors"] for row in house.events("syncer", "merged")]
    assert set(counts) == {2}, "nothing was merged below the quorum"


def test_forged_answers_to_an_open_call_are_refused_for_what_they_are_and_the_genuine_ones_are_merged(
    house: House,
) -> None:
    absent = {"name": "learner-2", "incarnation": int(house.learner("learner-2")["incarnation"])}
    absent |= {"tokens_from": 10**9, "tokens_to": 10**9 + 1}  # beyond all that it has reported
    wanted = {"scale", "size", "empty", "stale", "attempt", "late", "duplicate", "stranger", "epoch", "fragment"}

    def refused() -> bool:
        genuine = probe.delta()
        for changes in altered(genuine):
            probe.send(genuine, **changes)  # in the name of one that has answered
            probe.send(genuine, **{**absent, **changes})  # and of one that has not
        probe.send(genuine, **absent)
        return wanted <= {row["reason"] for row in house.events("syncer", "rejected")}

    with Probe(house.broker, "it") as probe:
        merges = len(house.events("syncer", "merged"))
        os.kill(house.pid_of("learner-2"), signal.SIGSTOP)  # below the quorum, calls stay open
        try:
            wait_for(refused, "every forgery was refused for its reason", 60)
        finally:
            os.kill(house.pid_of("learner-2"), signal.SIGCONT)
        house.wait_for_versions(2, "after the forgeries")
    for row in house.events("syncer", "merged")[merges:]:
        assert row["learners"] == "learner-1,learner-2", row
        assert row["tokens"] < 10**7, row
    assert house.told["faults"] == 1


def test_a_learner_whose_name_was_taken_while_it_slept_costs_the_run_nothing_but_its_place(house: House) -> None:
    sleeper, incarnation = house.pid_of("learner-1"), house.learner("learner-1")["incarnation"]
    where = ["--broker", house.broker, "--run", "it", "--name", "learner-1"]
    os.kill(sleeper, signal.SIGSTOP)
    try:
        wait_for(lambda: house.learner("learner-1")["state"] == "lost", "it is missed")
        with Process(house.place, "learner", *where, "--data", TEXT, "--threads", "1") as other:
            wait_for(lambda: house.learner("learner-1")["incarnation"] != incarnation, "another one has its name", 90)
            os.kill(sleeper, signal.SIGCONT)
            wait_for(lambda: house.pid_of("learner-1") != sleeper, "the sleeper hears of it and ends")
            taken = house.learner("learner-1")["incarnation"]
            house.wait_for_versions(1, "with the other one")
            assert house.learner("learner-1")["incarnation"] == taken
            other.signal(signal.SIGTERM)
            assert other.wait(15) == 0, other.said
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(sleeper, signal.SIGCONT)
    wait_for(lambda: house.learner("learner-1")["incarnation"] != taken, "the name is free again, and taken", 90)
    house.wait_for_versions(1, "with the learner that was started again")


def test_when_the_one_that_keeps_all_alive_is_killed_no_process_is_left(house: House) -> None:
    pids = house.pids()
    assert len(pids) == 6
    house.child.kill()
    wait_until_gone(pids)
    assert not house.folder.is_up()
