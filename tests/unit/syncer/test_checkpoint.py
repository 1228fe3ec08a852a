"""Checkpoints: version 0 is written once, and each checkpoint is complete or absent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from decoupled_diloco.common.errors import Malformed, SettingError
from decoupled_diloco.syncer.checkpoint import Checkpoints
from decoupled_diloco.syncer.global_model import Snapshot
from states import LAYOUT, PLAN, STATIC, advance, fresh, seeded, settings, vectors


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    with seeded(tmp_path / "global") as store:
        yield store


def save_rounds(store: Checkpoints, *rounds: int) -> dict[int, Snapshot]:
    """Checkpoints 1, 2, ... of the state after so many rounds each."""
    saved = {}
    for number, count in enumerate(rounds, start=1):
        state = fresh()
        advance(state, count)
        saved[number] = state.snapshot()
        assert store.save(saved[number], {"rounds": count})[0] == number
    return saved


def same(first: Snapshot, second: Snapshot) -> bool:
    pairs = zip((*first.public, *first.residual), (*second.public, *second.residual), strict=True)
    return first.versions == second.versions and all(torch.equal(a, b) for a, b in pairs)


def folders_of(store: Checkpoints) -> list[str]:
    return sorted(place.name for place in store.directory.iterdir() if place.is_dir())


# --- version 0 -------------------------------------------------------------------------------------------------------
def test_version_zero_is_read_back_with_layout_and_static_part(checkpoints: Checkpoints) -> None:
    read = checkpoints.version_zero()
    assert read is not None
    layout, mine, static = read
    assert (layout, static) == (LAYOUT, STATIC)
    assert all(torch.equal(a, b) for a, b in zip(mine, vectors(), strict=True))
    for p, vector in enumerate(vectors()):
        assert bytes(checkpoints.initial(p)) == vector.numpy().tobytes()
    with pytest.raises(Malformed):
        checkpoints.initial(PLAN.P)


def test_a_model_without_static_part_is_seeded_too(tmp_path: Path) -> None:
    from decoupled_diloco.common.fragments import Layout, balanced_plan

    layout = Layout(LAYOUT.trainable)
    plan = balanced_plan(layout, 2)
    store = Checkpoints(tmp_path)
    store.lock()
    store.write_version_zero(layout, plan, settings(fragments=2, overlap=1), vectors(plan), b"")
    restored = store.restore(settings(fragments=2, overlap=1))
    assert restored is not None
    assert restored.state.static == b""
    store.unlock()


def test_a_directory_is_seeded_once_forever(checkpoints: Checkpoints) -> None:
    before = checkpoints.directory.joinpath("version-0", "tensors.safetensors").read_bytes()
    save_rounds(checkpoints, 1)
    checkpoints.unlock()
    again = Checkpoints(checkpoints.directory)
    again.lock()
    with pytest.raises(SettingError, match="never seeded again"):
        again.write_version_zero(LAYOUT, PLAN, settings(), vectors(seed=1), STATIC)
    assert again.directory.joinpath("version-0", "tensors.safetensors").read_bytes() == before
    shutil.rmtree(again.directory / "version-0")
    with pytest.raises(SettingError, match="never seeded again"):
        again.write_version_zero(LAYOUT, PLAN, settings(), vectors(seed=1), STATIC)
    with pytest.raises(SettingError, match=r"version 0 in .* is damaged"):
        again.restore(settings())
    again.unlock()


def test_a_damaged_version_zero_is_never_taken_for_an_unseeded_run(checkpoints: Checkpoints) -> None:
    file = checkpoints.directory / "version-0" / "tensors.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for read in (checkpoints.version_zero, lambda: checkpoints.restore(settings())):
        with pytest.raises(SettingError, match=r"version 0 in .* is damaged"):
            read()
    assert checkpoints.is_seeded()


def test_a_version_zero_that_does_not_fit_the_plan_is_not_written(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    store.lock()
    bad = vectors()
    bad[0][0] = float("nan")
    with pytest.raises(Malformed, match="nonfinite"):
        store.write_version_zero(LAYOUT, PLAN, settings(), bad, STATIC)
    assert not store.is_seeded()
    assert store.restore(settings()) is None
    store.unlock()


# --- checkpoints -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_newest_checkpoint_is_resumed_and_everything_in_it_belongs_together(
    checkpoints: Checkpoints, momentum: float
) -> None:
    run = settings(outer_momentum=momentum)
    state = fresh(outer_momentum=momentum)
    for t in range(4):
        advance(state, seed=t)
        checkpoints.save(state.snapshot(), {"t": t, "ledger": {"a": [1, 2**53]}})
    assert folders_of(checkpoints) == ["checkpoint-000000000003", "checkpoint-000000000004", "version-0"]
    restored = checkpoints.restore(run)
    assert restored is not None
    assert restored.bookkeeping == {"t": 3, "ledger": {"a": [1, 2**53]}}
    assert restored.warnings == ()
    assert restored.state.versions == state.versions == [4, 4, 4]
    shutil.rmtree(checkpoints.directory / "checkpoint-000000000004")  # what was read does not depend on the files
    for twin in (state, restored.state):
        advance(twin, rounds=2, seed=99)
        twin.finalize()
    assert restored.state.model_hash() == state.model_hash()
    assert same(restored.state.snapshot(), state.snapshot())


def test_without_a_checkpoint_the_run_continues_from_version_zero(checkpoints: Checkpoints) -> None:
    restored = checkpoints.restore(settings())
    assert restored is not None
    assert restored.bookkeeping is None
    assert restored.state.model_hash() == fresh().model_hash()


@pytest.mark.parametrize(
    "changes", [{"run": "other"}, {"fragments": 2, "overlap": 1}, {"fragments": 0, "sync_every": 4}]
)
def test_a_directory_with_another_run_or_plan_is_refused(checkpoints: Checkpoints, changes: dict[str, Any]) -> None:
    for rounds in (0, 1):
        if rounds:
            save_rounds(checkpoints, rounds)
        with pytest.raises(SettingError, match="resume with the run's own settings"):
            checkpoints.restore(settings(**changes))


def flip_a_bit(place: Path) -> None:
    content = bytearray((place / "tensors.safetensors").read_bytes())
    content[len(content) // 2] ^= 4
    (place / "tensors.safetensors").write_bytes(content)


def cut_short(place: Path) -> None:
    with (place / "tensors.safetensors").open("r+b") as file:
        file.truncate(100)


def change_a_number(place: Path) -> None:
    state = json.loads((place / "state.json").read_text())
    state["versions"][0] += 1
    (place / "state.json").write_text(json.dumps(state))


def another_format(place: Path) -> None:
    manifest = json.loads((place / "manifest.json").read_text())
    (place / "manifest.json").write_text(json.dumps({**manifest, "format": 2}))


def empty(place: Path) -> None:
    shutil.rmtree(place)
    place.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flip_a_bit,
    "a file cut short": cut_short,
    "a changed number": change_a_number,
    "another format": another_format,
    "no manifest": lambda place: (place / "manifest.json").unlink(),
    "an empty manifest": lambda place: (place / "manifest.json").write_text(""),
    "a manifest of another kind": lambda place: (place / "manifest.json").write_text("[1, 2]"),
    "a manifest that is not text": lambda place: (place / "manifest.json").write_bytes(b"\xff\xfe\x00"),
    "no tensors": lambda place: (place / "tensors.safetensors").unlink(),
    "no state": lambda place: (place / "state.json").unlink(),
    "nothing": empty,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_and_reports_it(
    checkpoints: Checkpoints, damage: str
) -> None:
    saved = save_rounds(checkpoints, 1, 2)
    DAMAGE[damage](checkpoints.directory / "checkpoint-000000000002")
    reader = Checkpoints(checkpoints.directory)  # without the lock nothing is renamed
    for store in (reader, checkpoints):
        newest = store.newest()
        assert newest is not None
        assert (newest.number, newest.bookkeeping) == (1, {"rounds": 1})
        assert same(newest.snapshot, saved[1])
        (warning,) = newest.warnings
        assert "checkpoint-000000000002" in warning
        assert "checkpoint 1 is used" in warning
    assert folders_of(checkpoints) == ["checkpoint-000000000001", "damaged-000000000002", "version-0"]
    assert checkpoints.save(saved[2], {})[0] == 3
    assert checkpoints.save(saved[2], {})[0] == 4
    newest = checkpoints.newest()
    assert newest is not None
    assert (newest.number, newest.warnings) == (4, ())


def test_if_every_checkpoint_is_damaged_the_run_does_not_silently_begin_again(checkpoints: Checkpoints) -> None:
    save_rounds(checkpoints, 1, 2)
    for number in (1, 2):
        flip_a_bit(checkpoints.directory / f"checkpoint-{number:012d}")
    for _ in range(2):
        with pytest.raises(SettingError, match=r"every checkpoint in .* is damaged"):
            checkpoints.restore(settings())
    assert folders_of(checkpoints) == ["checkpoint-000000000001", "checkpoint-000000000002", "version-0"]


def test_leftovers_of_a_killed_process_are_ignored_and_cleaned(checkpoints: Checkpoints) -> None:
    saved = save_rounds(checkpoints, 1)
    complete = checkpoints.directory / "checkpoint-000000000001"
    shutil.copytree(complete, checkpoints.directory / ".writing-checkpoint-000000000002")
    (checkpoints.directory / ".writing-checkpoint-000000000002" / "manifest.json").unlink()
    shutil.copytree(complete, checkpoints.directory / ".removing-checkpoint-000000000000")
    (checkpoints.directory / ".writing-epoch").write_text("9")
    (checkpoints.directory / "checkpoint-notes").mkdir()
    newest = Checkpoints(checkpoints.directory).newest()
    assert newest is not None
    assert same(newest.snapshot, saved[1])
    checkpoints.unlock()
    again = Checkpoints(checkpoints.directory)
    again.lock()
    names = sorted(place.name for place in again.directory.iterdir())
    assert names == ["checkpoint-000000000001", "checkpoint-notes", "lock", "version-0"]
    assert again.epoch() == 0
    again.unlock()


def test_a_failed_save_leaves_nothing_behind(checkpoints: Checkpoints) -> None:
    saved = save_rounds(checkpoints, 1)
    with pytest.raises(TypeError, match="JSON"):
        checkpoints.save(saved[1], {"not for JSON": object()})
    assert sorted(p.name for p in checkpoints.directory.iterdir()) == ["checkpoint-000000000001", "lock", "version-0"]
