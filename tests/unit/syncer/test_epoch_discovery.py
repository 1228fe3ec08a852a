"""What a syncer believes of what it hears before it speaks."""

from __future__ import annotations

from dataclasses import replace

from decoupled_diloco.common.wire import Alive, Beat
from decoupled_diloco.syncer.epoch_discovery import LEAP, SENDERS, KnownEpochs

ALIVE = Alive(
    run="it", name="a", incarnation=1, epoch=3, local_steps=1, tokens=1, step_seconds=1.0, last_step_age_seconds=0.0,
    inner_seconds=1.0, session_seconds=0.0, since_first_step_seconds=1.0, versions=(7, 2),
)  # fmt: skip
BEAT = Beat(run="it", epoch=5, state="running", t=1, steps=10, step_seconds=1.0, versions=(6, 9), syncer=1)


def heard(*messages: object) -> KnownEpochs:
    survey = KnownEpochs()
    for message in messages:
        survey.take(message)
    return survey


def test_the_highest_epoch_and_versions_of_all_who_speak_count() -> None:
    survey = heard(ALIVE, replace(ALIVE, name="b", epoch=4, versions=(1, 8)), BEAT)
    assert survey.epoch(0) == 5
    assert [survey.version(p, 0) for p in (0, 1, 2)] == [7, 9, 0]
    assert survey.epoch(11) == 11
    assert survey.version(0, 20) == 20
    assert survey.rival == BEAT


def test_one_who_states_the_absurd_is_not_believed_and_does_not_hide_the_others() -> None:
    liar = replace(ALIVE, name="liar", epoch=2**53, versions=(2**53, 2**53))
    survey = heard(ALIVE, liar)
    assert survey.epoch(2) == 3
    assert [survey.version(p, 1) for p in (0, 1)] == [7, 2]


def test_a_sender_that_leads_as_far_as_is_believed_can_do_so_again_and_the_honest_are_still_believed() -> None:
    liar = replace(ALIVE, name="liar", epoch=LEAP, versions=(LEAP, LEAP))
    ours = 1 + heard(liar).version(0, 0)
    honest = replace(ALIVE, versions=(ours + 5, 0))
    assert heard(honest, replace(liar, versions=(2**53, 0))).version(0, ours) == ours + 5


def test_a_holder_of_version_0_alone_knows_of_no_merges() -> None:
    assert not heard(replace(ALIVE, versions=(0, 0))).knows_merges
    assert heard(replace(ALIVE, versions=(0, 1))).knows_merges


def test_a_crowd_of_names_takes_bounded_memory() -> None:
    survey = KnownEpochs()
    for n in range(SENDERS + 100):
        survey.take(replace(ALIVE, name=f"n-{n}"))
    assert len(survey._reports) == SENDERS
