"""A directory that one process owns, and the epoch that is kept in it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ..common.errors import SettingError
from ..common.printable import printable
from . import folders


class OwnedDirectory:
    """DIRECTORY/lock is held (flock) by its owner; DIRECTORY/epoch holds one number."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock: int | None = None

    @property
    def printable(self) -> str:
        """The directory as it can be printed anywhere, whatever its name is made of."""
        return printable(str(self.directory))

    @property
    def is_locked(self) -> bool:
        return self._lock is not None

    def lock(self) -> None:
        """Make the directory if need be, own it until this process ends, and clear leftovers.

        SettingError, naming the directory, if another process owns it or nothing can be written there.
        """
        if not _is_text(self.directory):
            raise SettingError(f"the name of {self.printable} is not valid UTF-8; give another directory")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as wrong:
            raise self.unwritable(wrong) from wrong
        probe = self.directory / (folders.WRITING + "probe")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
            folders.clean(self.directory)
            folders.write_file(probe, " " * 4096)
            probe.unlink()
        except BlockingIOError as wrong:
            owner = os.pread(handle, 20, 0).decode("ascii", "replace").strip() or "?"
            os.close(handle)
            raise SettingError(
                f"{self.printable} is in use by another syncer (process {owner}); "
                "stop that one, or give another directory"
            ) from wrong
        except OSError as wrong:
            os.close(handle)
            raise self.unwritable(wrong) from wrong
        self._lock = handle

    def unlock(self) -> None:
        """Let another process own the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def epoch(self) -> int:
        """The highest epoch that was written here, 0 if none was. SettingError if the file cannot be understood."""
        place = self.directory / "epoch"
        try:
            return int(place.read_text("ascii"))
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as wrong:
            raise SettingError(f"{place} does not hold a number; write one above every epoch of this run") from wrong

    def write_epoch(self, epoch: int) -> None:
        """Make `epoch` durable, before its first use. ValueError if it is not above the one written; SettingError."""
        if epoch <= self.epoch():
            raise ValueError(f"epoch {epoch} after epoch {self.epoch()}")
        try:
            self.check_owned()
            folders.write_file(self.directory / "epoch", f"{epoch}\n")
        except OSError as wrong:
            raise self.unwritable(wrong) from wrong

    def check_owned(self) -> None:
        """OSError unless the directory is the one that was locked, and still in its place."""
        if self._lock is None:
            raise OSError(f"{self.printable} is not locked by this process")
        if not os.path.samestat(os.fstat(self._lock), (self.directory / "lock").stat()):
            raise OSError(f"{self.printable} is another directory than the one this syncer began in")

    def unwritable(self, wrong: OSError) -> SettingError:
        return SettingError(
            f"cannot write into {self.printable}: {wrong.strerror or wrong}; give a directory with space"
        )


def _is_text(place: Path) -> bool:
    """Whether the path's bytes are UTF-8; the safetensors library opens no others."""
    try:
        os.fsencode(place).decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
