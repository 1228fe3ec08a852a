"""What the overlays make of the project where no machine here could run it: GPUs are reserved, and torch is CUDA's."""

from __future__ import annotations

import json

import pytest
from composed import FILE, Project

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]
GPU = "compose/compose.gpu.yaml"


@pytest.mark.parametrize("base", [FILE, "compose/compose.remote.yaml"])
def test_with_the_gpu_overlay_learners_get_a_gpu_and_cuda(base: str) -> None:
    with Project(files=[base, GPU], gpus="2", broker="tcp://a:5550", key_file="/far.key") as project:
        services = json.loads(project.compose("config", "--format", "json").stdout)["services"]
    learner = services["learner"]
    (device,) = learner["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 2, ["gpu"])
    assert learner["environment"]["DILOCO_DEVICE"] == "cuda"
    assert "/cu1" in learner["build"]["args"]["TORCH_INDEX"]
    others = {name: service for name, service in services.items() if name != "learner"}
    assert "/cu1" not in json.dumps(others)


@pytest.mark.parametrize("missing", ["broker", "key_file"])
def test_learners_elsewhere_are_informed_what_they_lack(missing: str) -> None:
    given = {"broker": "tcp://a:5550", "key_file": "/far.key"}
    del given[missing]
    with Project(files=["compose/compose.remote.yaml"]) as project:
        project.environment |= {f"DILOCO_{name.upper()}": value for name, value in given.items()}
        done = project.compose("config", check=False)
        project.environment |= {"DILOCO_BROKER": "tcp://a:5550", "DILOCO_KEY_FILE": "/far.key"}
    assert done.returncode != 0
    assert f"DILOCO_{missing.upper()}" in done.stderr
