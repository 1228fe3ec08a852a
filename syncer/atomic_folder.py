"""Folders of tensors and one JSON document that are either complete or not there.

    NAME/tensors.safetensors   flat vectors
    NAME/state.json            everything else
    NAME/manifest.json         {"format": 1, "files": {name: [bytes, sha256]}}, written last

A folder is written under another name beside its place, each file is synced, and only then it takes its name.
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
"""What a folder is called before it is complete, and while it is being removed."""


def write_folder(place: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> int:
    """Make the folder `place` and return its bytes; it is durable when this returns.

    OSError where that cannot be done (also if `place` is there already); nothing is left behind then.
    """
    beside = place.with_name(WRITING + place.name)
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir()
        write_tensors(beside / TENSORS, tensors)
        (beside / STATE).write_text(json.dumps(state), "utf-8")
        files = {name: ((beside / name).stat().st_size, _sha256(beside / name)) for name in (TENSORS, STATE)}
        (beside / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}), "utf-8")
        for name in (TENSORS, STATE, MANIFEST):
            sync(beside / name)
        sync(beside)
        beside.rename(place)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    sync(place.parent)
    return sum(size for size, _ in files.values())


def read_folder(place: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors (in memory of their own) and state. Malformed("damaged") unless every byte is what was written."""
    state = read_state(place)
    try:
        with safe_open(place / TENSORS, framework="pt") as file:
            # The file is mapped: a copy, so that nobody depends on it when it is removed.
            return {name: file.get_tensor(name).clone() for name in file.keys()}, state  # noqa: SIM118 no mapping
    except (OSError, SafetensorError) as wrong:
        raise Malformed("damaged", f"{place / TENSORS}: {wrong}") from wrong


def read_tensor(place: Path, name: str) -> Tensor:
    """One tensor of a folder, in memory of its own; only this part of the file is read, and nothing is verified."""
    try:
        with safe_open(place / TENSORS, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name).clone()
            return tensor
    except (OSError, SafetensorError) as wrong:
        raise Malformed("damaged", f"{place / TENSORS}: {wrong}") from wrong


def read_state(place: Path) -> dict[str, Any]:
    """The JSON document, after all files were compared with the manifest. Malformed("damaged") if one differs."""
    try:
        manifest = json.loads((place / MANIFEST).read_text("utf-8"))
        if manifest["format"] != FORMAT:
            raise Malformed("damaged", f"{place} has format {manifest['format']}, this version reads {FORMAT}")
        for name in (TENSORS, STATE):
            size, sha256 = manifest["files"][name]
            if (place / name).stat().st_size != size or _sha256(place / name) != sha256:
                raise Malformed("damaged", f"{place / name} is not what was written")
        state: dict[str, Any] = json.loads((place / STATE).read_text("utf-8"))
        return state
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise Malformed("damaged", f"{place}: {type(wrong).__name__}: {wrong}") from wrong


def write_tensors(place: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, readable for whom the umask says (the library makes it its owner's alone); OSError."""
    place.touch()
    mode = place.stat().st_mode
    try:
        save_file(dict(tensors), place, metadata=metadata)
    except SafetensorError as wrong:
        raise OSError(f"cannot write {place}: {wrong}") from wrong
    place.chmod(mode)


def write_file(place: Path, text: str) -> None:
    """`text` under the name `place`, all or nothing, durable when this returns; OSError otherwise."""
    beside = place.with_name(WRITING + place.name)
    try:
        beside.write_text(text, "utf-8")
        sync(beside)
        beside.replace(place)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync(place.parent)


def remove_folder(place: Path) -> None:
    """Remove a folder so that it is never seen in part; what cannot be removed now is left to `clean`."""
    gone = place.with_name(REMOVING + place.name)
    shutil.rmtree(gone, ignore_errors=True)
    try:
        place.rename(gone)
    except OSError:
        return  # it stays complete; whoever lists the folders next tries again
    shutil.rmtree(gone, ignore_errors=True)


def clean(parent: Path) -> None:
    """Remove what was never completed or never quite removed."""
    for left in parent.iterdir():
        if left.name.startswith((WRITING, REMOVING)):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def sync(place: Path) -> None:
    """Wait until a file's or a folder's content is on the disk."""
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(place: Path) -> str:
    with place.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
