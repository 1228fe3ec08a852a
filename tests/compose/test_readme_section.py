"""The README's section about containers, pasted as it stands, beside a second project; both end by themselves."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from composed import ROOT, START_SECONDS, Project
from waiting import wait_for

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]
SECTION = (ROOT / "README.md").read_text("utf-8").partition("## With containers\n")[2].partition("\n## ")[0]
COMMANDS = [" ".join(block.split()) for block in re.findall(r"^    (.*)$", SECTION, re.MULTILINE)]
PICTURE = b"\x89PNG"


def pasted(project: Project, command: str, place: Path, seconds: float = 120) -> str:
    """What a command of the README says, run from the clone's folder by a shell; its files come into `place`."""
    done = subprocess.run(
        ["bash", "-c", command.replace("far.key", str(place / "far.key")).replace(" results", f" {place / 'results'}")],
        cwd=ROOT, env=project.environment, capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def test_every_command_of_the_section_works_while_a_run_goes_on_and_ends(build_files: list[str], place: Path) -> None:
    up, *others = COMMANDS
    assert up == "docker compose -f compose/compose.yaml up --build"
    with Project(steps="240", checkpoint_every="24") as project, Project(steps="48") as second:
        project.files += build_files
        words = shlex.split(up)[4:]
        says, beside = place / "first.txt", place / "second.txt"
        first = project.attach(*words, says=says)
        other = second.attach("up", "--no-build", says=beside)
        wait_for(lambda: min(project.versions()) > 0, "the first rounds are merged", START_SECONDS)
        for command in others:
            assert pasted(project, command, place).strip() or " cp " in command or ">" in command, command
        for child, told in ((first, says), (other, beside)):
            wait_for(lambda child=child: child.poll() is not None, "it ends by itself", 300)  # type: ignore[misc]
            assert child.returncode == 0, told.read_text()[-3000:]
        for ended in (project, second):
            codes = {row["Name"]: row["State"]["ExitCode"] for row in ended.containers()}
            assert set(codes.values()) == {0}, codes
            check_results(ended)
        assert "settings" in says.read_text()


def check_results(project: Project) -> None:
    """Model, figures, curve and picture of a finished run."""
    summary = json.loads(project.result("summary.json"))
    assert summary["state"] == "finished"
    assert summary["tokens_merged"] > 0
    assert summary["tokens_pending"] == 0
    assert len(project.result("model.safetensors")) > 10_000
    assert project.result("loss.png").startswith(PICTURE)
    rows = list(csv.DictReader(io.StringIO(project.result("metrics.csv").decode())))
    assert float(rows[-1]["val_loss"]) < float(rows[0]["val_loss"])
    assert b"merged" in project.result("logs/syncer.jsonl")
