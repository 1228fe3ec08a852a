"""The syncer's directory: one owner, epochs that only increase, and errors at the start if it is unusable."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from child import child, output_of
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.syncer.checkpoint import Checkpoints
from states import fresh, seeded, settings


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    with seeded(tmp_path / "global") as store:
        yield store


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
        "from decoupled_diloco.syncer.model_file import read_model, save_model",
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
