"""A whole run behind a broker with keys, of real processes; and those who have none, or the wrong one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import by_hand
import pytest
from decoupled_diloco.common.auth_keys import Role, new_key, revoke
from decoupled_diloco.common.run_folder import RunFolder
from decoupled_diloco.monitor.report import read_evaluations
from run import FOR_EVER, Process
from transport import free_ports
from waiting import wait_for

SECONDS = 120.0
"""For what takes long on a machine that is busy with other things."""


@dataclass
class Site:
    """A broker with keys, and what is started around it."""

    place: Path
    broker: str
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def keys(self) -> Path:
        return self.place / "keys"

    def key(self, role: Role, name: str, *, known: bool = True, run: str = "it") -> str:
        """A new key's file; the broker does not know it if it is not to be `known`."""
        file = self.place / f"{name}.key"
        new_key(self.keys, role=role, run=run, name=name).save(file)
        if not known:
            revoke(self.keys, role=role, run=run, name=name)
        return str(file)

    def start(self, process: Process) -> Process:
        return self.stack.enter_context(process)

    def syncer(self, *more: str, steps: int = FOR_EVER) -> Process:
        key = self.key("syncer", "syncer")
        return self.start(by_hand.syncer(self.place, self.broker, "--key", key, *more, steps=steps))

    def learner(self, name: str, *more: str) -> Process:
        return self.start(by_hand.learner(self.place, self.broker, name, *more))

    def merged_with(self, name: str) -> int:
        """How many rounds had an answer of this learner."""
        if not (self.place / "syncer.jsonl").exists():
            return 0
        return sum(name in row["learners"].split(",") for row in by_hand.events(self.place, "merged"))

    def wait_for_merges(self, name: str, more: int) -> None:
        goal = self.merged_with(name) + more
        wait_for(lambda: self.merged_with(name) >= goal, f"{name} gives to {more} more rounds", SECONDS)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    port = free_ports()
    made = Site(tmp_path, f"tcp://127.0.0.1:{port}")
    made.key("observer", "nobody")  # a folder of keys has to be there when the broker starts
    with made.stack:
        broker = made.start(Process(tmp_path / "broker", "broker", "--port", str(port), "--keys", str(made.keys)))
        broker.wait_for_output("broker_ready")
        yield made


def test_syncer_learners_and_evaluator_train_a_run_with_one_key_each(site: Site) -> None:
    syncer = site.syncer("--quorum", "2", steps=24)
    shared = site.key("learner", "site")
    learners = [site.learner(name, "--key", shared) for name in ("site", "site-2")]
    evaluator = site.start(by_hand.evaluator(site.place, site.broker, "--key", site.key("observer", "eye")))
    for process in (syncer, *learners, evaluator):
        assert process.wait(SECONDS) == 0, process.output[-3000:]
    summary = RunFolder.open(site.place / "runs" / "it").summary()
    assert summary["state"] == "finished"
    assert {row["name"] for row in summary["learners"]} == {"site", "site-2"}
    assert all(row["tokens_merged"] > 0 for row in summary["learners"])
    assert {row.part for row in read_evaluations(site.place / "runs" / "it")} == {"A", "B"}


def test_a_client_that_has_no_good_key_is_notified_and_ends_when_the_join_times_out(site: Site) -> None:
    unknown = site.key("learner", "u", known=False)
    without = site.learner("a", "--join-timeout", "10")
    wrong = site.learner("u", "--key", unknown, "--join-timeout", "10")
    assert without.wait(SECONDS) == wrong.wait(SECONDS) == 3
    assert f"the broker at {site.broker} wants a key: give --key FILE" in without.output.splitlines()[-1]
    assert (
        f"the broker at {site.broker} refuses the key {unknown} (unknown or revoked)" in wrong.output.splitlines()[-1]
    )
    assert "waiting" in wrong.output  # it was reported before it ended, too


def test_a_syncer_that_is_refused_reports_it_while_it_waits(site: Site) -> None:
    syncer = site.start(by_hand.syncer(site.place, site.broker))
    syncer.wait_for_output("wants a key: give --key FILE", SECONDS)


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("b", [], "not --name b"),
        ("a", ["--run", "other"], "not for --run other"),
    ],
    ids=["name", "run"],
)
def test_a_key_that_does_not_serve_is_reported_before_anything_starts(
    site: Site, name: str, more: list[str], said: str
) -> None:
    learner = site.learner(name, "--key", site.key("learner", "a"), *more)
    assert learner.wait(SECONDS) == 2
    assert said in learner.error_sentence


def test_a_learner_that_is_revoked_is_notified_and_the_others_continue(site: Site) -> None:
    site.syncer()
    good = site.learner("good", "--key", site.key("learner", "good"))
    bad = site.learner("bad", "--key", site.key("learner", "bad"), "--orphan-timeout", "5")
    for name in ("good", "bad"):
        site.wait_for_merges(name, 2)
    revoke(site.keys, role="learner", run="it", name="bad")
    bad.wait_for_output("bad.key (unknown or revoked)", SECONDS)
    site.wait_for_merges("good", 4)
    assert bad.wait(SECONDS) == 5
    assert "(unknown or revoked)" in bad.output.splitlines()[-1]
    assert good.child.poll() is None
