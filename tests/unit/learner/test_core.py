"""What needs a clock of its own: a learner that stood still, one that is orphaned, one that ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoupled_diloco.common.codec import digest, model_hash
from decoupled_diloco.common.config import LearnerConfig, RunSettings
from decoupled_diloco.common.errors import Orphaned, Refused
from decoupled_diloco.common.fragments import Layout, TensorSpec, balanced_plan
from decoupled_diloco.common.wire import Alive, Beat, Fetch, Goodbye, Hello, Keyframe, Message, Plane, Welcome, split
from decoupled_diloco.learner.alive_and_goodbye import ByteCounts
from decoupled_diloco.learner.core import LearnerCore, Phase
from decoupled_diloco.learner.identity import Identity
from decoupled_diloco.learner.join_protocol import SeedSender
from decoupled_diloco.learner.mailbox import Mailbox
from logged import logged

LAYOUT = Layout((TensorSpec(name="w", shape=(150,), dtype="float32"),))
PLAN = balanced_plan(LAYOUT, 1)
ME = Identity(run="r", name="me", incarnation=7, layout=LAYOUT)
SETTINGS = RunSettings(run="r", fragments=1, overlap=1)
VECTOR = torch.zeros(PLAN.fragments[0].length)


def beat(**more: Any) -> Beat:
    rows: dict[str, Any] = {
        "run": "r", "epoch": 1, "state": "running", "t": 3, "steps": 600, "step_seconds": 0.0, "versions": (4,),
        "settings": SETTINGS.to_map(), "syncer": 1,
    }  # fmt: skip
    return Beat(**(rows | more))


class Talk:
    """A conversation, and the syncer's side of it."""

    def __init__(self, me: Identity = ME) -> None:
        self.mailbox = Mailbox()
        config = LearnerConfig(broker="tcp://127.0.0.1:5550", name="me", run="r", orphan_timeout_seconds=60)
        self.core = LearnerCore(config, me, self.mailbox, SeedSender(me, None))

    def tick(self, now: float, *, proven: bool = True) -> list[Message]:
        said: Iterator[Message] = self.core.tick(now, control_proven=proven, bulk_proven=proven, traffic=ByteCounts())
        return list(said)

    def kinds(self, now: float) -> list[type[Message]]:
        return [type(message) for message in self.tick(now)]

    def hear(self, message: Message, now: float) -> None:
        self.core.receive(message, Plane.CONTROL if message.PLANE is Plane.CONTROL else Plane.BULK, now)

    def keyframe(self, version: int, now: float, epoch: int = 1) -> None:
        content = VECTOR.numpy().data.cast("B")
        [part] = split(content)
        self.hear(Keyframe(run="r", epoch=epoch, t=0, version=version, fragment=0, digest=digest(VECTOR), **part), now)

    def welcome(self, now: float, epoch: int = 1, verdict: str = "welcome") -> None:
        self.hear(
            Welcome(run="r", name="me", incarnation=7, epoch=epoch, verdict=verdict, fragments=1,
                    plan_digest=PLAN.digest), now,
        )  # fmt: skip

    def join(self) -> None:
        self.hear(beat(), 100.0)
        assert self.kinds(100.0) == [], "nothing is said before a beat came on the bulk plane too"
        self.core.receive(beat(), Plane.BULK, 100.0)
        assert self.kinds(100.0) == [Hello]
        self.welcome(100.1)
        assert Fetch in self.kinds(100.2)
        self.keyframe(4, 100.3)
        assert self.mailbox.wait_joined(0) is not None


@pytest.fixture
def joined() -> Talk:
    talk = Talk()
    talk.join()
    return talk


def test_a_learner_without_beats_is_orphaned_when_the_time_is_up(joined: Talk) -> None:
    for second in range(101, 160):
        joined.tick(float(second))
        assert joined.mailbox.failure is None
    joined.tick(160.5)
    assert isinstance(joined.mailbox.failure, Orphaned)


def test_a_learner_that_stood_still_itself_is_no_orphan(joined: Talk) -> None:
    joined.tick(101.0)
    joined.tick(4000.0)
    joined.tick(4001.0)
    assert joined.mailbox.failure is None


def test_the_end_is_acknowledged_each_second_whatever_comes_later(joined: Talk) -> None:
    joined.hear(beat(state="finished", versions=(5,), model_hash=model_hash([VECTOR])), 101.0)
    joined.keyframe(5, 101.1)
    assert joined.core.phase is Phase.FINISHED
    assert Goodbye in joined.kinds(101.2)
    assert Goodbye not in joined.kinds(101.5)
    joined.hear(beat(epoch=2), 102.0)
    [goodbye] = [m for m in joined.tick(102.5) if isinstance(m, Goodbye)]
    assert (goodbye.reason, goodbye.model_hash) == ("finished", model_hash([VECTOR]))
    joined.mailbox.leaving = "left"
    [last] = [m for m in joined.tick(102.6) if isinstance(m, Goodbye)]
    assert last.reason == "finished"
    joined.core.sent(last, 102.6)
    assert joined.core.over


def test_while_it_asks_under_a_new_epoch_a_learner_says_nothing_else(joined: Talk) -> None:
    joined.hear(beat(epoch=2), 101.0)
    assert joined.kinds(101.1) == [Hello]
    assert joined.kinds(101.2) == []
    joined.welcome(101.3, epoch=1)
    assert joined.kinds(101.4) == []
    joined.welcome(101.5, epoch=2)
    assert Fetch in joined.kinds(101.6)


def test_a_learner_that_knows_the_end_tells_its_last_figures_says_goodbye_and_is_alive_no_more(joined: Talk) -> None:
    assert Alive in joined.kinds(101.3)
    joined.hear(beat(state="finished", versions=(5,), model_hash=model_hash([VECTOR])), 101.4)
    joined.keyframe(5, 101.5)
    assert [joined.kinds(103.0 + second) for second in range(3)] == [[Alive, Goodbye], [Goodbye], [Goodbye]]


def test_a_learner_that_comes_after_the_end_has_nothing_to_report() -> None:
    late = Talk()
    over = beat(state="finished", versions=(5,), model_hash=model_hash([VECTOR]))
    for plane in Plane:
        late.core.receive(over, plane, 100.0)
    assert late.kinds(100.1) == [Hello]
    late.welcome(100.2, verdict="finished")
    assert late.kinds(100.3) == [Fetch], "a report of who is no member would be answered by: say Hello again"
    late.keyframe(5, 100.4)
    assert late.core.phase is Phase.FINISHED
    assert [late.kinds(101.0 + second) for second in range(3)] == [[Goodbye]] * 3


def test_a_learner_that_was_forgotten_asks_to_be_let_in_again_and_takes_the_whole_model(joined: Talk) -> None:
    joined.mailbox.boundary()
    joined.welcome(101.0, verdict="wait")
    assert joined.kinds(101.1) == [Hello]
    joined.welcome(101.2)
    assert Fetch in joined.kinds(101.3)
    joined.keyframe(4, 101.4)
    waits = joined.mailbox.boundary()
    assert waits.reset
    assert [arrival.public.version for arrival in waits.arrivals] == [4]


def test_a_learner_in_training_never_gives_version_0_of_a_run_that_starts_again(joined: Talk) -> None:
    joined.hear(beat(epoch=2, versions=()), 101.0)
    joined.welcome(101.1, epoch=2, verdict="seed")
    assert isinstance(joined.mailbox.failure, Refused)
    assert "starts again from version 0" in str(joined.mailbox.failure)


def test_a_learner_whose_name_another_one_has_meanwhile_is_notified(joined: Talk) -> None:
    joined.welcome(101.0, verdict="refused")
    assert isinstance(joined.mailbox.failure, Refused)


def test_a_learner_that_leaves_where_no_broker_listens_ends_soon(joined: Talk) -> None:
    joined.tick(101.0)
    joined.mailbox.leaving = "left"
    joined.tick(101.1, proven=False)
    assert not joined.core.over
    joined.tick(102.2, proven=False)
    assert joined.core.over


def test_a_learner_whose_messages_are_rejected_reports_it_in_one_sentence_and_continues(
    joined: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    welcome = Welcome(run="r", name="me", incarnation=7, epoch=1, verdict="notice", reason="delta norm: 3 (5 in a row)")
    joined.hear(welcome, 101.0)
    joined.hear(Welcome(**{**vars(welcome), "incarnation": 8}), 101.1)
    [line] = [line for line in capsys.readouterr().err.splitlines() if "messages_rejected" in line]
    assert "WARNING" in line
    assert "the syncer repeatedly rejects messages of me: delta norm: 3 (5 in a row)" in line
    assert joined.core.phase is Phase.FOLLOWING
    assert joined.mailbox.failure is None


@pytest.mark.parametrize(
    ("last", "ended"),
    [
        ({"state": "draining", "t": 600}, True),
        ({"state": "running", "t": 590, "step_seconds": 0.5}, True),
        ({"state": "running", "t": 3, "step_seconds": 0.5}, False),
        ({"state": "stopping", "t": 590, "step_seconds": 0.5}, False),
    ],
)
def test_an_orphan_of_a_run_that_has_probably_finished_is_informed_how_to_get_its_model(
    joined: Talk, last: dict[str, Any], ended: bool
) -> None:
    joined.hear(beat(**last), 101.0)
    for second in range(101, 163):
        joined.tick(float(second))
    assert isinstance(joined.mailbox.failure, Orphaned)
    command = "`diloco syncer --broker tcp://127.0.0.1:5550 --dir FOLDER`"
    assert (command in str(joined.mailbox.failure)) == ended
    assert f"at step {last['t']} of 600" in str(joined.mailbox.failure) or not ended


def test_a_join_whose_hello_is_rejected_waits_for_that_in_words() -> None:
    talk = Talk()
    talk.hear(beat(), 100.0)
    reason = "hello layout: a tensor's name (3 in a row)"
    talk.hear(Welcome(run="r", name="me", incarnation=7, epoch=1, verdict="notice", reason=reason), 100.1)
    assert talk.mailbox.waits_for == f"its Hello to be accepted ({reason})"


# --- silence ---------------------------------------------------------------------------------------------------------
def train_on(talk: Talk, since: float, until: float, *, proven: bool = True, beats: bool = False) -> None:
    """Ticks as the link makes them, four a second."""
    for quarter in range(int(4 * since), int(4 * until)):
        if beats and quarter % 4 == 0:
            talk.hear(beat(), quarter / 4)
        talk.tick(quarter / 4, proven=proven)


def test_the_silence_of_the_syncer_is_logged_soon_and_seldom_with_what_the_learner_does_and_its_end(
    joined: Talk, tmp_path: Path
) -> None:
    with logged(tmp_path) as events:
        joined.hear(beat(), 101.0)
        train_on(joined, 101.0, 150.0)
        said = events("syncer_silent")
        assert [row["seconds"] for row in said] == [8, 16, 32]
        assert said[0]["level"] == "warning"
        assert said[0]["sentence"] == (
            "no beat of run r has come from tcp://127.0.0.1:5550 for 8 s; me continues training, sends once "
            "beats arrive again, and saves its parameters and ends after 60 s"
        )
        joined.mailbox.refusal = "host name broker cannot be resolved (Name or service not known); is it spelled right?"
        joined.hear(beat(), 150.0)
        joined.tick(150.0)
        assert [row["seconds"] for row in events("syncer_heard_again")] == [49]
        train_on(joined, 150.0, 159.0)
        (*_, last) = events("syncer_silent")
        assert "for 8 s (host name broker cannot be resolved" in last["sentence"]
        assert len(events("syncer_silent")) == 4


def test_what_a_learner_slept_through_itself_is_no_silence_of_the_syncer(joined: Talk, tmp_path: Path) -> None:
    with logged(tmp_path) as events:
        joined.hear(beat(), 101.0)
        train_on(joined, 101.0, 104.0)
        train_on(joined, 200.0, 203.0)
        assert events("syncer_silent") == []
        train_on(joined, 203.0, 210.0)
        assert len(events("syncer_silent")) == 1


def test_a_learner_whose_messages_the_broker_does_not_take_reports_it_although_beats_arrive(
    joined: Talk, tmp_path: Path
) -> None:
    with logged(tmp_path) as events:
        train_on(joined, 101.0, 105.0, beats=True)
        train_on(joined, 105.0, 130.0, beats=True, proven=False)
        said = events("broker_accepts_nothing")
        assert [round(row["seconds"]) for row in said] == [8, 16]
        assert "the broker at tcp://127.0.0.1:5550 has accepted no message of me for 8 s" in said[0]["sentence"]
        train_on(joined, 130.0, 131.0, beats=True)
        assert [round(row["seconds"]) for row in events("broker_accepts_again")] == [25]
        assert events("syncer_silent") == []


def test_an_observer_says_what_its_model_is_meanwhile_and_a_finished_run_has_no_silence(tmp_path: Path) -> None:
    with logged(tmp_path) as events:
        watching = Talk(replace(ME, role="observer"))
        watching.join()
        train_on(watching, 101.0, 112.0)
        (said,) = events("syncer_silent")
        assert said["sentence"].endswith("stays at its newest version and is updated once beats come again")
        watching.hear(beat(state="finished", versions=(4,), model_hash=model_hash([VECTOR])), 112.0)
        assert watching.mailbox.final
        train_on(watching, 112.0, 200.0)
        assert len(events("syncer_silent")) == 1
