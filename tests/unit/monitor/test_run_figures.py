"""Run figures, and how they are displayed."""

from __future__ import annotations

import fcntl
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from decoupled_diloco.common.config import RunSettings, TaskSettings
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.common.run_folder import RunFolder, Setup, find_run
from decoupled_diloco.compose.final_report import show_summary, show_unconfirmed
from decoupled_diloco.monitor.console import PlainConsole
from decoupled_diloco.monitor.run_figures import run_figures, validation
from decoupled_diloco.monitor.status import RunSource, RunStatus
from decoupled_diloco.monitor.watch import dashboard, duration, line, open_display, size, table
from rich.console import RenderableType


def learner(name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "local_steps": 50, "tokens_reported": 500, "tokens_merged": 400, "inner_seconds": 90.0,
        "session_seconds": 1.0, "since_first_step_seconds": 100.0, "bytes_up": 10, "bytes_down": 20, **more,
    }  # fmt: skip


def test_goodput_counts_only_the_learners_that_were_asked_for() -> None:
    summary = {"seconds": 100.0, "t": 50, "learners": [learner("learner-1"), learner("guest")]}
    told = run_figures(summary, requested=["learner-1", "learner-2"], faults=1, evaluations=[])
    assert told["goodput"] == 0.45, "one of two worked for 90 of 100 seconds"
    assert told["bytes_up"] == 20
    assert told["faults"] == 1


def test_lives_of_one_learner_are_reported_together() -> None:
    summary = {"seconds": 100.0, "learners": [learner("a"), learner("a", session_seconds=3.0)]}
    (row,) = run_figures(summary, requested=["a"], faults=0, evaluations=[])["learners"]
    assert row == {"name": "a", "local_steps": 100, "tokens_reported": 1000, "tokens_merged": 800, "stall_share": 0.02}


def test_what_is_not_known_is_none_and_never_a_division_by_zero() -> None:
    told = run_figures({}, requested=[], faults=0, evaluations=[])
    assert told["goodput"] is None
    assert told["stall_share"] is None
    assert told["bytes_up"] is None
    assert told["val_loss_first"] is None
    assert told["learners"] == []


def evaluation(t: int, size: str, loss: float, part: str = "B") -> dict[str, Any]:
    return {"t": t, "size": size, "val_loss": loss, "part": part}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], (None, None)),
        ([evaluation(0, "full", 5.5)], (5.5, 5.5)),
        ([evaluation(0, "full", 5.5), evaluation(9, "small", 3.0)], (5.5, 3.0)),
        ([evaluation(0, "full", 5.5), evaluation(9, "full", 2.0), evaluation(9, "full", 1.9, "A")], (5.5, 2.0)),
        ([evaluation(9, "small", 3.0)], (None, 3.0)),
    ],
)
def test_validation_loss_is_the_full_one_on_the_reported_part_as_soon_as_there_is_one(
    rows: list[dict[str, Any]], expected: tuple[float | None, float | None]
) -> None:
    assert validation(rows) == expected


def test_a_run_that_starts_and_one_that_trains_fit_on_a_line() -> None:
    assert line(RunStatus(run="it", state="starting")) == "it is starting"
    now = RunStatus(run="it", state="running", t=5, steps=10, tokens_per_second=1234.5, seconds_left=75,
              learners=[learner("a", state="live")], summary={"bytes_up": 1_500_000, "bytes_down": 0},
              evaluations=[evaluation(3, "small", 2.5)])  # fmt: skip
    assert line(now) == (
        "it running step 5/10, loss 2.500 nats/byte, 1,234 tokens/s, 1 live, up 1.5 MB down 0 B, 1:15 left"
    )


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_a_run_that_is_over_has_no_time_left(state: str) -> None:
    assert "left" not in line(RunStatus(run="it", state=state, t=5, steps=10, seconds_left=75))


@pytest.mark.parametrize("terminal", [True, False])
def test_a_display_shows_the_run_and_what_happens_to_it(*, terminal: bool) -> None:
    console = PlainConsole(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
    display = open_display(console)
    now = RunStatus(run="it", state="running", t=5, steps=10, learners=[learner("a", state="live", loss=2.5)])
    display.show(now)
    display.note("a died and starts again")
    display.close()
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "it" in shown
    assert "5/10" in shown
    assert "a died and starts again" in shown


def drawn(what: RenderableType) -> list[str]:
    console = PlainConsole(file=io.StringIO(), width=80, color_system=None)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_picture_fits_into_eighty_columns() -> None:
    rows = [learner(f"learner-{n}", state="live", loss=2.5, step_seconds=0.5, tokens_merged=10**8) for n in range(3)]
    now = RunStatus(run="run-20260131-120000", state="running", t=50_000, steps=100_000, learners=rows, faults=12,
              tokens_per_second=123_456.0, seconds_left=40_000, summary={"merges": 123_456, "bytes_up": 10**9},
              evaluations=[evaluation(3, "small", 2.5)])  # fmt: skip
    shown = drawn(dashboard(now))
    assert len(shown) == 7, "bar, figures, heading, three learners and their sum"
    figures = ["validation loss 2.500 nats/byte", "tokens/s 123,456", "merges 123,456", "faults 12"]
    assert shown[1].rstrip() == "   ".join(figures)
    assert shown[-1].split() == ["all", "-", "1.0", "GB", "-"]


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"saved_at": -90, "save_error": "OSError: No space left"}, "last checkpoint 90 s ago, failing: OSError: No"),
        ({"saved_at": None, "save_error": "OSError: No space left"}, "no checkpoint yet, failing: OSError: No space"),
        ({"saved_at": None, "save_error": "\x1b[2J"}, r"no checkpoint yet, failing: \x1b[2J"),
    ],
)
def test_checkpoints_that_fail_are_said_wherever_a_run_is_shown(saved: dict[str, Any], said: str) -> None:
    if saved["saved_at"] is not None:
        saved = {**saved, "saved_at": time.time() + saved["saved_at"]}
    now = RunStatus(run="it", state="running", t=5, steps=10, summary=saved)
    assert said in line(now)
    assert any(row.startswith(said) for row in drawn(dashboard(now)))
    assert sum(said in row for row in drawn(table(now))) == 1
    assert now.figures()["saved_at"] == saved["saved_at"]
    assert now.figures()["save_error"] == saved["save_error"]


def test_checkpoints_that_succeed_are_a_row_of_the_status_and_no_trouble() -> None:
    now = RunStatus(run="it", state="running", t=5, steps=10, summary={"saved_at": time.time() - 7, "save_error": ""})
    assert "checkpoint" not in line(now)
    assert not any("checkpoint" in row for row in drawn(dashboard(now)))
    assert [row.split() for row in drawn(table(now)) if "checkpoint" in row] == [
        ["saved", "last", "checkpoint", "7", "s", "ago"]
    ]


def test_figures_that_are_not_known_are_left_out() -> None:
    told = run_figures({"run": "it"}, requested=[], faults=0, evaluations=[])
    console = PlainConsole(file=io.StringIO(), width=80)
    show_summary(told, console)
    assert isinstance(console.file, io.StringIO)
    assert [line.split() for line in console.file.getvalue().splitlines()] == [["run", "it"], ["faults", "0"]]


def test_the_results_name_the_learners_that_never_confirmed_the_final_model(tmp_path: Path) -> None:
    console = PlainConsole(file=io.StringIO(), width=80)
    summaries: tuple[Any, ...] = ({}, [], {"b": "no goodbye", "c": "failed"})
    for unconfirmed in summaries:
        (tmp_path / "summary.json").write_text(json.dumps({"unconfirmed": unconfirmed}))
        show_unconfirmed(RunFolder(tmp_path), console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "final model not confirmed by: b (no goodbye), c (failed)\n"


def test_sizes_and_durations_are_short() -> None:
    assert [size(n) for n in (None, 0, 999, 1000, 2.5e9)] == ["-", "0 B", "999 B", "1.0 kB", "2.5 GB"]
    assert [duration(s) for s in (None, 0, 61, 3661)] == ["-:--", "0:00", "1:01", "1:01:01"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    return RunFolder.create(Path("runs/it"), Setup(settings=RunSettings(run="it"), task=TaskSettings(), data_hash="x"))


def test_a_folder_gives_back_what_was_put_into_it(folder: RunFolder) -> None:
    assert find_run("it").setup() == folder.setup() == find_run("runs/it").setup()
    assert folder.setup().settings == RunSettings(run="it")
    assert folder.evaluations() == []
    assert folder.name == "runs/it"
    with pytest.raises(SettingError, match="there are it"):
        find_run("other")


def test_half_a_line_of_evaluations_is_not_read(folder: RunFolder) -> None:
    whole = json.dumps(evaluation(0, "full", 5.5))
    (folder.path / "evaluations.jsonl").write_text(f"{whole}\n{whole[:20]}")
    assert folder.evaluations() == [evaluation(0, "full", 5.5)]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"run": {"steps": "many"}, "data_hash": ""}', "\x00"])
def test_settings_that_somebody_spoilt_are_an_error_that_names_the_file(folder: RunFolder, content: str) -> None:
    (folder.path / "settings.json").write_text(content)
    with pytest.raises(SettingError, match=r"settings\.json"):
        folder.setup()


def test_a_run_that_is_over_is_read_from_its_folder(folder: RunFolder) -> None:
    (folder.path / "summary.json").write_text(
        json.dumps({"state": "finished", "t": 10, "steps": 10, "learners": [learner("a")]})
    )
    now = RunSource("it", "redis://127.0.0.1:1/0", folder).read()
    assert (now.state, now.t, now.steps) == ("finished", 10, 10)
    assert now.figures()["learners"][0]["name"] == "a"


def save_at_step(folder: RunFolder, t: int) -> None:
    """A checkpoint, as far as displays read it."""
    (folder.path / "global" / "checkpoint-000000000003").mkdir(parents=True)
    state = {"bookkeeping": {"rounds": {"t": t}}}
    (folder.path / "global" / "checkpoint-000000000003" / "state.json").write_text(json.dumps(state))


def test_a_run_that_ended_without_a_last_word_is_where_its_checkpoint_is(folder: RunFolder) -> None:
    assert RunSource("it", "", folder).read().t == 0
    save_at_step(folder, 70)
    (folder.path / "global" / "checkpoint-000000000004").mkdir()
    now = RunSource("it", "", folder).read()
    assert (now.state, now.t) == ("stopped", 70)
    assert "diloco up --resume runs/it" in now.trouble
    assert "merges -" in " ".join(" ".join(drawn(dashboard(now))).split())


def test_a_run_whose_syncer_was_started_by_itself_is_not_called_stopped(folder: RunFolder) -> None:
    save_at_step(folder, 70)
    (folder.path / "summary.json").write_text(json.dumps({"state": "stopped", "t": 50, "merges": 3}))
    with (folder.path / "global" / "lock").open("w") as lock:
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        assert RunSource("it", "", folder).read().state == "stopped", "the process is one, but it holds nothing"
        fcntl.flock(lock, fcntl.LOCK_EX)
        now = RunSource("it", "", folder).read()
    assert (now.state, now.t) == ("running", 70)
    assert "--redis" in now.trouble


def test_the_pace_after_a_resume_is_not_a_leap_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = [{"state": "waiting", "step": 0, "steps_total": 1000}]
    for n in range(3):
        whole = {"tokens_reported": 1000 * (500 + n), "seconds": 1000.0 + 2 * n}
        rows.append({"state": "running", "step": 500 + n, "steps_total": 1000, **whole})
    stored, clock = iter(rows), iter([0.0, 2.0, 4.0])
    empty: dict[str, Any] = {"learners": {}, "fragments": {}, "events": [], "notes": []}
    monkeypatch.setattr("decoupled_diloco.monitor.status.read_status", lambda *_: {"run": next(stored), **empty})
    monkeypatch.setattr("decoupled_diloco.monitor.status.time.monotonic", lambda: next(clock))
    source = RunSource("it", "redis://here", None)
    paces = [(now.tokens_per_second, now.seconds_left) for now in [source.read() for _ in rows]]
    assert paces == [(None, None), (500.0, 1000.0), (500.0, 998.0), (500.0, 996.0)]


def test_a_run_whose_store_is_away_is_shown_as_it_was(folder: RunFolder) -> None:
    lock = folder.lock()
    assert lock is not None
    with lock:
        now = RunSource("it", "redis://127.0.0.1:1/0", folder).read()
    assert now.state == "starting"
    assert "127.0.0.1:1" in now.trouble
    assert now.figures()["trouble"] == now.trouble
