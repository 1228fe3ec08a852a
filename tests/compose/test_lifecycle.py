"""One project from `up` to `down` and up again: what people do to it, and what it must survive.

The tests share a run that would go on for ever; each leaves it running, and one takes it up as the one before left it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq
from composed import BUILT, FOR_EVER, START_SECONDS, Project, run
from decoupled_diloco.common.sockets import Address
from decoupled_diloco.common.wire import Plane
from keyed import Insider, KeyedRun
from run import Process
from waiting import wait_for

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]
SERVICES = {"keys", "redis", "broker", "syncer", "learner", "evaluator"}


@pytest.fixture(scope="module")
def project(images: None) -> Iterator[Project]:
    with Project(steps=FOR_EVER, exit_when_idle_seconds="0", broker_memory="256m") as project:
        project.up()
        yield project


def key_of(project: Project, name: str, place: Path, role: str = "learner") -> Path:
    """A key file for somebody outside, made as the page says."""
    made = project.compose("run", "--rm", "-T", "keys", "new", "--role", role, "--name", name, "--out", "-")
    path = place / f"{name}.key"
    path.touch(0o600)
    path.write_text(made.stdout)
    return path


def secrets_of(project: Project) -> set[str]:
    """Every secret in the key volumes: the redis password, and the secret halves of keys."""
    volumes = [f"-v{project.name}_keys-{name}:/k/{name}:ro" for name in ("broker", "syncer", "learner", "observer")]
    volumes.append(f"-v{project.name}_keys-redis:/k/redis:ro")
    script = "for f in /k/broker/broker.key /k/*/key; do tr -d '\\n' <$f; echo; done; cat /k/redis/password"
    told = run("docker", "run", "--rm", *volumes, "--entrypoint", "sh", f"{project.name}-broker", "-c", script)
    *keys, password = told.splitlines()
    assert len(keys) == 4
    return {password.strip(), *(json.loads(key)["secret"] for key in keys)}


def test_training_is_seen_through_redis_cli(project: Project) -> None:
    assert min(project.wait_for_merges(2)) >= 2
    row = project.hash("dd:run:run")
    assert row["state"] == "running"
    assert int(row["tokens_merged"]) > 0
    wait_for(lambda: len(project.learners()) == 2, "both learners are here", START_SECONDS)
    assert all(name.startswith("learner-") for name in project.learners()), project.learners()


def test_only_the_broker_is_reachable_and_nobody_may_more_than_it_needs(project: Project) -> None:
    rows = project.containers()
    by_service: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_service.setdefault(row["Config"]["Labels"]["com.docker.compose.service"], []).append(row)
    assert set(by_service) == SERVICES
    for service, found in by_service.items():
        for row in found:
            host = row["HostConfig"]
            assert row["Config"]["User"] == "10001:10001", service
            assert host["ReadonlyRootfs"], service
            assert host["CapDrop"] == ["ALL"], service
            assert "no-new-privileges:true" in host["SecurityOpt"], service
            assert host["RestartPolicy"]["Name"] == "on-failure", service
            assert host["Memory"] > 0 or service == "keys", service
            published = sorted(int(port["HostPort"]) for ports in host["PortBindings"].values() for port in ports)
            assert published == ([project.port + n for n in range(4)] if service == "broker" else []), service


def test_no_secret_is_told_to_anybody(project: Project) -> None:
    hidden = secrets_of(project)
    assert all(len(secret) >= 40 for secret in hidden)
    project.wait_for_merges()
    places = {
        "the containers' settings": json.dumps(project.containers()),
        "their processes": "".join(run("docker", "top", row["Id"]) for row in project.containers()
                                   if row["State"]["Running"]),
        "their logs": project.compose("logs", "--no-color").stdout,
        "the images": "".join(run("docker", "history", "--no-trunc", f"{project.name}-{name}") for name in BUILT),
        "the results": project.compose("exec", "-T", "syncer", "sh", "-c",
                                       "cat /results/run/*.json* /results/run/logs/*").stdout,
    }  # fmt: skip
    for what, text in places.items():
        assert len(text) > 200, what
        for secret in hidden:
            assert secret not in text, f"{what} have a secret"


def test_two_more_learners_join_in_mid_run_and_leave_again(project: Project) -> None:
    wait_for(lambda: len(project.learners()) == 2, "two are here", START_SECONDS)
    first = project.learners()
    ids = {row["Id"] for row in project.containers("learner")}
    project.up("--scale", "learner=4")
    wait_for(lambda: len(project.learners()) == 4, "four are here", START_SECONDS)
    assert first < project.learners(), "and the first two are still the same"
    assert ids < {row["Id"] for row in project.containers("learner")}
    project.up("--scale", "learner=2")
    wait_for(lambda: len(project.learners()) == 2, "two have left", START_SECONDS)
    assert len(project.learners(state="left")) == 2
    project.wait_for_merges()


@pytest.mark.parametrize("service", ["learner", "broker", "syncer", "redis"])
def test_a_process_that_crashes_comes_back_and_training_continues(project: Project, service: str) -> None:
    before = project.wait_for_merges()
    victim = project.containers(service)[0]
    project.kill(victim["Id"])

    def again() -> bool:
        (row,) = (row for row in project.containers(service) if row["Id"] == victim["Id"])
        return bool(row["RestartCount"] > victim["RestartCount"] and row["State"]["Running"])

    wait_for(again, f"{service} is started again", START_SECONDS)
    wait_for(lambda: len(project.learners()) == 2, "both learners are here", START_SECONDS)
    after = project.wait_for_merges()
    assert all(new > old for new, old in zip(after, before, strict=True)), "versions go on, never back"


def test_a_learner_from_this_machine_joins_with_a_key_and_not_without(project: Project, place: Path) -> None:
    key = key_of(project, "far", place)
    address = f"tcp://127.0.0.1:{project.port}"
    text = ["--data", json.__file__, "--threads", "1"]
    with (
        Process(place / "far", "learner", "--broker", address, "--key", str(key), *text) as far,
        Process(place / "stranger", "learner", "--broker", address, "--join-timeout", "10", *text) as stranger,
    ):
        wait_for(lambda: any(name.startswith("far-") for name in project.learners()), "it is here", START_SECONDS)
        merged = wait_for(
            lambda: [
                name
                for name in project.learners()
                if name.startswith("far-") and int(project.hash(f"dd:run:learner:{name}")["tokens_merged"])
            ],
            "its work is in the model",
            START_SECONDS,
        )
        assert len(merged) == 1
        assert stranger.wait(120) == 3
        assert f"the broker at {address} wants a key: give --key" in stranger.output
        revoked = project.compose("run", "--rm", "-T", "keys", "revoke", "--role", "learner", "--name", "far")
        assert "far" in revoked.stdout
        wait_for(lambda: not any(name.startswith("far-") for name in project.learners()), "it is cut off", 60)
        far.signal(2)
        far.wait()
    wait_for(lambda: len(project.learners()) == 2, "the others are here", START_SECONDS)


def test_learners_of_another_project_join_through_this_machine_s_address(project: Project, place: Path) -> None:
    key = key_of(project, "remote", place)
    network = json.loads(run("docker", "network", "inspect", f"{project.name}_default"))[0]
    gateway = network["IPAM"]["Config"][0]["Gateway"]
    elsewhere = Project(
        files=["compose/compose.remote.yaml"], broker=f"tcp://{gateway}:{project.port}", key_file=str(key), learners="1"
    )
    with elsewhere:
        elsewhere.up()
        wait_for(lambda: any(name.startswith("remote-") for name in project.learners()), "it is here", START_SECONDS)
    wait_for(lambda: len(project.learners()) == 2, "only the own ones are here again", START_SECONDS)


def test_an_endless_message_ends_the_broker_at_its_memory_limit_and_all_continue(project: Project, place: Path) -> None:
    before = project.wait_for_merges()
    key = key_of(project, "mallory", place)
    (broker,) = project.containers("broker")
    part = bytes(2**20)
    there = cast("KeyedRun", SimpleNamespace(address=Address("127.0.0.1", project.port)))
    with Insider(there, key) as mallory:
        for _ in range(512):  # twice the limit; libzmq keeps the parts of a message until the last one is there
            mallory.up[Plane.BULK].send(part, zmq.SNDMORE, copy=False)
        mallory.up[Plane.BULK].send(b"")  # the first byte of it leaves only now

        def again() -> bool:
            (row,) = project.containers("broker")
            return bool(row["RestartCount"] > broker["RestartCount"] and row["State"]["Running"])

        wait_for(again, "the broker is killed and starts again", START_SECONDS)
        project.compose("run", "--rm", "-T", "keys", "revoke", "--role", "learner", "--name", "mallory")
    wait_for(lambda: len(project.learners()) == 2, "both learners are here", START_SECONDS)
    after = project.wait_for_merges()
    assert all(new > old for new, old in zip(after, before, strict=True)), "versions go on, never back"


def test_everybody_is_found_healthy_by_a_round_trip(project: Project) -> None:
    def ill() -> list[str]:
        rows = [row for row in project.containers() if row["State"]["Running"]]
        assert len(rows) == 6
        return [row["Name"] for row in rows if row["State"]["Health"]["Status"] != "healthy"]

    wait_for(lambda: not ill(), "all are healthy", START_SECONDS)


def test_what_is_stopped_is_saved_and_continues_at_the_same_version_after_down_and_up(project: Project) -> None:
    before = project.wait_for_merges()
    hidden = secrets_of(project)
    project.compose("stop")
    for row in project.containers():
        assert row["State"]["ExitCode"] == 0, (row["Name"], row["State"])
    summary = json.loads(project.result("summary.json"))
    assert summary["state"] == "stopped"
    project.compose("down")
    assert project.containers() == []

    project.up()
    after = project.wait_for_merges()
    assert all(new > old for new, old in zip(after, before, strict=True)), "versions go on, never back"
    row = project.hash("dd:run:run")
    assert int(row["step"]) >= summary["t"]
    assert int(row["epoch"]) == summary["epoch"] + 1
    assert secrets_of(project) == hidden
