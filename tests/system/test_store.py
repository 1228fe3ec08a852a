from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from decoupled_diloco.common.errors import DilocoError, SettingError
from decoupled_diloco.compose import embedded_redis as store_module
from decoupled_diloco.compose.embedded_redis import EmbeddedRedis, find_server
from waiting import wait_for

HOLDER = """
import sys, pathlib
from decoupled_diloco.compose.embedded_redis import EmbeddedRedis
store = EmbeddedRedis(pathlib.Path(sys.argv[1]))
store.start()
print(store.pid, store.port, flush=True)
sys.stdin.read()
"""


def alive(pid: int) -> bool:
    """A process that nobody has collected yet is dead all the same."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_it_answers_when_start_returns_and_keeps_nothing_on_disk(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "Prüfung mit Blank 🙂") as store:
        client = redis.Redis.from_url(store.url)
        client.set("key", "value")
        assert client.info("server")["process_id"] == store.pid
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("bind") == {"bind": "127.0.0.1"}
        client.close()
    assert not store.running
    assert [file.name for file in store.directory.iterdir()] == ["store.log"]


def test_it_can_be_stopped_and_started_again_at_the_same_port(tmp_path: Path) -> None:
    store = EmbeddedRedis(tmp_path)
    store.start()
    url = store.url
    with pytest.raises(DilocoError, match="already running"):
        store.start()
    store.stop()
    store.start()
    assert store.url == url
    store.stop()
    store.stop()


def test_a_frozen_store_can_be_stopped(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as store:
        os.kill(store.pid, signal.SIGSTOP)
        pid = store.pid
    assert not alive(pid)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        store = EmbeddedRedis(tmp_path, port=port)
        with pytest.raises(SettingError, match=f"127.0.0.1:{port} .the port is taken"):
            store.start()
    assert not store.running


def test_a_free_port_that_another_process_takes_first_is_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = store_module._free_port
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = iter([other.getsockname()[1]])
        monkeypatch.setattr(store_module, "_free_port", lambda: next(ports, None) or real())
        with EmbeddedRedis(tmp_path) as store:
            assert store.running


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
@pytest.mark.parametrize("frozen", [False, True])
def test_it_dies_with_a_parent_that_is_killed_even_while_frozen(tmp_path: Path, frozen: bool) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder.stdin, holder.stdout:
        pid = int(holder.stdout.readline().split()[0])
        assert alive(pid)
        if frozen:
            os.kill(pid, signal.SIGSTOP)
        holder.kill()
        holder.wait()
    wait_for(lambda: not alive(pid), "the store of a killed parent is gone")


def test_ctrl_c_at_the_terminal_does_not_reach_it(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as store:
        assert os.getpgid(store.pid) != os.getpgid(0)


def test_a_locale_that_is_not_installed_does_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "xx_YY.UTF-8")
    with EmbeddedRedis(tmp_path) as store:
        assert store.running


def test_a_server_on_path_comes_first_then_the_packaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    packaged = find_server()
    assert packaged.name == "valkey-server"
    for name in ("valkey-server", "redis-server"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
        assert find_server() == tmp_path / name
    with pytest.raises(SettingError, match=r"did not start on .*store\.log"):
        EmbeddedRedis(tmp_path / "run").start()


def test_without_any_server_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(store_module, "find_spec", lambda _: None)
    with pytest.raises(SettingError, match="--redis URL"):
        find_server()
