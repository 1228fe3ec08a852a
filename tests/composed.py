"""Projects of containers for tests, on the real engine: a name and ports of their own, and nothing left afterwards."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from transport import free_ports
from waiting import wait_for

ROOT = Path(__file__).parents[1]
FILE = "compose/compose.yaml"
SMALL = {
    "DILOCO_LAYERS": "1", "DILOCO_WIDTH": "32", "DILOCO_SEQUENCE_LENGTH": "32", "DILOCO_BATCH_SEQUENCES": "4",
    "DILOCO_SYNC_EVERY": "12", "DILOCO_FRAGMENTS": "6",
}  # fmt: skip
FRAGMENTS = 6
FOR_EVER = "10000000"
BUILT = ("keys", "broker", "syncer", "learner", "evaluator")
IMAGES = "diloco-tests"
"""The project whose images are built once and serve all others."""
START_SECONDS = 240.0


def no_engine() -> str:
    """Why containers cannot be tested here; '' if they can."""
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired) as wrong:
            return f"no Docker Engine with Compose v2 is here: {wrong}"
        if done.returncode:
            return f"no Docker Engine with Compose v2 is here: {done.stderr.strip()[-200:]}"
    return ""


def build_images(place: Path, context: Path = ROOT) -> list[str]:
    """Build what compose.yaml needs under the project IMAGES; compose files that a build needs here beside it."""
    command = ["docker", "compose", "-p", IMAGES, "-f", FILE]
    done = subprocess.run([*command, "build"], cwd=context, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return []
    more = place / "host-network.yaml"  # where a build has no network of its own, packages come by this machine's
    more.write_text(json.dumps({"services": {name: {"build": {"network": "host"}} for name in BUILT}}))
    command += ["-f", str(more)]
    done = subprocess.run([*command, "build"], cwd=context, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [str(more)]


class Project:
    """One project. Use as a context manager: afterwards its containers, volumes, networks and image names are gone."""

    def __init__(self, *, small: bool = True, files: Sequence[str] = (FILE,), **variables: str) -> None:
        """`variables` as in `steps="48"`: DILOCO_STEPS."""
        self.name = f"diloco-test-{secrets.token_hex(3)}"
        self.port = free_ports()
        self.files = list(files)
        given = {f"DILOCO_{name.upper()}": value for name, value in variables.items()}
        ports = {"DILOCO_PORTS": f"{self.port}-{self.port + 3}"}
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("DILOCO_", "COMPOSE_"))}
        self.environment = clean | (SMALL if small else {}) | ports | given | {"COMPOSE_PROJECT_NAME": self.name}
        self._attached: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        for service in BUILT:
            run("docker", "tag", f"{IMAGES}-{service}", f"{self.name}-{service}")
        if "compose/compose.remote.yaml" in self.files:
            run("docker", "tag", f"{IMAGES}-broker", f"{self.name}-key")
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._attached:
            if child.poll() is None:
                child.kill()
            child.wait()
        self.compose("down", "--volumes", "--timeout", "2", "--remove-orphans")
        names = [f"{self.name}-{service}" for service in BUILT]
        if "compose/compose.remote.yaml" in self.files:
            names.append(f"{self.name}-key")
        run("docker", "rmi", *names)

    # --- hands -------------------------------------------------------------------------------------------------------
    def command(self, *words: str) -> list[str]:
        files = [word for file in self.files for word in ("-f", file)]
        return ["docker", "compose", *files, *words]

    def compose(self, *words: str, check: bool = True, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        """One command of compose, waited for."""
        done = subprocess.run(
            self.command(*words), cwd=ROOT, env=self.environment, capture_output=True, text=True,
            timeout=seconds, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done

    def attach(self, *words: str, says: Path) -> subprocess.Popen[bytes]:
        """A command of compose that goes on, such as `up`; what it says is in the file `says`."""
        with says.open("wb") as file:
            child = subprocess.Popen(
                self.command(*words), cwd=ROOT, env=self.environment, stdout=file, stderr=subprocess.STDOUT
            )
        self._attached.append(child)
        return child

    def up(self, *words: str) -> None:
        self.compose("up", "-d", "--no-build", *words)

    def kill(self, container: str) -> None:
        """kill -9 of what runs in a container, as a crash would: the engine is not told."""
        run("docker", "exec", container, "sh", "-c", "kill -9 -1", check=False)

    # --- eyes --------------------------------------------------------------------------------------------------------
    def containers(self, service: str = "") -> list[dict[str, Any]]:
        """What the engine knows of them, those that ended included, by number."""
        label = ["--filter", f"label=com.docker.compose.service={service}"] if service else []
        listed = ["docker", "ps", "-aq", "--filter", f"label=com.docker.compose.project={self.name}", *label]
        ids = run(*listed).split()
        found: list[dict[str, Any]] = json.loads(run("docker", "inspect", *ids)) if ids else []
        return sorted(found, key=lambda row: str(row["Name"]))

    def state(self, service: str) -> dict[str, Any]:
        (row,) = self.containers(service)
        state: dict[str, Any] = row["State"]
        return state

    def redis(self, *words: str) -> list[str]:
        """What redis-cli answers, line by line; nothing while redis is away."""
        done = self.compose("exec", "-T", "redis", "/keys/redis/cli", *words, check=False)
        rows = done.stdout.splitlines() if done.returncode == 0 else []
        return [] if rows == [""] else rows  # so it writes an empty list

    def hash(self, key: str) -> dict[str, str]:
        rows = self.redis("HGETALL", key)
        return dict(zip(rows[::2], rows[1::2], strict=True))

    def versions(self, run_name: str = "run") -> list[int]:
        """The newest version of each fragment; -1 where it is not there."""
        rows = (self.redis("HGET", f"dd:{run_name}:fragment:{p}", "version") for p in range(FRAGMENTS))
        return [int(row[0]) if row and row[0] else -1 for row in rows]

    def learners(self, run_name: str = "run", state: str = "live") -> set[str]:
        """The names of those in a state."""
        names = self.redis("ZRANGE", f"dd:{run_name}:learners", "0", "-1")
        return {name for name in names if self.hash(f"dd:{run_name}:learner:{name}").get("state") == state}

    def wait_for_merges(self, more: int = 1) -> list[int]:
        """Until every fragment has been merged so many times from now on: the versions."""
        wait_for(lambda: min(self.versions()) >= 0, "versions are shown", START_SECONDS)
        goals = [version + more for version in self.versions()]
        wait_for(
            lambda: all(now >= goal for now, goal in zip(self.versions(), goals, strict=True)),
            f"{self.name}: every fragment is merged {more} times more",
            START_SECONDS,
        )
        return goals

    def result(self, name: str, run_name: str = "run") -> bytes:
        """A file of the results; they stay readable when all has ended."""
        done = subprocess.run(
            self.command("cp", f"syncer:/results/{run_name}/{name}", "-"), cwd=ROOT, env=self.environment,
            capture_output=True, check=True,
        )  # fmt: skip
        return _only_member(done.stdout)


def _only_member(archive: bytes) -> bytes:
    import io
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        (member,) = files.getmembers()
        file = files.extractfile(member)
        assert file is not None
        return file.read()


def run(*command: str, check: bool = True, seconds: float = 120) -> str:
    """What a command says; AssertionError with its last words if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert not check or done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    return done.stdout
