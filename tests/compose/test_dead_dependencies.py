"""What another one needs and what is dead is an error at once, which names it; nobody waits for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
from composed import FILE, Project

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]


def dead(service: str, place: Path) -> str:
    """A compose file by which a service ends at once."""
    file = place / "dead.yaml"
    file.write_text(f"services:\n  {service}:\n    entrypoint: [sh, -c, 'echo I am dead; exit 3']\n")
    return str(file)


@pytest.mark.parametrize("service", ["keys", "redis", "broker", "syncer"])
def test_up_ends_with_an_error_that_names_who_is_dead(service: str, place: Path) -> None:
    with Project(files=[FILE, dead(service, place)]) as project:
        done = project.compose("up", "--no-build", check=False, seconds=240)
        assert done.returncode != 0
        last = done.stderr.strip().splitlines()[-1]
        assert f"{project.name}-{service}-1" in last or f'"{service}" didn\'t complete' in last, last
        assert project.containers("learner") == [] or not any(
            row["State"]["Running"] for row in project.containers("learner")
        )


def test_a_wrong_setting_ends_up_with_an_error_that_names_its_variable() -> None:
    with Project(quorum="0") as project:
        done = project.compose("up", "--no-build", check=False, seconds=240)
        assert done.returncode != 0
        assert "DILOCO_QUORUM" in done.stdout + done.stderr
