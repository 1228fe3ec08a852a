"""Checkpoints on the syncer's disk. The files are the authority; all other state is rebuilt from them.

    DIRECTORY/lock                 held (flock) by the one syncer that serves this run
    DIRECTORY/epoch                the highest epoch used with this directory
    DIRECTORY/version-0/           layout, version 0 of every fragment, static tensors; written once
    DIRECTORY/checkpoint-N/        public, residual, momentum, versions and the loop's bookkeeping; the last two
    DIRECTORY/buffers-N/           static tensors as one learner's training had left them at the end
    DIRECTORY/damaged-N/           a checkpoint that was damaged, so that an older one was restored

Each folder is either complete or absent (`atomic_folder`).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.checkpoints import CHECKPOINT
from ..common.config import RunSettings
from ..common.errors import Malformed, SettingError
from ..common.fragments import Layout, Plan
from ..common.printable import printable
from ..common.static_tensor_format import replaced
from . import atomic_folder
from .admission import plan_for
from .global_model import GlobalModel, Snapshot, check_model, readable


class _OwnedDirectory:
    """A directory with a lock (flock on DIRECTORY/lock) and a persistent epoch number (DIRECTORY/epoch)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock: int | None = None

    @property
    def printable(self) -> str:
        """The directory's name with unprintable characters escaped."""
        return printable(str(self.directory))

    @property
    def is_locked(self) -> bool:
        return self._lock is not None

    def lock(self) -> None:
        """Create the directory if needed, lock it until this process ends, and remove leftovers.

        SettingError, naming the directory, if another process holds the lock or the directory is not writable.
        """
        if not _is_text(self.directory):
            raise SettingError(f"the name of {self.printable} is not valid UTF-8; give another directory")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._unwritable(error) from error
        probe = self.directory / (atomic_folder.WRITING + "probe")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
            atomic_folder.clean(self.directory)
            atomic_folder.write_file(probe, " " * 4096)
            probe.unlink()
        except BlockingIOError as error:
            owner = os.pread(handle, 20, 0).decode("ascii", "replace").strip() or "?"
            os.close(handle)
            raise SettingError(
                f"{self.printable} is in use by another syncer (process {owner}); "
                "stop that one, or give another directory"
            ) from error
        except OSError as error:
            os.close(handle)
            raise self._unwritable(error) from error
        self._lock = handle

    def unlock(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def epoch(self) -> int:
        """The highest epoch written here, 0 if none. SettingError if the file is unreadable."""
        path = self.directory / "epoch"
        try:
            return int(path.read_text("ascii"))
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            raise SettingError(f"{path} does not hold a number; write one above every epoch of this run") from error

    def write_epoch(self, epoch: int) -> None:
        """Make `epoch` durable before its first use.

        ValueError if it is not above the stored one, SettingError if it cannot be written.
        """
        if epoch <= self.epoch():
            raise ValueError(f"epoch {epoch} after epoch {self.epoch()}")
        try:
            self.check_owned()
            atomic_folder.write_file(self.directory / "epoch", f"{epoch}\n")
        except OSError as error:
            raise self._unwritable(error) from error

    def check_owned(self) -> None:
        """OSError unless the directory at this path is still the one that was locked."""
        if self._lock is None:
            raise OSError(f"{self.printable} is not locked by this process")
        if not os.path.samestat(os.fstat(self._lock), (self.directory / "lock").stat()):
            raise OSError(f"{self.printable} was replaced by another directory while this syncer was running")

    def _unwritable(self, error: OSError) -> SettingError:
        return SettingError(
            f"cannot write into {self.printable}: {error.strerror or error}; give a directory with space"
        )


def _is_text(path: Path) -> bool:
    """Whether the path's bytes are UTF-8; the safetensors library opens no other paths."""
    try:
        os.fsencode(path).decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


KEPT = 2
"""Checkpoints to keep: the newest, and the previous one in case the newest is damaged."""
VERSION_ZERO = "version-0"
DAMAGED, BUFFERS = "damaged-", "buffers-"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint as read from disk."""

    number: int
    snapshot: Snapshot
    bookkeeping: dict[str, Any]
    warnings: tuple[str, ...]
    """One sentence for each newer checkpoint that was skipped because it was damaged."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A run restored from disk."""

    state: GlobalModel
    bookkeeping: dict[str, Any] | None
    """None: there is no checkpoint yet, the state is version 0."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _VersionZero:
    run: str
    plan_digest: str
    layout: Layout
    vectors: list[Tensor]
    static: bytes


class Checkpoints(_OwnedDirectory):
    """The checkpoints of one run. Writing requires the lock, reading does not."""

    # --- version 0 ---------------------------------------------------------------------------------------------------
    def write_version_zero(
        self,
        layout: Layout,
        plan: Plan,
        settings: RunSettings,
        vectors: Sequence[Tensor],
        static: bytes | memoryview,
    ) -> None:
        """Make version 0 durable: flat f32 [fragment.length] per fragment, and the raw bytes of the static tensors.

        It is written only once: SettingError if a version 0 or a checkpoint exists, or nothing can be written.
        Malformed if the vectors do not match the plan.
        """
        check_model(plan, vectors, static)
        if self.is_seeded():
            raise self._already_seeded()
        tensors = {f"public.{p}": vector for p, vector in enumerate(vectors)}
        if len(static):
            tensors["static"] = torch.frombuffer(bytearray(static), dtype=torch.uint8)
        state = {"run": settings.run, "plan_digest": plan.digest, "layout": layout.to_wire(), "P": plan.P}
        try:
            self.check_owned()
            atomic_folder.write_folder(self.directory / VERSION_ZERO, tensors, state)
        except OSError as error:
            if self.is_seeded():
                raise self._already_seeded() from error
            raise self._unwritable(error) from error

    def is_seeded(self) -> bool:
        """Whether there is a version 0, or a checkpoint (which implies one)."""
        return (self.directory / VERSION_ZERO).exists() or bool(self._numbers(CHECKPOINT))

    def version_zero(self) -> tuple[Layout, list[Tensor], bytes] | None:
        """Layout, flat f32 vectors and static bytes of version 0; None if the run was never seeded.

        SettingError if it is damaged, or missing although there are checkpoints: such a run is not unseeded.
        """
        read = self._read_version_zero()
        return None if read is None else (read.layout, read.vectors, read.static)

    def _read_version_zero(self) -> _VersionZero | None:
        if not self.is_seeded():
            return None
        try:
            tensors, state = atomic_folder.read_folder(self.directory / VERSION_ZERO)
            return _VersionZero(
                run=state["run"],
                plan_digest=state["plan_digest"],
                layout=Layout.from_wire(state["layout"]),
                vectors=[tensors[f"public.{p}"] for p in range(state["P"])],
                static=tensors["static"].numpy().tobytes() if "static" in tensors else b"",
            )
        except (Malformed, KeyError) as error:
            raise SettingError(
                f"version 0 in {self.printable} is damaged ({error}); restore it from a copy, "
                "or start a new run in another directory"
            ) from error

    def initial(self, fragment: int) -> memoryview:
        """Raw f32 bytes of version 0 of one fragment, read from disk. Malformed if they cannot be read."""
        return readable(atomic_folder.read_tensor(self.directory / VERSION_ZERO, f"public.{fragment}"))

    # --- checkpoints -------------------------------------------------------------------------------------------------
    def save(self, snapshot: Snapshot, bookkeeping: Mapping[str, Any]) -> tuple[int, int]:
        """Write one checkpoint, durable when this returns, and remove all but the last KEPT; its number and size.

        OSError if that fails (disk full, directory gone): existing checkpoints are untouched.
        """
        self.check_owned()
        number = 1 + max(self._numbers(CHECKPOINT) + self._numbers(DAMAGED), default=0)
        groups = {"public": snapshot.public, "residual": snapshot.residual, "momentum": snapshot.momentum or ()}
        tensors = {f"{group}.{p}": vector for group, vectors in groups.items() for p, vector in enumerate(vectors)}
        state = {
            "run": snapshot.run,
            "plan_digest": snapshot.plan_digest,
            "versions": list(snapshot.versions),
            "bookkeeping": dict(bookkeeping),
        }
        size = atomic_folder.write_folder(self._path(CHECKPOINT, number), tensors, state)
        for old in self._numbers(CHECKPOINT)[:-KEPT]:
            atomic_folder.remove_folder(self._path(CHECKPOINT, old))
        return number, size

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint, None if there is none yet.

        A damaged one is skipped with a warning and, if this process holds the lock, renamed to damaged-N. SettingError
        if all of them are damaged: going back to version 0 would silently lose the run.
        """
        while numbers := self._numbers(CHECKPOINT):
            damaged: dict[int, Malformed] = {}
            for number in reversed(numbers):
                try:
                    return self._read(number, damaged)
                except Malformed as error:
                    damaged[number] = error
            if numbers == self._numbers(CHECKPOINT):
                raise SettingError(
                    f"every checkpoint in {self.printable} is damaged ({damaged[numbers[-1]]}); "
                    f"restore one from a copy, or remove the folders {CHECKPOINT}* to start again from version 0"
                )
            # Another process writes here and has removed the listed checkpoints: list again.
        return None

    def _read(self, number: int, damaged: Mapping[int, Malformed]) -> Checkpoint:
        path = self._path(CHECKPOINT, number)
        tensors, state = atomic_folder.read_folder(path)
        try:
            groups = [
                tuple(tensors[f"{group}.{p}"] for p in range(len(state["versions"])))
                for group in ("public", "residual", "momentum")
                if f"{group}.0" in tensors
            ]
            snapshot = Snapshot(
                run=state["run"],
                plan_digest=state["plan_digest"],
                versions=tuple(state["versions"]),
                public=groups[0],
                residual=groups[1],
                momentum=groups[2] if len(groups) > 2 else None,
            )
            bookkeeping = state["bookkeeping"]
        except (KeyError, IndexError, TypeError) as error:
            raise Malformed("damaged", f"{path} lacks {error}") from error
        if self.is_locked:
            for bad in damaged:
                self._path(CHECKPOINT, bad).rename(self._path(DAMAGED, bad))
        warnings = tuple(f"{error}; checkpoint {number} is used instead" for error in damaged.values())
        return Checkpoint(number=number, snapshot=snapshot, bookkeeping=bookkeeping, warnings=warnings)

    def restore(self, settings: RunSettings) -> Restored | None:
        """The newest state of this run, None if it was never seeded.

        SettingError if version 0 or every checkpoint is damaged, or if they belong to another run or plan than
        `settings` describe.
        """
        zero = self._read_version_zero()
        if zero is None:
            return None
        plan = plan_for(zero.layout, settings)
        if (zero.run, zero.plan_digest) != (settings.run, plan.digest):
            raise SettingError(
                f"{self.printable} holds run {zero.run!r} with {len(zero.vectors)} fragments, but "
                f"the settings say run {settings.run!r} with {plan.P} fragments (or another model); "
                "resume with the run's own settings, or give another directory"
            )
        newest = self.newest()
        if newest is None:
            state = GlobalModel.from_version_zero(plan, settings, zero.vectors, zero.static)
            return Restored(state=state, bookkeeping=None)
        state = GlobalModel(plan, settings, newest.snapshot, zero.static)
        warnings = newest.warnings + self._restore_buffers(state)
        return Restored(state=state, bookkeeping=newest.bookkeeping, warnings=warnings)

    # --- buffers -----------------------------------------------------------------------------------------------------
    def write_buffers(self, layout: Layout, learner: str, moved: Mapping[int, bytes | memoryview]) -> None:
        """Make durable the static tensors that a learner's training changed, by index into the layout's; OSError."""
        self.check_owned()
        number = 1 + max(self._numbers(BUFFERS), default=0)
        tensors = {
            layout.static[index].name: torch.frombuffer(bytearray(values), dtype=torch.uint8)
            for index, values in moved.items()
            if len(values)
        }
        atomic_folder.write_folder(
            self._path(BUFFERS, number), tensors, {"learner": learner, "layout": layout.fingerprint}
        )
        for old in self._numbers(BUFFERS)[:-1]:
            atomic_folder.remove_folder(self._path(BUFFERS, old))

    def _restore_buffers(self, state: GlobalModel) -> tuple[str, ...]:
        """Put the newest stored static tensors into `state`; returns a warning if they cannot be used."""
        layout, numbers = state.plan.layout, self._numbers(BUFFERS)
        if not numbers:
            return ()
        try:
            tensors, rows = atomic_folder.read_folder(self._path(BUFFERS, numbers[-1]))
            indices = {spec.name: index for index, spec in enumerate(layout.static)}
            moved = {indices[name]: tensor.numpy().tobytes() for name, tensor in tensors.items()}
            if rows["layout"] != layout.fingerprint or any(len(v) != layout.static[i].bytes for i, v in moved.items()):
                raise Malformed("damaged", "they belong to another model")
            state.replace_static(str(rows["learner"]), moved, replaced(layout, state.static, moved))
        except (Malformed, KeyError) as error:
            return (f"the final buffers cannot be used ({error}); those of version 0 are used instead",)
        return ()

    # --- helpers -----------------------------------------------------------------------------------------------------
    def _path(self, kind: str, number: int) -> Path:
        return self.directory / f"{kind}{number:012d}"

    def _numbers(self, kind: str) -> list[int]:
        """Numbers of the folders of a kind, ascending."""
        if not self.directory.is_dir():
            return []
        names = [path.name.removeprefix(kind) for path in self.directory.iterdir() if path.name.startswith(kind)]
        return sorted(int(name) for name in names if name.isdecimal())

    def _already_seeded(self) -> SettingError:
        return SettingError(
            f"{self.printable} already holds version 0 of a run and is never seeded again; "
            "resume that run, or start a new one in another directory"
        )
