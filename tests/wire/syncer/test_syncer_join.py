"""A syncer admits learners: seeding, names, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.common.fragments import Layout, TensorSpec
from decoupled_diloco.common.wire import Beat, Keyframe, Welcome
from decoupled_diloco.syncer import membership
from safetensors.torch import save_file
from scripted_learner import LAYOUT, filled
from syncer_run import SyncerRun, syncer_run
from waiting import wait_for


def test_the_first_learner_seeds_and_nobody_is_welcome_before_version_0_is_on_the_disk(run: SyncerRun) -> None:
    a, b = run.learner("a"), run.learner("b", 2)
    a.wait(Beat)
    b.wait(Beat)
    assert a.hello().verdict == "seed"
    assert b.hello().verdict == "wait"
    a.seed(0.5)
    wait_for(lambda: a.hello().verdict == "welcome", "the seeder is welcomed")
    assert (run.directory / "global" / "version-0").is_dir()
    wait_for(lambda: b.hello().verdict == "welcome", "the other is welcomed")
    assert torch.equal(b.keyframe(0), filled(run.plan, 0, 0.5))
    assert torch.equal(
        torch.frombuffer(bytearray(b.fetch("initial", 1, kind=Keyframe).payload), dtype=torch.float32),
        filled(run.plan, 1, 0.5),
    )


def test_the_choice_of_a_seeder_lapses_with_it(run: SyncerRun) -> None:
    a = run.learner("a")
    a.wait(Beat)
    assert a.hello().verdict == "seed"
    a.close()
    run._learners.remove(a)
    b = run.learner("b", 2)
    b.wait(Beat)
    wait_for(lambda: b.hello().verdict == "seed", "another learner is chosen")
    b.join()


def test_a_seeder_whose_model_is_not_finite_is_refused_and_another_one_seeds(run: SyncerRun) -> None:
    a = run.learner("a")
    a.wait(Beat)
    assert a.hello().verdict == "seed"
    a.seed(math.nan)
    refused = a.wait(Welcome, lambda welcome: welcome.verdict == "refused")
    assert "nonfinite" in refused.reason
    run.learner("b", 2).join()


def test_a_learner_whose_model_is_not_that_of_the_given_file_is_refused_and_the_right_one_welcomed(
    tmp_path: Path,
) -> None:
    given = tmp_path / "given.safetensors"
    save_file({tensor.name: torch.full(tensor.shape, 0.25) for tensor in LAYOUT.tensors}, given)
    with syncer_run(tmp_path) as run:
        run.stop()
        run.start(init=given)
        stranger = run.learner("a")
        stranger.wait(Beat)
        welcome = stranger.hello(changed(shape=(80, 5)))
        assert welcome.verdict == "refused"
        assert "given.safetensors" in welcome.reason
        b = run.learner("b", 2)
        b.join()
        assert torch.equal(b.keyframe(0), filled(run.plan, 0, 0.25))


def test_an_invalid_init_file_is_reported_before_any_learner_joins(tmp_path: Path) -> None:
    (tmp_path / "none.safetensors").write_text("no tensors")
    with syncer_run(tmp_path) as run:
        run.stop()
        run.start(init=tmp_path / "none.safetensors")
        wait_for(lambda: run.failure, "it ends at once")
        assert isinstance(failure := run.failure.pop(), SettingError)
        assert "cannot read" in str(failure)


def changed(**changes: Any) -> Layout:
    return Layout((replace(LAYOUT.tensors[0], **changes), *LAYOUT.tensors[1:]))


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (changed(shape=(80, 5)), "a [40, 5] float32 trainable"),
        (changed(shape=(5, 40)), "you have a [5, 40]"),
        (changed(dtype="bfloat16"), "a [40, 5] bfloat16"),
        (changed(kind="frozen"), "a [40, 5] float32 frozen"),
        (Layout((*LAYOUT.tensors, TensorSpec(name="d", shape=(1,), dtype="float32"))), "the run has no d [1]"),
    ],
    ids=["wider", "transposed", "another dtype", "frozen", "one tensor more"],
)
def test_another_model_is_refused_with_the_first_difference(run: SyncerRun, layout: Layout, said: str) -> None:
    run.learner("a").join()
    stranger = run.learner("b", 2)
    stranger.wait(Beat)
    welcome = stranger.hello(layout)
    assert welcome.verdict == "refused"
    assert said in welcome.reason


def test_two_live_learners_cannot_have_one_name_and_the_first_is_not_disturbed(run: SyncerRun) -> None:
    first = run.learner("a", 1)
    first.join()
    second = run.learner("a", 2)
    second.wait(Beat)
    assert second.hello().verdict == "wait"

    def refused() -> Welcome | None:
        first.alive()
        answer = second.hello()
        return answer if answer.verdict == "refused" else None

    assert "in use" in wait_for(refused, "the second is refused").reason  # type: ignore[union-attr]
    assert first.answer(first.call()).version == 1


def test_a_restarted_learner_gets_its_name_back_once_the_old_one_is_silent(run: SyncerRun) -> None:
    first = run.learner("a", 1)
    first.join()
    second = run.learner("a", 2)
    second.wait(Beat)
    wait_for(lambda: second.hello().verdict == "welcome", "the name is free again")


def test_a_learner_whose_name_went_to_another_one_meanwhile_is_notified_when_it_is_back(run: SyncerRun) -> None:
    first, second = run.learner("a", 1), run.learner("a", 2)
    first.join()
    second.join()

    def told() -> bool:
        first.alive()
        second.alive()
        first.listen()
        return any(m.verdict == "refused" and m.incarnation == 1 for m in first.heard if isinstance(m, Welcome))

    wait_for(told, "the first one is refused")
    second.answer(second.call())


def test_a_learner_that_was_silent_so_long_that_it_was_forgotten_is_asked_to_say_hello(
    run: SyncerRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "REMEMBERED", 0)
    a = run.learner("a")
    a.join()
    training = run.syncer.current.training
    assert training is not None
    wait_for(lambda: not training.rounds.members.by_name, "it is forgotten")

    def told() -> bool:
        a.alive()
        a.listen()
        return any(m.verdict == "wait" for m in a.heard if isinstance(m, Welcome))

    wait_for(told, "it is asked")
    wait_for(lambda: a.hello().verdict == "welcome", "it is welcomed again")
