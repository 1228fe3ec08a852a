"""The URL of Redis: passwords, TLS, errors."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
from decoupled_diloco.cli.commands import run_command
from decoupled_diloco.common import redis_client, registry_writer
from decoupled_diloco.common.errors import DilocoError, PeerLost, SettingError
from decoupled_diloco.common.registry import Registry, check_connection, list_runs, read_status, redact_url
from decoupled_diloco.common.registry_preflight import check_redis, redis_advice
from decoupled_diloco.compose.embedded_redis import EmbeddedRedis
from registry_and_redis import RegistryAndRedis, logger_into
from stores import TlsFront
from waiting import wait_for

SECRET = "p@s:s#w/o?r%d$ü&+=%41"  # noqa: S105 - no password; every character that URLs, files and shells treat in their own way


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A store with a password for everybody and a user of its own with the same."""
    directory = tmp_path_factory.mktemp("guarded")
    rules = f"user default on allcommands allkeys allchannels >{SECRET}\n"
    rules += f"user ann on allcommands ~dd:* >{SECRET}\n"
    (directory / "users.acl").write_text(rules)
    with EmbeddedRedis(directory, options=("--aclfile", str(directory / "users.acl"))) as store:
        yield store


@pytest.mark.parametrize("user", ["", "ann"])
def test_user_password_and_database_come_from_the_url(guarded: EmbeddedRedis, user: str) -> None:
    url = f"redis://{user}:{quote(SECRET, safe='')}@127.0.0.1:{guarded.port}"
    check_connection(url)
    registry = Registry(f"{url}/3", "run", logger_into([]))
    registry.publish_run(step=1)
    registry.close()
    assert read_status(f"{url}/3", "run")["run"]["step"] == 1
    assert read_status(f"{url}?db=3", "run")["run"]["step"] == 1
    assert list_runs(f"{url}/0") == []


def test_a_password_file_holds_it_as_it_is(guarded: EmbeddedRedis, tmp_path: Path) -> None:
    file = tmp_path / "geheim 1"
    file.write_text(SECRET + "\n")
    for user in ("", "ann@"):
        check_connection(f"redis://{user}127.0.0.1:{guarded.port}/0?password_file={quote(str(file))}")
    with pytest.raises(SettingError, match="cannot be read"):
        check_connection(f"redis://127.0.0.1:{guarded.port}/0?password_file=/nowhere")


def test_a_password_file_that_is_away_while_the_store_is_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []

    def connect(url: str) -> Any:
        try:
            return redis_client.connect(url)
        except SettingError as wrong:
            refused.append(str(wrong))
            raise

    monkeypatch.setattr(registry_writer, "connect", connect)
    file, away = tmp_path / "password", tmp_path / "away"
    file.write_text(SECRET)
    lines: list[dict[str, Any]] = []
    with EmbeddedRedis(tmp_path / "store", options=("--requirepass", SECRET)) as store:
        url = f"redis://127.0.0.1:{store.port}/0?password_file={quote(str(file))}"
        registry = Registry(url, "run", logger_into(lines))
        registry.publish_run(step=1)
        wait_for(lambda: list_runs(url) == ["run"], "the run appears")
        file.rename(away)
        store.stop()
        wait_for(lambda: lines, "the loss is told")
        registry.publish_run(step=2)
        wait_for(lambda: refused, "the file is missed")
        store.start()
        away.rename(file)
        wait_for(lambda: list_runs(url) == ["run"], "the run appears again")
        assert read_status(url, "run")["run"]["step"] == 2
        registry.close()


@pytest.mark.parametrize("login", ["", ":wrong-%s@", "ann:wrong-%s@", "nobody:%s@"])
def test_a_wrong_password_is_called_authentication_and_not_shown(guarded: EmbeddedRedis, login: str) -> None:
    url = f"redis://{login.replace('%s', quote(SECRET, safe=''))}127.0.0.1:{guarded.port}/0"
    with pytest.raises(SettingError, match="authentication failed at redis://") as caught:
        check_connection(url)
    lines: list[dict[str, Any]] = []
    registry = Registry(url, "run", logger_into(lines))
    wait_for(lambda: lines, "the registry tells it")
    registry.close()
    for text in (str(caught.value), repr(caught.value.__cause__), str(lines)):
        assert "authentication" in text or "None" in text
        assert SECRET not in text
        assert quote(SECRET, safe="") not in text


def test_a_password_that_nobody_asked_for_is_called_authentication(full_pair: RegistryAndRedis) -> None:
    with pytest.raises(SettingError, match="authentication failed"):
        check_connection(full_pair.store.url.replace("//", "//:p@"))


def test_a_database_that_does_not_exist_is_named(full_pair: RegistryAndRedis) -> None:
    with pytest.raises(SettingError, match="database number"):
        check_connection(full_pair.store.url.replace("/0", "/999"))


def test_tls_works_with_the_authority_and_fails_cleanly_without(full_pair: RegistryAndRedis, tmp_path: Path) -> None:
    with TlsFront(tmp_path, behind=full_pair.store.port) as front:
        url = f"rediss://localhost:{front.port}/0"
        trusted = f"{url}?ssl_ca_certs={quote(str(front.certificate))}"
        check_connection(trusted)
        assert read_status(trusted, "run")["epoch"] == 5
        with pytest.raises(SettingError, match=r"certificate of rediss://localhost.*is not trusted.*ssl_ca_certs"):
            check_connection(url)
        with pytest.raises(SettingError, match="does not exist"):
            check_connection(f"{url}?ssl_ca_certs=/nowhere.pem")
        with pytest.raises(PeerLost):
            check_connection(f"redis://localhost:{front.port}/0")
    with pytest.raises(PeerLost, match="with TLS"):
        check_connection(f"rediss://127.0.0.1:{full_pair.store.port}/0")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://host:80/0",
        "redis://",
        "redis://:6379/0",
        "redis://host:6379/three",
        "redis://host:6379/3/4",
        "redis://host:99999/0",
        "redis://:geheim#1@host:6379/0",
        "redis://:geheim/1@host:6379/0",
        "redis://:geheim?1@host:6379/0",
        "redis://u:1/geheim@host:6379/0",
        "redis://[geheim/0",
        "redis://host:6379/0?password=geheim",
        "redis://host:6379/0?socket_timeout=99",
    ],
)
def test_a_malformed_url_is_refused_without_showing_secrets(url: str) -> None:
    with pytest.raises(SettingError) as caught:
        Registry(url, "run", logger_into([]))
    if "@" in url or "password" in url:
        assert "geheim" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_host_that_does_not_exist_or_cannot_be_a_name_is_peer_lost() -> None:
    with pytest.raises(PeerLost, match=r"no Redis answers .* host name nowhere.invalid cannot be resolved"):
        check_connection("redis://nowhere.invalid:6379/0")
    with pytest.raises(PeerLost, match="no Redis answers"):
        check_connection(f"redis://{'x' * 300}:6379/0")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://:geheim@host/0", "redis://:***@host/0"),
        ("redis://ann:geheim@host/0", "redis://ann:***@host/0"),
        ("redis://geheim@host/0", "redis://:***@host/0"),
        ("redis://ann:geh@ei/m@host/0", "redis://ann:***@host/0"),
        ("ann:geheim@host", "ann:***@host"),
        ("rediss://h/0?ssl_password=geheim&db=3", "rediss://h/0?ssl_password=***&db=3"),
        ("redis://:a://geheim@host/0", "redis://:***@host/0"),
    ],
)
def test_a_shown_url_hides_the_password(url: str, shown: str) -> None:
    assert redact_url(url) == shown


def test_a_user_who_may_not_write_is_reported(guarded: EmbeddedRedis) -> None:
    admin: Any = redis.Redis(port=guarded.port, password=SECRET)
    admin.execute_command("ACL", "SETUSER", "reader", "on", "+@read", "+ping", "~dd:*", ">p")
    admin.close()
    lines: list[dict[str, Any]] = []
    registry = Registry(f"redis://reader:p@127.0.0.1:{guarded.port}/0", "run", logger_into(lines))
    registry.publish_run(step=1)
    wait_for(lambda: lines, "the refusal is told")
    registry.close()
    assert "may not" in lines[0]["reason"]
    assert not registry.healthy


def test_the_rights_that_the_page_names_are_enough(guarded: EmbeddedRedis) -> None:
    page = (Path(__file__).parents[3] / "docs" / "redis.md").read_text(encoding="utf-8")
    (rights, keys) = re.findall(r"A user needs `([^`]*)` and the keys `([^`]*)`", page)[0]
    admin: Any = redis.Redis(port=guarded.port, password=SECRET)
    admin.execute_command("ACL", "SETUSER", "clerk", "on", *rights.split(), keys, ">p")
    admin.close()
    url, lines = f"redis://clerk:p@127.0.0.1:{guarded.port}/5", list[dict[str, Any]]()
    check_redis(url, "run")
    registry = Registry(url, "run", logger_into(lines))
    registry.publish_run(step=1)
    registry.publish_learner("a", 1.0, loss=1.0)
    registry.forget_learner("b")
    registry.event("joined")
    registry.write_epoch(2)
    registry.close()
    assert lines == []
    assert registry.stored_epoch() == 2
    assert list_runs(url) == ["run"]
    assert read_status(url, "run")["learners"]["a"]["loss"] == 1


@pytest.mark.parametrize(
    ("left_out", "named"),
    [
        ("-xadd", "XADD"), ("-zadd", "ZADD"), ("-hset", "HSET"), ("-exists", "EXISTS"), ("-multi", "MULTI"),
        ("-exec", "EXEC"), ("-xrevrange -del", "DEL, XREVRANGE"), ("resetkeys ~dd:other:*", "GET, SETNX"),
    ],
)  # fmt: skip
def test_a_right_that_a_user_lacks_is_named_before_anything_starts(
    guarded: EmbeddedRedis, left_out: str, named: str
) -> None:
    admin: Any = redis.Redis(port=guarded.port, password=SECRET)
    rights = ["+@read", "+@write", "+@transaction", "+ping", "+select"]
    admin.execute_command("ACL", "SETUSER", "poor", "reset", "on", *rights, "~dd:*", *left_out.split(), ">p")
    with pytest.raises(SettingError, match=f"poor.*may not do what the run's figures need: .*{named}.*docs/redis.md"):
        check_redis(f"redis://poor:p@127.0.0.1:{guarded.port}/0", "run")
    admin.execute_command("ACL", "SETUSER", "poor", "reset", "on", *rights, "~dd:run:*", ">p")
    check_redis(f"redis://poor:p@127.0.0.1:{guarded.port}/0", "run")
    assert admin.keys("dd:run:*") == [], "looking writes nothing"
    admin.close()


def test_a_cluster_is_refused_in_one_sentence_whether_or_not_it_serves_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with EmbeddedRedis(tmp_path, options=("--cluster-enabled", "yes")) as store:
        refused = pytest.raises(SettingError, match="is a cluster, and all keys of a run must be at one server")
        with refused:
            check_redis(store.url, "run")
        client: Any = redis.Redis(port=store.port)
        client.response_callbacks.clear()
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        wait_for(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER INFO"), "it serves all keys")
        client.close()
        with refused:
            check_redis(store.url, "run")
        lines: list[dict[str, Any]] = []
        registry = Registry(store.url, "run", logger_into(lines))
        registry.publish_run(step=1)
        registry.event("joined")
        wait_for(lambda: lines, "the refusal is told")
        registry.close()
        assert "is a cluster" in lines[0]["reason"], "a store that became one while it was away"
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        for command in (["up"], ["syncer", "--own-model"]):
            assert run_command([*command, "--redis", store.url]) == 2
            assert "is a cluster" in capsys.readouterr().err
        assert list(Path().iterdir()) == [], "before anything is written"


def test_a_replica_is_refused_and_a_full_store_is_no_setting_error(pair: RegistryAndRedis) -> None:
    pair.client.config_set("maxmemory", 1)
    with pytest.raises(DilocoError, match=r"refuses: .*maxmemory") as caught:
        check_redis(pair.store.url, "run")
    assert not isinstance(caught.value, SettingError)
    pair.client.config_set("maxmemory", 0)
    pair.client.execute_command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(SettingError, match="is a replica, which takes no writes"):
        check_redis(pair.store.url, "run")
    pair.client.execute_command("REPLICAOF", "NO", "ONE")
    check_redis(pair.store.url, "run")


@pytest.mark.parametrize(
    ("limit", "policy", "warned"),
    [(10**9, "allkeys-lru", True), (10**9, "allkeys-random", True), (0, "allkeys-lru", False),
     (10**9, "volatile-ttl", False), (10**9, "noeviction", False)],
)  # fmt: skip
def test_an_eviction_policy_that_may_throw_the_run_away_is_said(
    pair: RegistryAndRedis, limit: int, policy: str, *, warned: bool
) -> None:
    pair.client.config_set("maxmemory", limit)
    pair.client.config_set("maxmemory-policy", policy)
    said = redis_advice(pair.store.url)
    assert len(said) == warned
    assert all(f"1,000,000,000 bytes (maxmemory-policy {policy})" in sentence for sentence in said)


def test_a_store_that_hides_its_settings_or_is_away_gets_no_advice(guarded: EmbeddedRedis) -> None:
    admin: Any = redis.Redis(port=guarded.port, password=SECRET)
    admin.config_set("maxmemory", 10**9)
    admin.config_set("maxmemory-policy", "allkeys-lru")
    try:
        for rights, says in (("+ping", 0), ("+info", 1), ("+config|get", 1)):
            admin.execute_command("ACL", "SETUSER", "blind", "reset", "on", rights, "~dd:*", ">p")
            assert len(redis_advice(f"redis://blind:p@127.0.0.1:{guarded.port}/0")) == says
    finally:
        admin.config_set("maxmemory", 0)
        admin.close()
    assert redis_advice("redis://127.0.0.1:1/0") == []
    assert redis_advice("redis://127.0.0.1/0?password_file=/nowhere") == []


def test_a_full_store_is_reported(pair: RegistryAndRedis) -> None:
    pair.client.config_set("maxmemory", 1)
    pair.registry.publish_run(step=1)
    wait_for(lambda: pair.logged("registry_lost"), "the refusal is told")
    assert "refuses" in pair.logged("registry_lost")[0]["reason"]
    pair.client.config_set("maxmemory", 0)
    wait_for(lambda: pair.registry.healthy, "it heals")


def test_importing_the_registry_loads_no_torch() -> None:
    code = "import sys, decoupled_diloco.common.registry; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True, timeout=60)
    assert done.stdout.strip() == b"False"
