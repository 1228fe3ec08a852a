"""`diloco ping`: a message goes through the broker and back, or one sentence says why not."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from decoupled_diloco.broker.broker import Broker
from decoupled_diloco.common.auth_keys import ROLES, Key, Role, new_key
from decoupled_diloco.common.config import BrokerConfig, RunSettings
from decoupled_diloco.common.errors import PeerLost, SettingError
from decoupled_diloco.common.sockets import Address, PublishSocket
from decoupled_diloco.common.wire import Beat
from decoupled_diloco.monitor.ping import ping
from run import DILOCO
from transport import context, free_ports

BEAT = Beat(
    run="r", epoch=1, state="running", t=7, steps=9, step_seconds=0.1, versions=(), calls=(), syncer=1,
    settings=RunSettings(run="r").to_map(),
)  # fmt: skip
TIMES = r"control \d+\.\d ms, bulk \d+\.\d ms"


@contextlib.contextmanager
def broker(keys: Path | None = None) -> Iterator[str]:
    port = free_ports()
    running = Broker(BrokerConfig(port=port, keys=keys))
    running.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        running.stop()


def key_file(place: Path, role: Role, name: str = "me") -> Path:
    file = place / f"{role}.key"
    new_key(place / "keys", role=role, run="r", name=name).save(file)
    return file


@pytest.fixture
def beating() -> Iterator[Callable[..., None]]:
    """What sends beats of run r to an address, until the test ends."""
    over = threading.Event()
    threads: list[threading.Thread] = []

    def begin(address: str, key: Path | None = None) -> None:
        thread = threading.Thread(target=_beat, args=(address, key, over))
        threads.append(thread)
        thread.start()

    yield begin
    over.set()
    for thread in threads:
        thread.join()


def _beat(address: str, key: Path | None, over: threading.Event) -> None:
    with context() as made:
        held = None if key is None else Key.load(key)
        up = PublishSocket(made, Address.parse(address).control_in, hwm_messages=10, key=held)
        while not over.wait(0.05):
            up.send(BEAT)


def test_a_ping_comes_back_on_both_planes() -> None:
    with broker() as address:
        assert re.fullmatch(TIMES, ping(address))


@pytest.mark.parametrize("role", ROLES)
def test_every_key_may_ping(tmp_path: Path, role: Role) -> None:
    file = key_file(tmp_path, role)
    with broker(tmp_path / "keys") as address:
        assert re.fullmatch(TIMES, ping(address, key=file))


def test_a_beat_is_waited_for_where_one_is_wanted(tmp_path: Path, beating: Callable[..., None]) -> None:
    observer, syncer = key_file(tmp_path, "observer"), key_file(tmp_path, "syncer")
    with broker(tmp_path / "keys") as address:
        with pytest.raises(PeerLost, match=r"but no beat of run r was heard; is the syncer running\? \(waited 0.5 s\)"):
            ping(address, key=observer, wants_beat=True, timeout_seconds=0.5)
        beating(address, syncer)
        said = ping(address, key=observer, wants_beat=True, timeout_seconds=30)
        assert re.fullmatch(f"{TIMES}, run r running at step 7", said)


def test_without_a_key_the_beat_is_of_any_run_or_of_the_one_that_is_named(beating: Callable[..., None]) -> None:
    with broker() as address:
        beating(address)
        assert ping(address, wants_beat=True, timeout_seconds=30).endswith("run r running at step 7")
        assert ping(address, run="r", wants_beat=True, timeout_seconds=30).endswith("run r running at step 7")
        with pytest.raises(PeerLost, match="no beat of run other was heard"):
            ping(address, run="other", wants_beat=True, timeout_seconds=0.5)


def test_a_client_that_is_refused_or_receives_nothing_is_notified(tmp_path: Path) -> None:
    file = key_file(tmp_path, "learner")
    with broker(tmp_path / "keys") as address, pytest.raises(PeerLost, match=r"wants a key: give --key FILE"):
        ping(address, timeout_seconds=4)
    with broker() as address, pytest.raises(PeerLost, match=r"takes no keys: leave --key .*learner\.key out"):
        ping(address, key=file, timeout_seconds=4)
    with pytest.raises(PeerLost, match=r"no broker answers at tcp://127\.0\.0\.1:\d+; is it running"):
        ping(f"tcp://127.0.0.1:{free_ports()}", timeout_seconds=0.1)


def test_wrong_arguments_are_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--timeout must be greater than 0"):
        ping("tcp://127.0.0.1:1", timeout_seconds=0)
    with pytest.raises(SettingError, match="not for --run other"):
        ping("tcp://127.0.0.1:1", key=key_file(tmp_path, "learner"), run="other")


def test_the_command_is_a_health_check_it_takes_its_settings_from_the_environment(tmp_path: Path) -> None:
    file = key_file(tmp_path, "observer")
    with broker(tmp_path / "keys") as address:
        environment = {"DILOCO_BROKER": address, "DILOCO_KEY": str(file)}
        well = subprocess.run([*DILOCO, "ping"], env=environment, capture_output=True, text=True, check=False)
    assert (well.returncode, well.stderr) == (0, "")
    assert re.fullmatch(TIMES, well.stdout.strip())
    ill = subprocess.run(
        [*DILOCO, "ping", "--timeout", "0.2"], env=environment, capture_output=True, text=True, check=False
    )
    assert (ill.returncode, ill.stdout) == (3, "")
    assert re.fullmatch(r"diloco: no broker answers at .*\n", ill.stderr)


def test_a_ping_loads_neither_torch_nor_a_store() -> None:
    program = (
        "import sys; from decoupled_diloco.cli.commands import run_command; "
        "code = run_command(['ping', '--broker', 'tcp://127.0.0.1:1', '--timeout', '0.1']); "
        "print(code, [m for m in ('torch', 'numpy', 'redis', 'matplotlib', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "3 []"
