"""The README's section about containers, pasted as it stands, beside a second project; both end by themselves."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from composed import FILE, ROOT, START_SECONDS, Project
from waiting import wait_for

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]
SECTION = (ROOT / "README.md").read_text("utf-8").partition("## With containers\n")[2].partition("\n## ")[0]
COMMANDS = re.findall(r"^    (.*)$", SECTION, re.MULTILINE)
LEARNERS = 5
"""Two at first, two more, and one from this machine."""


class Terminal:
    """A shell in the folder of the clone; its files come into a folder of the test."""

    def __init__(self, project: Project, place: Path) -> None:
        self.place = place
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = project.environment | {"PATH": path}
        self._port = project.port

    def paste(self, command: str) -> subprocess.Popen[str]:
        for before, after in (("far.key", self.place / "far.key"), (" results", f" {self.place / 'results'}")):
            command = command.replace(before, str(after))
        command = command.replace(":5550", f":{self._port}")
        return subprocess.Popen(
            ["script", "-qefc", command, "/dev/null"], cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, command: str) -> str:
        """What it says; AssertionError if it fails."""
        child = self.paste(command)
        said, _ = child.communicate(timeout=150)
        assert child.returncode == 0, f"{command}: {said[-3000:]}"
        return said


def test_the_section_pasted_line_by_line_works_beside_a_second_project(build_files: list[str], place: Path) -> None:
    up, look, status, scale, key, join, copy, down = COMMANDS
    assert up == "docker compose -f compose/compose.yaml up --build"
    # Below the quorum nothing is merged: the run cannot end before everybody has come, however slow this machine is.
    results, text = place / "second", place / "text.txt"
    results.mkdir()
    results.chmod(0o777)
    text.write_text(SECTION * 100)
    files = [FILE, "compose/compose.text.yaml"]
    with (
        Project(steps="96", quorum=str(LEARNERS)) as project,
        Project(files=files, text=str(text), results=str(results), steps="48") as second,
    ):
        project.files += build_files
        terminal = Terminal(project, place)
        first = project.attach(*shlex.split(up)[4:], says=place / "first.txt")
        other = second.attach("up", "--no-build", says=place / "second.txt")
        wait_for(lambda: len(project.learners()) == 2, "both learners are here", START_SECONDS)
        assert "quorum_state" in terminal.run(look)
        # "quorum: 2 of 5", and once the run is called blocked: "2 of the 5 learners that --quorum asks for can answer".
        wait_for(lambda: re.search(r"2 of (the )?5", terminal.run(status)), "both may answer", START_SECONDS)
        terminal.run(scale)
        terminal.run(key)
        with terminal.paste(join) as far:
            said, _ = far.communicate(timeout=300)
            assert far.returncode == 0, said[-3000:]
        for child, words in ((first, "first.txt"), (other, "second.txt")):
            wait_for(lambda child=child: child.poll() is not None, "it ends by itself", 300)  # type: ignore[misc]
            assert child.returncode == 0, (place / words).read_text()[-3000:]
        secret = json.loads((place / "far.key").read_text())["secret"]
        assert secret not in (place / "first.txt").read_text(), "the attached `up` shows what `run keys` prints"
        for ended in (project, second):
            codes = {row["Name"]: row["State"]["ExitCode"] for row in ended.containers()}
            assert set(codes.values()) == {0}, codes
        assert len(json.loads(project.result("summary.json"))["learners"]) == LEARNERS
        check_results(results / "run")
        assert json.loads((results / "run" / "text.json").read_text())["source"] == "/text"
        terminal.run(copy)
        check_results(place / "results")
        terminal.run(down)
        assert project.containers() == []


def check_results(folder: Path) -> None:
    """Model, figures, curve and picture of a finished run."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["state"] == "finished"
    assert summary["tokens_merged"] > 0
    assert summary["tokens_pending"] == 0
    assert (folder / "model.safetensors").stat().st_size > 10_000
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(io.StringIO((folder / "metrics.csv").read_text())))
    assert float(rows[-1]["val_loss"]) < float(rows[0]["val_loss"])
    assert '"merged"' in (folder / "logs" / "syncer.jsonl").read_text()
