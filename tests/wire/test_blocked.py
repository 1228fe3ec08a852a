"""A run that does not move and a sender whose messages are rejected: both hear why, over real sockets and a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scripted_learner
from decoupled_diloco.broker.broker import Broker
from decoupled_diloco.common.config import BrokerConfig
from decoupled_diloco.common.fragments import Layout
from decoupled_diloco.common.registry import read_status
from decoupled_diloco.common.wire import Beat, Call, Welcome
from decoupled_diloco.compose.embedded_redis import EmbeddedRedis
from decoupled_diloco.syncer import deltas, loop, membership, rejections, stall_diagnosis
from scripted_learner import LAYOUT, ScriptedLearner
from syncer_run import SyncerRun, settings, syncer_run
from transport import BrokerChild, free_ports
from waiting import wait_for


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats come fast, and patience is short, so that tests need not wait for them."""
    monkeypatch.setattr(loop, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(stall_diagnosis, "SURE_SECONDS", 0.3)
    monkeypatch.setattr(stall_diagnosis, "SEED_SECONDS", 0.3)
    monkeypatch.setattr(stall_diagnosis, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(stall_diagnosis, "PATIENCE_ROUNDS", 0)
    monkeypatch.setattr(rejections, "APART_SECONDS", 0.0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    made = EmbeddedRedis(tmp_path / "store")
    made.start()
    yield made.url
    made.stop()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SyncerRun]:
    with syncer_run(tmp_path) as made:
        yield made


def joined(run: SyncerRun, names: str) -> list[ScriptedLearner]:
    learners = [run.learner(name) for name in names]
    for learner in learners:
        learner.join()
    return learners


def trains(learners: list[ScriptedLearner], values: dict[str, float], enough: Callable[[], Any]) -> Callable[[], Any]:
    """A predicate for `wait_for`: each learner reports and answers every attempt, until `enough` is true."""
    answered: set[tuple[str, int, int]] = set()

    def predicate() -> Any:
        for learner in learners:
            learner.listen()
            newest = next((m for m in reversed(learner.heard) if isinstance(m, Beat)), None)
            for call in newest.calls if newest else ():
                answer(learner, learner.newest(call), values.get(learner.name, 0.01))
            learner.alive()
        return enough()

    def answer(learner: ScriptedLearner, call: Call, value: float) -> None:
        turn = (learner.name, call.slot, call.attempt)
        if turn not in answered:
            answered.add(turn)
            learner.versions[call.fragment] = call.version
            learner.step()
            learner.bulk.send(learner.delta(call, value))

    return predicate


def test_one_of_three_beyond_the_usual_norm_blocks_a_quorum_of_three_and_is_named_in_store_events_and_notice(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltas, "NORM_AFTER", 1)
    with syncer_run(tmp_path, store, quorum=3, fragments=1, overlap=1) as run:
        learners = joined(run, "abc")
        wild: dict[str, float] = {}

        def seen() -> dict[str, Any]:
            return read_status(store, "run")

        wait_for(trains(learners, wild, lambda: sum(run.syncer.current.training.rounds.versions) >= 1), "it merges")  # type: ignore[union-attr]
        wild["c"] = 1e4

        def told() -> Any:
            status = seen()
            return status if status["run"].get("blocked") and status["learners"]["c"]["rejected_reason"] else None

        status = wait_for(trains(learners, wild, told), "the run says that it is blocked")
        assert "has 2 of the 3 answers that --quorum asks for" in status["run"]["blocked"]
        assert "those of c are rejected" in status["run"]["blocked"]
        assert "norm: 1" in status["run"]["blocked"]
        assert status["learners"]["c"]["rejected_reason"].startswith("delta norm: ")
        assert status["learners"]["c"]["rejected"] >= rejections.REPEATED
        assert status["learners"]["a"]["rejected_reason"] == ""
        notice = learners[2].wait(Welcome, lambda w: w.verdict == "notice")
        assert "delta norm" in notice.reason
        wild.clear()
        kinds = wait_for(
            trains(learners, wild, lambda: [e["kind"] for e in seen()["events"] if "blocked" in e["kind"]][1:]),
            "it moves again",
        )
        assert kinds == ["unblocked"]


def test_a_run_whose_learners_report_no_tokens_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted_learner, "TOKENS", 0)
    with syncer_run(tmp_path, fragments=1, overlap=1) as run:
        learners, block = joined(run, "ab"), run.syncer.current.stall_monitor

        def told() -> Any:
            notices = [m for m in learners[0].heard if isinstance(m, Welcome) and m.verdict == "notice"]
            return notices if "those of a, b do not count, because 0 tokens are reported" in block.text else []

        [notice] = wait_for(trains(learners, {}, told), "both hear why")
        assert "empty: it covers 0 tokens" in notice.reason


def test_a_learner_whose_reports_cannot_be_read_hears_it_and_the_run_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "SILENCE_SECONDS", 0.5)
    with syncer_run(tmp_path) as run:
        [a], block = joined(run, "a"), run.syncer.current.stall_monitor
        what = "field: loss of a alive must be a finite number"

        def told() -> bool:
            a.alive(loss=1e16)
            return what in block.text

        wait_for(told, "the run says why it does not move")
        assert "a has not been heard for" in block.text
        assert what in a.wait(Welcome, lambda w: w.verdict == "notice").reason
        wait_for(trains([a], {}, lambda: not block.text), "reports that can be read make it move")


def test_a_flood_is_answered_by_one_notice_and_who_never_said_hello_by_none(run: SyncerRun) -> None:
    [a] = joined(run, "a")
    stranger = run.learner("x", 9)
    for sender in (a, stranger):
        before = run.rejected["field"]

        def rejected(sender: ScriptedLearner = sender, before: int = before) -> bool:
            sender.alive(loss=1e16)
            sender.listen()
            return run.rejected["field"] >= before + 30

        wait_for(rejected, "thirty are rejected")
    assert a.hello().verdict == "welcome"
    assert [w.verdict for w in a.heard if isinstance(w, Welcome)] == ["welcome"]
    assert not [w for w in stranger.heard if isinstance(w, Welcome)]
    assert stranger.hello().verdict == "welcome", "this is the first that it hears"


def test_a_newcomer_whose_layout_is_none_hears_of_it(run: SyncerRun) -> None:
    joined(run, "a")
    tensor = replace(LAYOUT.tensors[0], name="a\x1b[31m\n")
    newcomer = run.learner("b", 2)
    newcomer.wait(Beat)
    welcome = newcomer.hello(Layout((tensor, *LAYOUT.tensors[1:])))
    assert welcome.verdict == "notice"
    assert "hello layout: a tensor's name" in welcome.reason


def test_a_learner_that_was_chosen_to_begin_the_run_and_sends_nothing_is_named(run: SyncerRun) -> None:
    a, block = run.learner("a"), run.syncer.current.stall_monitor
    a.wait(Beat)
    what = "a was chosen to send version 0 and has sent nothing for"
    wait_for(lambda: a.hello().verdict == "seed" and what in block.text, "it is named")
    a.join()
    wait_for(trains([a], {}, lambda: not block.text), "it moves")


def test_a_broker_that_is_away_is_reported_and_its_return(tmp_path: Path) -> None:
    port = free_ports()
    broker = Broker(BrokerConfig(port=port))
    broker.start()
    run = SyncerRun(tmp_path, port, settings())
    run.start()
    try:
        [a], block = joined(run, "a"), run.syncer.current.stall_monitor
        broker.stop()
        broker.join()
        wait_for(lambda: f"the broker at tcp://127.0.0.1:{port} does not answer" in block.text, "it says so")
        broker = Broker(BrokerConfig(port=port))
        broker.start()
        wait_for(trains([a], {}, lambda: not block.text), "it moves again")
    finally:
        run.close()
        broker.stop()


def test_a_broker_that_does_not_move_is_named_by_the_syncer_although_its_connections_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "ECHO_SECONDS", 0.5)
    with BrokerChild() as broker:
        run = SyncerRun(tmp_path, broker.address.port, settings())
        run.start()
        try:
            [learner] = joined(run, "a")
            block = run.syncer.current.stall_monitor
            broker.stop_in_its_tracks()
            wait_for(lambda: "not even this syncer's own beats" in block.text, "the syncer says what it waits for")
            assert run.syncer.components.transport.proven
            assert f"nothing returns from the broker at {run.address}" in block.text
            broker.go_on()
            wait_for(trains([learner], {}, lambda: not block.text), "it moves again")
        finally:
            broker.go_on()
            run.close()
        assert run.failure == []
