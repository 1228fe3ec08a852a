"""`diloco keys init` creates credentials once, keeps them afterwards and replaces lost parts."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from decoupled_diloco.common.auth_keys import ROLES, Key, KeyRing
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.compose.container_credentials import init


def everything(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_each_role_gets_a_key_that_the_broker_knows(tmp_path: Path) -> None:
    init(tmp_path, "run")
    known = KeyRing(tmp_path / "broker")
    for role in ROLES:
        key = Key.load(tmp_path / role / "key")
        assert (key.run, key.role, key.name, key.broker) == ("run", role, role, known.public)
        assert known.grant_of(key.public) == key.grant


def test_redis_and_the_syncer_share_a_password(tmp_path: Path) -> None:
    init(tmp_path, "run")
    password = (tmp_path / "redis" / "password").read_text()
    assert len(password) >= 32
    assert (tmp_path / "redis-client" / "password").read_text() == password
    assert f"requirepass {password}\n" in (tmp_path / "redis" / "redis.conf").read_text()


def test_secret_files_are_readable_by_the_owner_only(tmp_path: Path) -> None:
    init(tmp_path, "run")
    secret = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".json"]
    assert len(secret) == 8
    assert [path for path in secret if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_a_second_run_of_the_command_changes_nothing(tmp_path: Path) -> None:
    assert init(tmp_path, "run")
    before = everything(tmp_path)
    assert init(tmp_path, "run") == []
    assert everything(tmp_path) == before


@pytest.mark.parametrize("lost", [f"{role}/key" for role in ROLES])
def test_a_lost_key_is_replaced_and_the_lost_one_is_no_longer_valid(tmp_path: Path, lost: str) -> None:
    init(tmp_path, "run")
    old = Key.load(tmp_path / lost)
    (tmp_path / lost).unlink()
    assert init(tmp_path, "run") == [lost]
    known = KeyRing(tmp_path / "broker")
    assert known.grant_of(old.public) is None
    assert known.grant_of(Key.load(tmp_path / lost).public) is not None
    assert len(known.grants) == 3


HALVES = {"nothing": slice(0), "half": slice(100), "all but the end": slice(-3)}


@pytest.mark.parametrize("part", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("torn", [f"{role}/key" for role in ROLES])
def test_an_incomplete_key_file_is_replaced(tmp_path: Path, torn: str, part: slice) -> None:
    init(tmp_path, "run")
    whole = (tmp_path / torn).read_bytes()
    (tmp_path / torn).write_bytes(whole[part])
    assert init(tmp_path, "run") == [torn]
    key, known = Key.load(tmp_path / torn), KeyRing(tmp_path / "broker")
    assert known.grant_of(key.public) == key.grant
    assert len(known.grants) == 3


@pytest.mark.parametrize("part", HALVES.values(), ids=HALVES)
def test_an_incomplete_broker_pair_is_replaced_and_so_are_all_client_keys(tmp_path: Path, part: slice) -> None:
    init(tmp_path, "run")
    pair = tmp_path / "broker" / "broker.key"
    pair.write_bytes(pair.read_bytes()[part])
    assert init(tmp_path, "run") == [f"{role}/key" for role in ROLES]
    assert {Key.load(tmp_path / role / "key").broker for role in ROLES} == {KeyRing(tmp_path / "broker").public}


def test_a_key_that_cannot_be_read_stays(tmp_path: Path) -> None:
    init(tmp_path, "run")
    path = tmp_path / "learner" / "key"
    path.unlink()
    path.mkdir()
    with pytest.raises(SettingError, match="cannot be read"):
        init(tmp_path, "run")
    assert len(KeyRing(tmp_path / "broker").grants) == 3


def test_an_empty_password_file_is_replaced(tmp_path: Path) -> None:
    init(tmp_path, "run")
    (tmp_path / "redis" / "password").write_text("")
    assert init(tmp_path, "run") == ["redis/password"]
    password = (tmp_path / "redis" / "password").read_text()
    assert len(password) >= 32
    assert (tmp_path / "redis-client" / "password").read_text() == password


def test_a_missing_broker_pair_is_replaced_and_so_are_all_client_keys(tmp_path: Path) -> None:
    init(tmp_path, "run")
    (tmp_path / "broker" / "broker.key").unlink()
    assert init(tmp_path, "run") == [f"{role}/key" for role in ROLES]
    known = KeyRing(tmp_path / "broker")
    assert {Key.load(tmp_path / role / "key").broker for role in ROLES} == {known.public}
    assert len(known.grants) == 3


def test_changing_the_run_replaces_the_keys(tmp_path: Path) -> None:
    for run in ("one", "two", "one"):
        init(tmp_path, run)
        known = KeyRing(tmp_path / "broker")
        for role in ROLES:
            key = Key.load(tmp_path / role / "key")
            assert key.run == run
            assert known.grant_of(key.public) == key.grant


def test_keys_of_other_clients_are_kept(tmp_path: Path) -> None:
    from decoupled_diloco.common.auth_keys import new_key

    init(tmp_path, "run")
    far = new_key(tmp_path / "broker", role="learner", run="run", name="far")
    assert init(tmp_path, "run") == []
    assert KeyRing(tmp_path / "broker").grant_of(far.public) == far.grant


def test_a_missing_or_outdated_copy_of_the_password_is_replaced(tmp_path: Path) -> None:
    init(tmp_path, "run")
    password = (tmp_path / "redis" / "password").read_text()
    copy = tmp_path / "redis-client" / "password"
    copy.unlink()
    assert init(tmp_path, "run") == []
    assert copy.read_text() == password
    copy.write_text("old")
    assert init(tmp_path, "run") == []
    assert copy.read_text() == password


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "redis").write_text("a file where a folder should be")
    with pytest.raises(SettingError, match=r"cannot be stored under"):
        init(tmp_path, "run")
