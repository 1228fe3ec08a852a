"""The end of a run, and a syncer or broker that is gone, as a learner sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from decoupled_diloco.common.errors import DilocoError, Diverged, Orphaned
from decoupled_diloco.common.wire import (
    Goodbye,
)
from link_trainer import WIDTH, Trainer, in_thread, syncer_at, talk_of, trainer, vectors
from scripted_syncer import ScriptedSyncer, running_broker
from waiting import wait_for


def test_the_final_model_is_taken_and_acknowledged_with_its_hash(syncer: ScriptedSyncer, me: Trainer) -> None:
    me.step()
    with syncer._lock:
        syncer.put(vectors(3.0))
        syncer.finish()
    wait_for(lambda: not me.step(), "the session says that the run is over")
    assert me.session.finished
    assert (me.model.wide == 3).all()
    assert me.session.progress.step == syncer.settings.steps
    goodbye = syncer.wait_for(Goodbye, 2)[0]
    assert (goodbye.reason, goodbye.model_hash) == ("finished", syncer.model_hash)
    steps = me.session.local_steps
    assert not me.step()
    assert me.session.local_steps == steps


def test_a_final_model_whose_hash_never_fits_is_an_error(syncer: ScriptedSyncer, me: Trainer) -> None:
    with syncer._lock:
        syncer.finish()
        syncer.model_hash = "f" * 64
    with pytest.raises(DilocoError, match=r"its hash .* is not the ffff"):
        wait_for(lambda: not me.step(), "the session fails")


def test_closing_in_mid_run_answers_once_more_and_says_goodbye(broker: str, syncer: ScriptedSyncer) -> None:
    me = trainer(broker)
    me.step()
    syncer.call(0, slot=0)
    me.hears_call(0)
    thread, _ = in_thread(me.session.close)
    _, delta = syncer.delta(slot=0, name="me")
    assert (delta[: WIDTH * 300] == -1).all()
    assert not syncer.all_of(Goodbye)
    syncer.confirm(0, "me")
    thread.join(30)
    assert [goodbye.reason for goodbye in syncer.wait_for(Goodbye)] == ["left"]
    with pytest.raises(DilocoError, match=r"step\(\) after close\(\)"):
        me.step()
    me.session.close()


@pytest.mark.parametrize(
    ("error", "reason"),
    [(KeyboardInterrupt, "stopped"), (ValueError, "failed"), (Diverged, "diverged")],
)
def test_a_session_that_an_exception_leaves_says_why_and_lets_it_through(
    broker: str, syncer: ScriptedSyncer, error: type[BaseException], reason: str
) -> None:
    with pytest.raises(error), trainer(broker).session:
        raise error
    assert [goodbye.reason for goodbye in syncer.wait_for(Goodbye)] == [reason]


def test_closing_does_not_hang_when_the_broker_is_gone() -> None:
    with running_broker() as address:
        with syncer_at(address):
            me = trainer(address)
        me.step()
    me.session.close()
    assert me.session._link.join_thread(0)


def test_a_learner_that_hears_no_beat_saves_its_model_and_stops(
    broker: str, syncer: ScriptedSyncer, tmp_path: Path
) -> None:
    me = trainer(broker, orphan_timeout_seconds=0.5, directory=tmp_path)
    syncer.beating = False
    with pytest.raises(Orphaned, match="its parameters are in"):
        wait_for(lambda: not me.step(), "the learner is orphaned")
    me.session.close("failed")
    assert (tmp_path / "r-me-orphan.safetensors").stat().st_size > WIDTH * 300 * 4


def test_a_link_that_fails_tells_the_next_step(syncer: ScriptedSyncer, me: Trainer) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of order")

    talk_of(me.session).tick = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(DilocoError, match=r"the link of me to tcp.* failed: RuntimeError: out of order"):
        wait_for(lambda: not me.step(), "the failure is told")
