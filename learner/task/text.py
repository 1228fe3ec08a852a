"""Text corpus as bytes: the training text, its held-out parts, and the windows drawn from them.

Without a path, the text is the standard library's own .py files (about 10 MB, available wherever this runs). It is
split by the hash of the top-level module or package, so that near-copies fall into the same part: about 5 % are part A,
for choosing settings, and 5 % part B, for reporting. A user's own file or folder is split by position instead: the
first 90 % of each file are for training, then come A and B. A text too small to hold anything out is evaluated on
itself, and the corpus says so.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from ...common.errors import SettingError
from ...common.printable import printable

if TYPE_CHECKING:
    import torch

Bytes: TypeAlias = npt.NDArray[np.uint8]
Batches: TypeAlias = "Iterator[tuple[torch.Tensor, torch.Tensor]]"
"""(inputs, targets), both int64 [sequences, sequence_length], endlessly."""

SKIPPED = {"test", "tests", "encodings", "lib2to3", "idlelib", "site-packages", "dist-packages", "__pycache__"}
"""Folders of the standard library that hold no ordinary source text, or other packages."""
LOCAL_MODULES = ("_sysconfigdata", "sitecustomize", "usercustomize")
"""Generated when Python is built or installed, so they differ between machines with the same Python."""
HELD_OUT_ONE_IN = 20


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text in three parts, each a flat array of bytes (uint8). One byte is one token."""

    source: str
    """Description of the text, for messages."""
    train: Bytes
    held_out_a: Bytes
    """For choosing settings."""
    held_out_b: Bytes
    """For reporting."""
    holds_out: bool = True
    """False if the text is too small: both held-out parts are then the training text itself."""

    @property
    def tokens(self) -> int:
        """Bytes of the whole text."""
        return len(self.train) + (len(self.held_out_a) + len(self.held_out_b) if self.holds_out else 0)

    @cached_property
    def sha256(self) -> str:
        """sha256 (hex) over the three parts and their sizes; equal on all machines that split the same text."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out_a, self.held_out_b):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part.data)
        return digest.hexdigest()

    def part(self, name: str) -> Bytes:
        """The held-out part "A" or "B"."""
        return {"A": self.held_out_a, "B": self.held_out_b}[name]


def check_exists(path: Path | None) -> None:
    """SettingError if `path` does not exist: a cheap check to do before waiting for a run."""
    if path is None:
        return
    try:
        path.stat()
    except OSError as error:
        raise _unreadable(str(path), error) from error


def _unreadable(source: str, error: OSError) -> SettingError:
    return SettingError(f"cannot read {source}: {error.strerror or error}; give --data a file or folder")


def load_corpus(path: Path | None, sequence_length: int) -> Corpus:
    """Load the standard library's text, or that of the file or folder `path`.

    SettingError, naming the place, if it cannot be read or holds fewer bytes than one sequence and its last target.
    """
    source = "the standard library" if path is None else printable(str(path))
    try:
        pieces = list(_standard_library() if path is None else _own_text(path))
    except OSError as error:
        raise _unreadable(source, error) from error
    train, a, b = (_joined(text for part, text in pieces if part == wanted) for wanted in ("train", "A", "B"))
    holds_out = min(len(train), len(a), len(b)) > sequence_length
    if not holds_out:
        train = a = b = _joined(text for _, text in pieces)
    if len(train) <= sequence_length:
        raise SettingError(
            f"{source} holds {len(train)} tokens (bytes), and one sequence of {sequence_length} needs "
            f"{sequence_length + 1}; give --data more text, or take shorter sequences"
        )
    return Corpus(source=source, train=train, held_out_a=a, held_out_b=b, holds_out=holds_out)


def _joined(texts: Iterable[bytes]) -> Bytes:
    return np.frombuffer(b"".join(texts), dtype=np.uint8)


def _standard_library() -> Iterator[tuple[str, bytes]]:
    """(part, bytes) of each file of the standard library, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in _files(root, SKIPPED):
        inside = path.relative_to(root)
        top = inside.parts[0].removesuffix(".py")
        if path.suffix == ".py" and top.isidentifier() and not top.startswith(LOCAL_MODULES):
            yield _part_of(top), path.read_bytes()


def _part_of(module: str) -> str:
    """train, A or B: the same for everything in one top-level module or package, on every machine."""
    number = int.from_bytes(hashlib.sha256(module.encode()).digest()[:2], "big")
    return {0: "A", 1: "B"}.get(number % HELD_OUT_ONE_IN, "train")


def _own_text(path: Path) -> Iterator[tuple[str, bytes]]:
    """(part, bytes) of the pieces of each file, in the order of their paths; hidden files are left out."""
    if path.exists() and not path.is_dir() and not path.is_file():
        raise SettingError(f"{path} is neither a file nor a folder; give --data one of them")
    for file in _files(path) if path.is_dir() else [path]:
        text = file.read_bytes()
        a = len(text) - 2 * (len(text) // HELD_OUT_ONE_IN)
        b = len(text) - len(text) // HELD_OUT_ONE_IN
        yield from (("train", text[:a]), ("A", text[a:b]), ("B", text[b:]))


def _files(root: Path, skipped: Collection[str] = ()) -> list[Path]:
    """Regular files under `root`, except hidden ones and those in `skipped` folders, sorted by their paths' bytes."""
    found = []
    for folder, inner, names in os.walk(root, onerror=_give_up):
        inner[:] = [name for name in inner if name not in skipped and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: os.fsencode(path.relative_to(root)))


def _give_up(unreadable: OSError) -> None:
    """Raise the error of a folder that cannot be listed, instead of treating it as empty."""
    raise unreadable


def generator(*parts: object) -> np.random.Generator:
    """Random generator seeded by all of `parts` and nothing else."""
    words = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return np.random.default_rng(np.frombuffer(words, dtype=np.uint32))


def windows(text: Bytes, starts: npt.NDArray[np.int64], sequence_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets), both int64 [len(starts), sequence_length]: each target is the byte after its input."""
    import torch  # not at the top: `diloco up` checks the text first, and needs no torch for that

    rows = text[starts[:, None] + np.arange(sequence_length + 1)].astype(np.int64)
    return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())


def batches(text: Bytes, sequences: int, sequence_length: int, *, seed: int, name: str, incarnation: int) -> Batches:
    """Endless (inputs, targets) of random windows; a different stream for each learner and incarnation."""
    random = generator("train", seed, name, incarnation)
    while True:
        yield windows(text, random.integers(0, len(text) - sequence_length, size=sequences), sequence_length)


def baselines(corpus: Corpus, part: str) -> dict[str, float]:
    """Nats per byte on a held-out part of three models that need no training: baselines for a learner.

    uniform: all bytes equally likely. unigram and bigram: frequencies in the training text; an unseen pair
    falls back to its second byte's frequency (weight 1 against the counts).
    """
    held_out = corpus.part(part)
    singles = np.bincount(corpus.train, minlength=256) + 1.0
    unigram = singles / singles.sum()
    pairs = np.bincount(corpus.train[:-1].astype(np.int64) * 256 + corpus.train[1:], minlength=65_536).reshape(256, 256)
    bigram = (pairs + unigram) / (pairs.sum(axis=1, keepdims=True) + 1)
    return {
        "uniform": float(np.log(256)),
        "unigram": float(-np.log(unigram[held_out]).mean()),
        "bigram": float(-np.log(bigram[held_out[:-1], held_out[1:]]).mean()),
    }
