"""Containers on the real engine, whatever engine is here. Images are built once; without an engine all is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
from composed import build_images, no_engine


@pytest.fixture(scope="session")
def build_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The images are built; compose files that a build needs on this machine."""
    if reason := no_engine():
        pytest.skip(reason)
    return build_images(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="session", autouse=True)
def images(build_files: list[str]) -> None:
    """Nothing of compose is tried before its images are there."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder that containers' users can enter."""
    tmp_path.chmod(0o755)
    return tmp_path
