"""What the syncer keeps on disk: seeded once, complete or not there, and no failure stops the training."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from decoupled_diloco.common.errors import Malformed, SettingError
from decoupled_diloco.syncer.checkpoint import Checkpoints
from decoupled_diloco.syncer.state import GlobalState, Snapshot
from decoupled_diloco.syncer.writer import CheckpointWriter
from states import LAYOUT, PLAN, STATIC, advance, fresh, settings, vectors
from waiting import wait_for

NEVER_SECONDS = 3600.0
SOON_SECONDS = 0.01


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    """A locked directory with version 0 in it."""
    store = Checkpoints(tmp_path / "global")
    store.lock()
    store.write_version_zero(LAYOUT, PLAN, settings(), vectors(), STATIC)
    yield store
    store.unlock()


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


def test_a_directory_is_seeded_once_for_ever(checkpoints: Checkpoints) -> None:
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


def test_without_a_checkpoint_the_run_goes_on_from_version_zero(checkpoints: Checkpoints) -> None:
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
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_and_says_so(
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
        assert "checkpoint 1 is taken" in warning
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


# --- the directory ---------------------------------------------------------------------------------------------------
def test_epochs_only_rise_and_survive(checkpoints: Checkpoints) -> None:
    assert checkpoints.epoch() == 0
    checkpoints.write_epoch(1)
    checkpoints.write_epoch(7)
    assert Checkpoints(checkpoints.directory).epoch() == 7
    for lower in (7, 6, 0):
        with pytest.raises(ValueError, match="after epoch 7"):
            checkpoints.write_epoch(lower)
    for garbage in (b"", b"seven", b"\xff"):
        (checkpoints.directory / "epoch").write_bytes(garbage)
        with pytest.raises(SettingError, match="does not hold a number"):
            checkpoints.epoch()


def child(*lines: str, around: Sequence[str] = (), **environment: str) -> subprocess.Popen[str]:
    """A Python process that runs these lines; it dies with its standard input."""
    root = Path(__file__).parents[1]
    program = "\n".join(["import os, sys", f"sys.path.insert(0, {str(root)!r})", *lines])
    return subprocess.Popen(
        [*around, sys.executable, "-P", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, **environment},
    )


def output_of(*lines: str, around: Sequence[str] = (), **environment: str) -> str:
    process = child(*lines, around=around, **environment)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    return out


def test_one_process_owns_a_directory_until_it_dies(tmp_path: Path) -> None:
    holder = child(
        "from pathlib import Path",
        "from decoupled_diloco.syncer.checkpoint import Checkpoints",
        f"store = Checkpoints(Path({str(tmp_path)!r})); store.lock()",
        "print('locked', flush=True); sys.stdin.read()",
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    with pytest.raises(SettingError, match=f"in use by another syncer \\(process {holder.pid}\\)"):
        Checkpoints(tmp_path).lock()
    holder.kill()
    holder.communicate()
    mine = Checkpoints(tmp_path)
    mine.lock()
    with pytest.raises(SettingError, match="in use by another syncer"):
        Checkpoints(tmp_path).lock()
    mine.unlock()


def test_writing_without_the_lock_is_refused(checkpoints: Checkpoints) -> None:
    checkpoints.unlock()
    with pytest.raises(OSError, match="not locked"):
        checkpoints.save(fresh().snapshot(), {})
    with pytest.raises(SettingError, match="not locked"):
        checkpoints.write_epoch(1)


def test_a_file_in_the_place_of_the_directory_is_found_at_start(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    for place in (tmp_path / "taken", tmp_path / "taken" / "global"):
        with pytest.raises(SettingError, match=f"cannot write into {place}: "):
            Checkpoints(place).lock()
        assert Checkpoints(place).restore(settings()) is None


def test_a_directory_whose_name_is_not_text_is_refused_in_text(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="is not valid UTF-8") as caught:
        Checkpoints(tmp_path / os.fsdecode(b"not text \xff")).lock()
    assert "not text \\xff" in str(caught.value)
    str(caught.value).encode("utf-8")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_may_not_be_written_is_found_at_start(tmp_path: Path) -> None:
    out = output_of(
        "from pathlib import Path",
        "from decoupled_diloco.common.errors import SettingError",
        "from decoupled_diloco.syncer.checkpoint import Checkpoints",
        f"os.chmod({str(tmp_path)!r}, 0o555)",
        f"os.chdir({str(tmp_path)!r})",
        "os.geteuid() or os.setuid(65534)  # the permissions do not bind root",
        "for place in (Path('.'), Path('new')):",
        "    try: Checkpoints(place).lock(); print('locked')",
        "    except SettingError as wrong: print(wrong)",
    )
    tmp_path.chmod(0o755)
    assert out.splitlines() == [
        "cannot write into .: Permission denied; give a directory with space",
        "cannot write into new: Permission denied; give a directory with space",
    ]


def test_a_directory_may_have_any_name_in_any_language_also_where_the_locale_is_plain_c(tmp_path: Path) -> None:
    long = "/".join(["x" * 100] * 2)
    out = output_of(
        "import pathlib, json",
        "from states import *",
        "from decoupled_diloco.syncer.checkpoint import Checkpoints",
        "from decoupled_diloco.syncer.export import read_model, save_model",
        f"root = {os.fsencode(tmp_path)!r}",
        f"for name in ('Bär und Löwe 🐻'.encode(), '运行'.encode(), {long.encode()!r}):",
        "    store = Checkpoints(pathlib.Path(os.fsdecode(root + b'/' + name)))",
        "    store.lock()",
        "    store.write_version_zero(LAYOUT, PLAN, settings(), vectors(), STATIC)",
        "    state = fresh(); advance(state)",
        "    store.save(state.snapshot(), {'learner': 'Bär'})",
        "    restored = store.restore(settings())",
        "    assert restored.state.model_hash() == state.model_hash()",
        "    assert restored.bookkeeping == {'learner': 'Bär'}",
        "    save_model(state, store.directory / 'model.safetensors')",
        "    read_model(PLAN, store.directory / 'model.safetensors')",
        "    print(json.dumps(store.printable))",
        LC_ALL="C",
        LANG="C",
    )
    names = [json.loads(line).removeprefix(f"{tmp_path}/") for line in out.splitlines()]
    assert names == ["Bär und Löwe 🐻", "运行", long]


# --- the writing thread ----------------------------------------------------------------------------------------------
class Gate(Checkpoints):
    """A disk whose writes wait until they are let through, and fail while `broken`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.entered = threading.Semaphore(0)
        self.open = threading.Semaphore(0)
        self.broken = False

    def save(self, snapshot: Snapshot, bookkeeping: Mapping[str, Any]) -> tuple[int, int]:
        self.entered.release()
        assert self.open.acquire(timeout=60)
        if self.broken:
            raise OSError("No space left on device")
        return super().save(snapshot, bookkeeping)


@pytest.fixture
def gate(checkpoints: Checkpoints) -> Iterator[Gate]:
    checkpoints.unlock()
    gate = Gate(checkpoints.directory)
    gate.lock()
    yield gate
    gate.open.release(1000)
    gate.unlock()


def test_the_latest_snapshot_wins_and_is_what_it_was_when_given(gate: Gate) -> None:
    writer = CheckpointWriter(gate)
    state, ledger = fresh(outer_momentum=0.9), {"tokens": 0}
    hashes = []
    for t in range(5):
        advance(state, seed=t)
        ledger["tokens"] = t
        hashes.append(state.model_hash())
        writer.submit(state.snapshot(), {"ledger": ledger}, t=t)
        if t == 0:
            assert gate.entered.acquire(timeout=60)  # the first is being written while the others come
    advance(state, rounds=2)
    ledger["tokens"] = -1
    gate.open.release(2)
    assert writer.close(60)
    assert [(o.t, o.number, o.error) for o in writer.outcomes()] == [(0, 1, ""), (4, 2, "")]
    assert (writer.saved, writer.failures, writer.healthy) == (2, 0, True)
    restored = gate.restore(settings(outer_momentum=0.9))
    assert restored is not None
    assert restored.state.model_hash() == hashes[4]
    assert restored.bookkeeping == {"ledger": {"tokens": 4}}
    assert writer.outcomes() == []


def test_a_snapshot_that_was_written_is_let_go(checkpoints: Checkpoints) -> None:
    writer = CheckpointWriter(checkpoints)
    state = fresh()
    writer.submit(state.snapshot(), {})
    old = [weakref.ref(tensor) for tensor in (*state.public, *state.residual)]
    wait_for(lambda: writer.saved == 1, "the checkpoint")
    advance(state)
    wait_for(lambda: not any(ref() is not None for ref in old), "the old tensors to be freed")
    assert writer.close(60)


def test_a_failed_write_is_told_and_tried_again_until_it_succeeds(gate: Gate) -> None:
    writer = CheckpointWriter(gate, retry_seconds=SOON_SECONDS)
    gate.broken = True
    writer.submit(fresh().snapshot(), {}, t=3)
    gate.open.release(2)
    wait_for(lambda: writer.failures == 2, "two failures")
    assert not writer.healthy
    assert "No space left" in writer.last_error
    gate.broken = False
    gate.open.release()
    wait_for(lambda: writer.saved == 1, "the third try to succeed")
    assert writer.close(60)
    assert [(o.t, o.number, bool(o.error)) for o in writer.outcomes()] == [(3, 0, True), (3, 0, True), (3, 1, False)]


def test_closing_tries_once_more_and_tells_whether_the_last_snapshot_is_safe(gate: Gate) -> None:
    gate.open.release(1000)
    for broken_at_close in (True, False):
        writer = CheckpointWriter(gate, retry_seconds=NEVER_SECONDS)
        gate.broken = True
        writer.submit(fresh().snapshot(), {})
        wait_for(lambda writer=writer: writer.failures == 1, "the first failure")  # type: ignore[misc]
        gate.broken = broken_at_close
        assert writer.close(60) is not broken_at_close
        assert writer.failures == 1 + broken_at_close


def test_a_new_snapshot_does_not_wait_for_the_retry_of_an_old_one(gate: Gate) -> None:
    gate.open.release(1000)
    gate.broken = True
    writer = CheckpointWriter(gate, retry_seconds=NEVER_SECONDS)
    writer.submit(fresh().snapshot(), {}, t=1)
    wait_for(lambda: writer.failures == 1, "the first failure")
    gate.broken = False
    writer.submit(fresh().snapshot(), {}, t=2)
    wait_for(lambda: writer.saved == 1, "the newer snapshot to be saved")
    assert writer.close(60)
    assert [o.t for o in writer.outcomes()] == [1, 2]


def test_closing_does_not_wait_for_ever_for_a_disk_that_hangs(gate: Gate) -> None:
    writer = CheckpointWriter(gate)
    writer.submit(fresh().snapshot(), {})
    assert gate.entered.acquire(timeout=60)
    assert writer.close(SOON_SECONDS) is False


def test_a_writer_without_work_closes_well(checkpoints: Checkpoints) -> None:
    assert CheckpointWriter(checkpoints).close(60)


@pytest.mark.parametrize("loss", ["removed", "replaced"])
def test_training_goes_on_when_the_directory_is_gone(checkpoints: Checkpoints, loss: str) -> None:
    shutil.rmtree(checkpoints.directory)
    if loss == "replaced":
        other = Checkpoints(checkpoints.directory)
        other.lock()
        other.unlock()
    writer = CheckpointWriter(checkpoints, retry_seconds=NEVER_SECONDS)
    state: GlobalState = fresh()
    for failures in (1, 2):
        advance(state)
        writer.submit(state.snapshot(), {})
        wait_for(lambda failures=failures: writer.failures == failures, "a counted failure")  # type: ignore[misc]
    assert not writer.close(60)
    assert Checkpoints(checkpoints.directory).newest() is None


FULL_DISK = """
from states import *
from pathlib import Path
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.syncer.checkpoint import Checkpoints
from decoupled_diloco.syncer.writer import CheckpointWriter
from waiting import wait_for
store = Checkpoints(Path(PLACE) / "global")
store.lock()
fill()
try: store.write_version_zero(LAYOUT, PLAN, settings(), vectors(), STATIC)
except SettingError as wrong: print(wrong)
empty()
assert not store.is_seeded()
store.write_version_zero(LAYOUT, PLAN, settings(), vectors(), STATIC)
writer = CheckpointWriter(store, retry_seconds=0.05)
state = fresh()
advance(state); first = state.model_hash()
writer.submit(state.snapshot(), {"round": 1})
wait_for(lambda: writer.saved == 1, "the first checkpoint")
fill()
advance(state)
writer.submit(state.snapshot(), {"round": 2})
wait_for(lambda: writer.failures >= 2, "two failures")
restored = store.restore(settings())
assert restored.state.model_hash() == first and restored.bookkeeping == {"round": 1} and not restored.warnings
print(writer.last_error)
empty()
wait_for(lambda: writer.saved == 2, "the second checkpoint")
assert store.restore(settings()).state.model_hash() == state.model_hash()
assert writer.close(60)
print("done")
"""


# A file system of 512 KiB where this user may mount one; otherwise a limit on the size of files.
MOUNTED = """
def fill():
    with open(PLACE + "/ballast", "wb", buffering=0) as file:
        try:
            while True: file.write(bytes(4096))
        except OSError: pass
def empty(): os.unlink(PLACE + "/ballast")
"""
LIMITED = """
import resource
def fill(): resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
def empty(): resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
"""


def test_a_full_disk_is_found_at_start_and_later_only_told(tmp_path: Path) -> None:
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=512k tmpfs '{tmp_path}'"
    can_mount = shutil.which("unshare") and subprocess.run([*alone, mount], check=False).returncode == 0
    around = [*alone, f'{mount} && exec "$0" "$@"'] if can_mount else []
    lines = [f"PLACE = {str(tmp_path)!r}", MOUNTED if can_mount else LIMITED, FULL_DISK]
    out = output_of(*lines, around=around).splitlines()
    assert out[0].startswith(f"cannot write into {tmp_path}/global: ")
    assert ("No space left on device" if can_mount else "File too large") in out[1]
    assert out[2] == "done"
