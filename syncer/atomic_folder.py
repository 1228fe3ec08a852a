"""Atomically written folders: tensors and one JSON document that are either complete or absent.

    NAME/tensors.safetensors   flat vectors
    NAME/state.json            everything else
    NAME/manifest.json         {"format": 1, "files": {name: [bytes, sha256]}}, written last

A folder is written under a temporary name next to its path; after every file is synced it is renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..common.errors import Malformed

FORMAT = 1
TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
WRITING, REMOVING = ".writing-", ".removing-"
"""Prefixes of a folder's name before it is complete, and while it is being removed."""


def write_folder(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> int:
    """Create the folder `path`, durable when this returns; its size in bytes.

    OSError if that fails or `path` exists; nothing is left behind then.
    """
    temporary = path.with_name(WRITING + path.name)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        write_tensors(temporary / TENSORS, tensors)
        (temporary / STATE).write_text(json.dumps(state), "utf-8")
        files = {name: ((temporary / name).stat().st_size, _sha256(temporary / name)) for name in (TENSORS, STATE)}
        (temporary / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}), "utf-8")
        for name in (TENSORS, STATE, MANIFEST):
            sync(temporary / name)
        sync(temporary)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(path.parent)
    return sum(size for size, _ in files.values())


def read_folder(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors (in memory of their own) and state. Malformed("damaged") if any byte differs from what was written."""
    state = _read_state(path)
    try:
        with safe_open(path / TENSORS, framework="pt") as file:
            # The file is mapped: tensors are copied, so that they outlive it.
            return {name: file.get_tensor(name).clone() for name in file.keys()}, state  # noqa: SIM118 no mapping
    except (OSError, SafetensorError) as error:
        raise Malformed("damaged", f"{path / TENSORS}: {error}") from error


def read_tensor(path: Path, name: str) -> Tensor:
    """One tensor of a folder, in memory of its own; reads only this part of the file and verifies nothing."""
    try:
        with safe_open(path / TENSORS, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name).clone()
            return tensor
    except (OSError, SafetensorError) as error:
        raise Malformed("damaged", f"{path / TENSORS}: {error}") from error


def _read_state(path: Path) -> dict[str, Any]:
    """The JSON document, after all files are verified against the manifest. Malformed("damaged") if one differs."""
    try:
        manifest = json.loads((path / MANIFEST).read_text("utf-8"))
        if manifest["format"] != FORMAT:
            raise Malformed("damaged", f"{path} has format {manifest['format']}, this version reads {FORMAT}")
        for name in (TENSORS, STATE):
            size, sha256 = manifest["files"][name]
            if (path / name).stat().st_size != size or _sha256(path / name) != sha256:
                raise Malformed("damaged", f"{path / name} differs from what was written")
        state: dict[str, Any] = json.loads((path / STATE).read_text("utf-8"))
        return state
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Malformed("damaged", f"{path}: {type(error).__name__}: {error}") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the umask's permissions (the library allows only the owner); OSError."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error
    path.chmod(mode)


def write_file(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, durable when this returns; OSError otherwise."""
    temporary = path.with_name(WRITING + path.name)
    try:
        temporary.write_text(text, "utf-8")
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder so that no reader sees it in part; `clean` removes what is left."""
    gone = path.with_name(REMOVING + path.name)
    shutil.rmtree(gone, ignore_errors=True)
    try:
        path.rename(gone)
    except OSError:
        return  # it stays complete; the next save tries again
    shutil.rmtree(gone, ignore_errors=True)


def clean(parent: Path) -> None:
    """Remove folders and files that were not completed, or not completely removed."""
    for left in parent.iterdir():
        if left.name.startswith((WRITING, REMOVING)):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
