"""Checkpoint writer: the latest snapshot wins, and no failure stops the training."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from child import output_of
from decoupled_diloco.common.codec import digest
from decoupled_diloco.common.run_folder import RunFolder
from decoupled_diloco.common.static_tensor_format import pack
from decoupled_diloco.common.wire import Buffers, split
from decoupled_diloco.syncer.checkpoint import Checkpoints
from decoupled_diloco.syncer.checkpoint_writer import CheckpointWriter
from decoupled_diloco.syncer.final_buffers import ReceivedBuffers
from decoupled_diloco.syncer.global_model import GlobalModel, Snapshot
from states import LAYOUT, PLAN, STATIC, advance, fresh, seeded, settings
from waiting import wait_for

NEVER_SECONDS = 3600.0
SOON_SECONDS = 0.01


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    with seeded(tmp_path / "global") as store:
        yield store


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


def test_a_failed_write_is_reported_and_tried_again_until_it_succeeds(gate: Gate) -> None:
    began = time.time()
    writer = CheckpointWriter(gate, retry_seconds=SOON_SECONDS)
    gate.broken = True
    writer.submit(fresh().snapshot(), {}, t=3)
    gate.open.release(2)
    wait_for(lambda: writer.failures == 2, "two failures")
    assert not writer.healthy
    assert "No space left" in writer.last_error
    gate.broken = False
    gate.open.release()
    assert writer.saved_at is None
    wait_for(lambda: writer.saved == 1, "the third try to succeed")
    assert writer.close(60)
    outcomes = writer.outcomes()
    assert [(o.t, o.number, bool(o.error)) for o in outcomes] == [(3, 0, True), (3, 0, True), (3, 1, False)]
    assert [o.failed for o in outcomes] == [0, 1, 2], "where the trouble began, and how many failed"
    assert outcomes[0].failing_seconds == 0 < outcomes[1].failing_seconds < outcomes[2].failing_seconds
    assert writer.saved_at is not None
    assert writer.saved_at >= began


def test_when_the_newest_checkpoint_was_written_is_known_after_a_restart(checkpoints: Checkpoints) -> None:
    began = time.time()
    writer = CheckpointWriter(checkpoints)
    writer.submit(fresh().snapshot(), {})
    assert writer.close(60)
    again = CheckpointWriter(checkpoints)
    assert again.saved_at == pytest.approx(writer.saved_at, abs=60)
    assert again.saved_at is not None
    assert again.saved_at >= began - 1
    assert again.close(60)
    assert RunFolder(checkpoints.directory.parent).saved_at() == pytest.approx(again.saved_at, abs=60)


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


def test_a_writer_is_settled_once_the_latest_snapshot_is_durable_or_was_tried_in_vain(gate: Gate) -> None:
    writer = CheckpointWriter(gate, retry_seconds=NEVER_SECONDS)
    assert writer.settled
    state = fresh()
    for broken in (False, True):
        gate.broken = broken
        writer.submit(state.snapshot(), {})
        assert gate.entered.acquire(timeout=30)
        writer.submit(state.snapshot(), {})
        gate.open.release()
        assert gate.entered.acquire(timeout=30)
        assert not writer.settled, "an older snapshot does not count"
        gate.open.release()
        wait_for(lambda: writer.settled, "the latest was tried")
        assert writer.healthy is not broken
    gate.open.release(10)
    writer.close(30)


def test_closing_does_not_wait_forever_for_a_disk_that_hangs(gate: Gate) -> None:
    writer = CheckpointWriter(gate)
    writer.submit(fresh().snapshot(), {})
    assert gate.entered.acquire(timeout=60)
    assert writer.close(SOON_SECONDS) is False


def test_a_writer_without_work_closes_well(checkpoints: Checkpoints) -> None:
    assert CheckpointWriter(checkpoints).close(60)


@pytest.mark.parametrize("loss", ["removed", "replaced"])
def test_training_continues_when_the_directory_is_gone(checkpoints: Checkpoints, loss: str) -> None:
    shutil.rmtree(checkpoints.directory)
    if loss == "replaced":
        other = Checkpoints(checkpoints.directory)
        other.lock()
        other.unlock()
    writer = CheckpointWriter(checkpoints, retry_seconds=NEVER_SECONDS)
    state: GlobalModel = fresh()
    for failures in (1, 2):
        advance(state)
        writer.submit(state.snapshot(), {})
        wait_for(lambda failures=failures: writer.failures == failures, "a counted failure")  # type: ignore[misc]
    assert not writer.close(60)
    assert Checkpoints(checkpoints.directory).newest() is None


@pytest.mark.parametrize("fault", ["", "disk", "digest"])
def test_buffers_are_checked_and_stored_before_the_writer_closes_and_a_full_disk_does_not_lose_them(
    checkpoints: Checkpoints, fault: str
) -> None:
    moved = {2: (5).to_bytes(8, "little")}
    whole = pack(LAYOUT, moved)
    last = Buffers(
        run="tiny", name="a", incarnation=1, epoch=3, fragment=PLAN.static_index,
        digest="0" * 64 if fault == "digest" else digest(whole), **split(whole)[0],
    )  # fmt: skip
    if fault == "disk":
        shutil.rmtree(checkpoints.directory)
    writer = CheckpointWriter(checkpoints)
    assert writer.stored() is None
    writer.store_buffers(PLAN, ReceivedBuffers(last=last, payload=memoryview(whole)), STATIC)
    writer.close(60)
    stored = writer.stored()
    assert stored is not None
    assert writer.stored() is None, "it is said once"
    assert writer.healthy, "the checkpoint is another thing"
    assert bool(stored.error) is (fault == "disk")
    if fault == "digest":
        assert stored.refused is not None
        assert not list(checkpoints.directory.glob("buffers-*"))
        return
    assert stored.refused is None
    assert stored.moved == (2,)
    assert stored.static == STATIC[:-8] + moved[2]
    assert bool(list(checkpoints.directory.glob("buffers-*"))) is not (fault == "disk")


FULL_DISK = """
from states import *
from pathlib import Path
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.syncer.checkpoint import Checkpoints
from decoupled_diloco.syncer.checkpoint_writer import CheckpointWriter
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


MOUNTED = """
def fill():
    with open(PLACE + "/ballast", "wb", buffering=0) as file:
        try:
            while True: file.write(bytes(4096))
        except OSError: pass
def empty(): os.unlink(PLACE + "/ballast")
"""
"""On a file system of 512 KiB."""
LIMITED = """
import resource
def fill(): resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
def empty(): resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
"""
"""With a limit on the size of files."""


def check_full_disk(place: Path, how: str, around: Sequence[str], reason: str) -> None:
    out = output_of(f"PLACE = {str(place)!r}", how, FULL_DISK, around=around).splitlines()
    assert out[0].startswith(f"cannot write into {place}/global: ")
    assert reason in out[1]
    assert out[2] == "done"


def test_files_that_cannot_grow_are_found_at_start_and_later_only_reported(tmp_path: Path) -> None:
    check_full_disk(tmp_path, LIMITED, [], "File too large")


@pytest.mark.tools
def test_a_full_disk_is_found_at_start_and_later_only_reported(tmp_path: Path) -> None:
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=512k tmpfs '{tmp_path}'"
    if not (shutil.which("unshare") and subprocess.run([*alone, mount], check=False).returncode == 0):
        pytest.skip("this user may not mount a file system of its own")
    check_full_disk(tmp_path, MOUNTED, [*alone, f'{mount} && exec "$0" "$@"'], "No space left on device")
