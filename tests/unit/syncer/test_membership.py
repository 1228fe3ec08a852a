"""Who is here, told by reports and by silence."""

from __future__ import annotations

from typing import Any

from decoupled_diloco.common.config import RunSettings
from decoupled_diloco.common.wire import MAX_COUNT, MAX_SECONDS, Alive
from decoupled_diloco.syncer.membership import REMEMBERED, SILENCE_SECONDS, Membership
from decoupled_diloco.syncer.round_events import Answer
from decoupled_diloco.syncer.rounds import Rounds
from hypothesis import example, given, settings
from hypothesis import strategies as st


def alive(name: str, incarnation: int = 1, **more: Any) -> Alive:
    fields: dict[str, Any] = {
        "local_steps": 3, "tokens": 30, "step_seconds": 0.1, "last_step_age_seconds": 0.0, "inner_seconds": 0.0,
        "session_seconds": 0.0, "since_first_step_seconds": 0.0,
    }  # fmt: skip
    return Alive(run="run", name=name, incarnation=incarnation, epoch=1, **(fields | more))


def test_a_silent_member_is_lost_and_live_again_when_heard() -> None:
    members = Membership()
    members.join("a", 1, now=0.0)
    assert members.alive(alive("a"), 1.0) is not None
    assert not members.silent(1.0 + SILENCE_SECONDS - 0.01)
    assert [m.name for m in members.silent(1.0 + SILENCE_SECONDS)] == ["a"]
    assert not members.silent(99.0), "lost is told once"
    assert not members.live()
    members.alive(alive("a", tokens=40), 100.0)
    assert [m.name for m in members.live()] == ["a"]


def test_a_learner_without_steps_for_ten_of_its_own_is_stalled_and_not_awaited() -> None:
    members = Membership()
    members.join("a", 1, now=0.0)
    members.alive(alive("a", step_seconds=1.0, last_step_age_seconds=9.0), 1.0)
    assert [m.name for m in members.awaited()] == ["a"]
    members.alive(alive("a", step_seconds=1.0, last_step_age_seconds=11.0), 2.0)
    assert not members.awaited()
    assert [m.name for m in members.live()] == ["a"]


def test_nobody_is_awaited_before_its_first_timed_step() -> None:
    members = Membership()
    members.join("a", 1, now=0.0)
    members.alive(alive("a", step_seconds=0.0), 1.0)
    assert not members.awaited()
    assert members.typical_step_seconds() == 0.0


def test_the_typical_step_is_the_lower_median_and_the_slowest_counts_only_within_twice_of_it() -> None:
    members = Membership()
    for i, seconds in enumerate((0.1, 0.15, 0.3, 5.0)):
        members.join(f"l{i}", 1, now=0.0)
        members.alive(alive(f"l{i}", step_seconds=seconds), 0.0)
    assert members.typical_step_seconds() == 0.15
    assert members.slowest_step_seconds(within=2.0) == 0.3


def test_a_held_name_is_waited_for_refused_when_its_holder_speaks_and_free_when_it_is_silent() -> None:
    members = Membership()
    members.join("a", 1, now=0.0)
    members.alive(alive("a"), 0.5)
    assert members.admit("a", 2, 1.0) == "wait"
    assert members.admit("a", 2, 1.5) == "wait"
    members.alive(alive("a", tokens=31), 1.6)
    assert members.admit("a", 2, 2.0) == "refused"
    assert members.admit("a", 2, 1.7 + SILENCE_SECONDS) == "welcome"
    assert members.admit("a", 1, 2.0) == "welcome", "the holder itself may say Hello again"


def test_a_name_whose_holder_said_goodbye_is_free_at_once() -> None:
    members = Membership()
    members.join("a", 1, now=0.0)
    members.leave(("a", 1))
    assert members.admit("a", 2, 0.1) == "welcome"
    assert members.alive(alive("a", 1), 0.2) is None, "who has left is no member any more"


def test_an_older_report_overtaken_by_a_newer_one_changes_nothing() -> None:
    members = Membership()
    members.join("a", 1, now=0.0)
    members.alive(alive("a", tokens=50, local_steps=5), 1.0)
    member = members.alive(alive("a", tokens=40, local_steps=4), 2.0)
    assert member is not None
    assert member.tokens == 50


def test_reports_of_strangers_and_of_former_incarnations_are_nobody_s() -> None:
    members = Membership()
    members.join("a", 1, now=0.0)
    assert members.alive(alive("b"), 1.0) is None
    assert members.alive(alive("a", 2), 1.0) is None


def test_names_that_ended_are_forgotten_before_they_fill_the_memory() -> None:
    members = Membership()
    for i in range(REMEMBERED + 50):
        members.join(f"l{i}", 1, now=float(i))
        members.leave((f"l{i}", 1))
    assert len(members.forget_oldest()) == 50
    assert len(members.by_name) == REMEMBERED
    assert "l49" not in members.by_name
    assert "l50" in members.by_name


SECONDS = st.floats(0, MAX_SECONDS) | st.sampled_from([5e-324, MAX_SECONDS])


@settings(max_examples=100, deadline=None)
@given(steps=st.integers(0, MAX_COUNT), tokens=st.integers(0, MAX_COUNT), seconds=st.tuples(SECONDS, SECONDS, SECONDS))
@example(steps=1, tokens=1, seconds=(5e-324, 0.0, 0.0))
def test_no_report_that_the_wire_takes_stops_the_round_machine(
    steps: int, tokens: int, seconds: tuple[float, float, float]
) -> None:
    """A pace next to nothing once made a ceiling of infinity, and an exception of that ended the syncer."""
    rounds = Rounds(RunSettings(steps=50, sync_every=2, fragments=2, overlap=1), [10, 10], epoch=1)
    rounds.join("a", 1, now=0.0)
    names = ("step_seconds", "last_step_age_seconds", "since_first_step_seconds")
    figures: dict[str, Any] = dict(zip(names, seconds, strict=True))
    for now in (1.0, 2.0):
        rounds.alive(alive("a", local_steps=steps, tokens=tokens, **figures), now)
        rounds.tick(now)
        rounds.step(now)
        assert rounds.next_deadline(now) <= now + 1.0
        for call in rounds.calls.values():
            whole = Answer(who=("a", 1), fragment=call.fragment, slot=call.slot, attempt=call.attempt, base_version=0,
                           tokens_from=0, tokens_to=tokens, steps_from=0, steps_to=steps)  # fmt: skip
            rounds.answer(whole)
        rounds.tick(now)
