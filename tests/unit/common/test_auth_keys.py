"""Key files and the broker's folder of grants: written whole, read with suspicion, never quoted."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from decoupled_diloco.cli.commands import run_command
from decoupled_diloco.common.auth_keys import ROLES, Grant, Key, KeyRing, new_key, revoke
from decoupled_diloco.common.errors import SettingError
from hypothesis import given
from hypothesis import strategies as st


def bob(directory: Path, name: str = "bob") -> Key:
    return new_key(directory, role="learner", run="run", name=name)


# --- keys ------------------------------------------------------------------------------------------------------------
def test_a_key_comes_back_from_its_file_which_only_its_owner_may_read(tmp_path: Path) -> None:
    key = bob(tmp_path / "broker")
    path = tmp_path / "far" / "bob.key"
    key.save(path)
    assert Key.load(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["bob.key"], "nothing is left beside it"


def test_a_secret_appears_in_no_repr_and_in_no_grant(tmp_path: Path) -> None:
    key, ring = bob(tmp_path), KeyRing(tmp_path)
    for text in (repr(key), str(key), repr(key.grant), repr(ring), *map(repr, ring.grants)):
        assert key.secret not in text
        assert ring.secret not in text
    for path in (tmp_path / "grants").iterdir():
        assert key.secret not in path.read_text()


def test_the_broker_s_own_pair_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    first, second = bob(tmp_path), bob(tmp_path, "eve")
    assert first.broker == second.broker == KeyRing(tmp_path).public
    assert stat.S_IMODE((tmp_path / "broker.key").stat().st_mode) == 0o600


def test_keys_made_at_the_same_moment_belong_to_one_broker(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda i: bob(tmp_path, f"node{i}"), range(8)))
    assert {key.broker for key in made} == {KeyRing(tmp_path).public}
    assert len(KeyRing(tmp_path).grants) == 8


@pytest.mark.parametrize("role", ROLES)
def test_a_grant_knows_its_key_s_run_role_and_name(tmp_path: Path, role: str) -> None:
    key = new_key(tmp_path, role=role, run="run-1", name="a-b")  # type: ignore[arg-type]
    assert KeyRing(tmp_path).grant_of(key.public) == Grant(run="run-1", role=role, name="a-b", public=key.public)  # type: ignore[arg-type]
    assert KeyRing(tmp_path).grant_of(key.broker) is None


@pytest.mark.parametrize(
    ("name", "may"),
    {
        "bob": True, "bob-1": True, "bob-": True, "bob-a-b": True, "bobby": False, "bo": False, "": False, "Bob": False,
        "bob/": False, "bob-\n": False, "bob-" + 40 * "x": False, "eve": False,
    }.items(),
)  # fmt: skip
def test_a_holder_may_be_called_by_its_name_or_its_name_and_a_dash(tmp_path: Path, name: str, may: bool) -> None:
    key = bob(tmp_path)
    assert key.may_be_called(name) is key.grant.may_be_called(name) is may


@pytest.mark.parametrize("name", ["bob", "bob-2", "bo", "bo-x"])
def test_two_holders_never_share_a_name(tmp_path: Path, name: str) -> None:
    bob(tmp_path)
    bob(tmp_path, "bo-x-y")
    with pytest.raises(SettingError, match="already"):
        bob(tmp_path, name)
    with pytest.raises(SettingError, match="already"):
        new_key(tmp_path, role="observer", run="run", name=name)  # both roles say Hello
    new_key(tmp_path, role="learner", run="run2", name=name)
    new_key(tmp_path, role="syncer", run="run", name=name)
    assert len(KeyRing(tmp_path).grants) == 4


def test_two_holders_do_not_share_a_name_either_when_both_keys_are_made_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bob(tmp_path, "other")
    both_looked, looks = threading.Barrier(2), KeyRing._look

    def look(ring: KeyRing) -> object:
        found = looks(ring)
        with suppress(threading.BrokenBarrierError):
            both_looked.wait(1)  # the other one comes too, or is kept waiting
        return found

    def make(name: str) -> bool:
        try:
            bob(tmp_path, name)
        except SettingError:
            return False
        return True

    monkeypatch.setattr(KeyRing, "_look", look)
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(make, ("bob", "bob-1"))) == [False, True]


def test_a_key_file_is_never_overwritten(tmp_path: Path) -> None:
    first, second = bob(tmp_path), bob(tmp_path, "eve")
    first.save(tmp_path / "it.key")
    with pytest.raises(SettingError, match="exists already"):
        second.save(tmp_path / "it.key")
    assert Key.load(tmp_path / "it.key") == first


# --- files that are none ---------------------------------------------------------------------------------------------
SECRET = "hunter2-and-more"  # noqa: S105 what must not be shown
WRONG = {
    "empty": "",
    "no JSON": SECRET,
    "half of it": '{"diloco_key": 1, "secret": "' + SECRET,
    "a list": f'["{SECRET}"]',
    "deep": "[" * 3000,
    "large": f'{{"diloco_key": 1, "run": "{"x" * 5000}"}}',
    "not UTF-8": "\udcff\udcfe",
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_what_is_no_key_file_is_refused_in_one_sentence_that_does_not_quote_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "it.key"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SettingError) as caught:
        Key.load(path)
    assert str(path) in str(caught.value)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None, "a traceback would quote it"


VALUES = st.none() | st.integers() | st.text(max_size=45) | st.lists(st.text()) | st.dictionaries(st.text(), st.text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds one good key file."""
    made = tmp_path_factory.mktemp("keys")
    bob(made).save(made / "good.key")
    return made


@pytest.mark.parametrize("field", ["diloco_key", "run", "role", "name", "public", "secret", "broker"])
@given(value=VALUES)
def test_whatever_is_in_a_field_it_fits_or_the_file_is_refused(folder: Path, field: str, value: object) -> None:
    rows = json.loads((folder / "good.key").read_text()) | {field: value}
    (folder / "it.key").write_text(json.dumps(rows))
    try:
        key = Key.load(folder / "it.key")
    except SettingError:
        return
    assert getattr(key, field, 1) == value


def test_missing_and_more_fields_are_refused(tmp_path: Path) -> None:
    rows = json.loads(bob(tmp_path).text())
    for changed in ({**rows, "more": "x"}, {k: v for k, v in rows.items() if k != "broker"}):
        (tmp_path / "it.key").write_text(json.dumps(changed))
        with pytest.raises(SettingError, match="is not a key file"):
            Key.load(tmp_path / "it.key")


def test_a_file_that_is_not_there_or_a_folder_is_reported(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(SettingError, match="cannot be read"):
            Key.load(path)


def test_a_folder_of_keys_without_a_pair_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="diloco keys new"):
        KeyRing(tmp_path)


# --- the ring changes ------------------------------------------------------------------------------------------------
def test_a_ring_sees_new_revoked_and_replaced_keys_when_it_looks(tmp_path: Path) -> None:
    first = bob(tmp_path)
    ring = KeyRing(tmp_path)
    assert not ring.changed()
    eve = bob(tmp_path, "eve")
    assert ring.changed()
    assert ring.grant_of(eve.public) is None, "not before it is read again"
    ring.reload()
    assert ring.grant_of(eve.public) == eve.grant
    assert not ring.changed()

    revoke(tmp_path, role="learner", run="run", name="bob")
    again = bob(tmp_path)
    assert ring.changed()
    ring.reload()
    assert ring.grant_of(first.public) is None
    assert ring.grant_of(again.public) == again.grant


def test_a_broken_grant_counts_as_none_and_the_others_stay(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    key, eve = bob(tmp_path), bob(tmp_path, "eve")
    ring = KeyRing(tmp_path)
    (tmp_path / "grants" / key.grant.file_name).write_text("torn")
    assert ring.changed()
    ring.reload()
    assert key.grant.file_name in capfd.readouterr().err
    assert ring.grants == [eve.grant]
    assert not ring.changed(), "it is not read again before it is another one"


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_a_broken_grant_stops_neither_a_broker_s_start_nor_work_on_the_others(
    tmp_path: Path, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    eve = bob(tmp_path, "eve")
    (tmp_path / "grants" / "run.learner.broken.json").write_bytes(text.encode(errors="surrogateescape"))
    assert KeyRing(tmp_path).grants == [eve.grant]
    told = capfd.readouterr().err
    assert "run.learner.broken.json" in told
    assert len(told.splitlines()) == 1
    assert keys("list", "--dir", str(tmp_path)) == 0
    assert capfd.readouterr().out.split() == ["run", "learner", "eve"]
    assert keys("new", *ABOUT, "--dir", str(tmp_path), "--out", str(tmp_path / "bob.key")) == 0
    assert keys("revoke", *ABOUT, "--dir", str(tmp_path)) == 0
    assert KeyRing(tmp_path).grants == [eve.grant]


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES])
def test_a_grant_that_cannot_be_read_for_a_moment_stays_and_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    key, eve = bob(tmp_path), bob(tmp_path, "eve")
    ring, opens = KeyRing(tmp_path), Path.open

    def fails(path: Path, *arguments: Any) -> Any:
        if path.suffix == ".json":
            raise OSError(number, os.strerror(number))
        return opens(path, *arguments)

    def replace() -> Key:
        revoke(tmp_path, role="learner", run="run", name="bob")
        return bob(tmp_path)

    new = replace()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fails)
        for _ in range(2):
            assert ring.changed(), "it is looked at again and again"
            ring.reload()
            assert ring.grants == [eve.grant], "what was replaced is not known, and what was there before is revoked"
    assert len(capfd.readouterr().err.splitlines()) == 2, "each file is told of once"
    ring.reload()
    assert not ring.changed()
    assert ring.grant_of(key.public) is None
    assert ring.grants == [new.grant, eve.grant]


def test_a_folder_of_grants_that_cannot_be_looked_at_is_reported(tmp_path: Path) -> None:
    (tmp_path / "broker").mkdir()
    bob(tmp_path / "made")
    (tmp_path / "made" / "broker.key").rename(tmp_path / "broker" / "broker.key")
    (tmp_path / "broker" / "grants").touch()
    with pytest.raises(SettingError, match="cannot be read"):
        KeyRing(tmp_path / "broker")


def test_a_grant_under_another_s_name_or_copied_opens_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    key = bob(tmp_path)
    path = tmp_path / "grants" / key.grant.file_name
    ring = KeyRing(tmp_path)
    (tmp_path / "grants" / "run.syncer.bob.json").write_bytes(path.read_bytes())
    rows = json.loads(path.read_text()) | {"role": "syncer", "name": "boss"}
    (tmp_path / "grants" / "run.syncer.boss.json").write_text(json.dumps(rows))
    ring.reload()
    assert capfd.readouterr().err.count("does not match its file name") == 2
    assert ring.grants == [key.grant]


def test_when_all_grants_are_removed_no_key_is_left(tmp_path: Path) -> None:
    key = bob(tmp_path)
    ring = KeyRing(tmp_path)
    (tmp_path / "grants" / key.grant.file_name).unlink()
    (tmp_path / "grants").rmdir()
    assert ring.changed()
    ring.reload()
    assert ring.grants == []


# --- diloco keys -----------------------------------------------------------------------------------------------------
def keys(*arguments: str) -> int:
    return run_command(["keys", *arguments])


ABOUT = ("--role", "learner", "--run", "run", "--name", "bob")


def test_keys_are_made_listed_and_revoked_and_no_secret_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert keys("new", *ABOUT) == 0
    key = Key.load(tmp_path / "run.learner.bob.key")
    assert key.secret not in "".join(path.read_text() for path in (tmp_path / "keys").rglob("*") if path.is_file())
    assert KeyRing(Path("keys")).grant_of(key.public) == key.grant
    assert keys("new", "--role", "observer", "--run", "run", "--name", "eve", "--out", "eve.key") == 0
    assert Key.load(Path("eve.key")).role == "observer"
    assert keys("list") == 0
    assert keys("revoke", *ABOUT) == 0
    told = capsys.readouterr()
    assert [line.split() for line in told.out.splitlines()[2:4]] == [
        ["run", "learner", "bob"],
        ["run", "observer", "eve"],
    ]
    assert key.secret not in told.out + told.err
    assert [grant.name for grant in KeyRing(Path("keys")).grants] == ["eve"]
    assert keys("revoke", *ABOUT) == 2
    assert "no key for learner bob" in capsys.readouterr().err


def test_a_key_on_standard_output_is_a_key_file_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys("new", *ABOUT, "--dir", str(tmp_path / "keys"), "--out", "-") == 0
    (tmp_path / "it.key").write_text(capsys.readouterr().out)
    assert Key.load(tmp_path / "it.key").name == "bob"
    assert sorted(p.name for p in (tmp_path / "keys").iterdir()) == ["broker.key", "grants"]


def test_a_key_that_standard_output_does_not_take_is_not_granted_either(tmp_path: Path) -> None:
    diloco = [sys.executable, "-P", "-m", "decoupled_diloco.cli", "keys", "new", *ABOUT, "--dir", str(tmp_path)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*diloco, "--out", "-"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode != 0
    assert "the key could not be written to standard output" in done.stderr
    assert KeyRing(tmp_path).grants == []


def test_where_the_keys_are_is_told_by_the_broker_s_own_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DILOCO_DIRECTORY", "a-run")
    monkeypatch.setenv("DILOCO_KEYS", "known")
    assert keys("new", *ABOUT) == 0
    assert [grant.name for grant in KeyRing(tmp_path / "known").grants] == ["bob"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["known", "run.learner.bob.key"]
    assert keys("list") == keys("revoke", *ABOUT) == 0
    assert "run                  learner    bob" in capsys.readouterr().out


def test_a_key_that_cannot_be_written_is_not_granted_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert keys("new", *ABOUT, "--dir", str(tmp_path), "--out", str(tmp_path / "file" / "it.key")) == 2
    assert keys("new", *ABOUT, "--dir", str(tmp_path), "--out", str(tmp_path / "file")) == 2
    assert "exists already" in capsys.readouterr().err
    assert KeyRing(tmp_path).grants == []


def test_names_outside_ascii_are_refused_and_folders_outside_ascii_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "Schlüssel 🗝"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    diloco = [sys.executable, "-P", "-m", "decoupled_diloco.cli", "keys", "new", "--role", "learner", "--run", "run"]
    for name, code in (("bob", 0), ("böb", 2)):
        done = subprocess.run(
            [*diloco, "--name", name, "--dir", str(folder)],
            cwd=tmp_path, env=environment, capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
    assert [grant.name for grant in KeyRing(folder).grants] == ["bob"]
