"""Tapes: done again they give the same decisions and bits; broken, foreign or changed ones give a sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from decoupled_diloco.cli.commands import run_command
from decoupled_diloco.common.config import RunSettings, TaskSettings
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.common.journal import JournalWriter, read_journal
from decoupled_diloco.simulator.replay import Verdict, replay, replay_decisions
from decoupled_diloco.simulator.settings import ClusterPlan, FailureModel
from decoupled_diloco.simulator.virtual_run import run
from decoupled_diloco.syncer import deltas
from hostile import ALL_AT_ONCE, check_shown
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from searching import examples

TASK = TaskSettings(layers=1, width=32, sequence_length=32, batch_sequences=2)


def make(tape: Path, **changes: Any) -> dict[str, Any]:
    chosen = RunSettings(**({"steps": 16, "sync_every": 4, "fragments": 4} | changes))
    plan = ClusterPlan(learners=3, slowest=2.0, absent=0.3, absence_seconds=4)
    return run(plan, chosen, TASK, FailureModel(), tape=tape)


@pytest.fixture(scope="module")
def taped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    tape = tmp_path_factory.mktemp("taped")
    return tape, make(tape)


@pytest.fixture
def changed(taped: tuple[Path, dict[str, Any]], tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tape in which `change` was done to each row of the files whose names begin with `of`."""

    def copy(of: str, change: Callable[[dict[str, Any]], object]) -> Path:
        for path in taped[0].iterdir():
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            if path.name.startswith(of):
                for row in rows:
                    change(row)
            (tmp_path / path.name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path

    return copy


def test_a_tape_gives_the_same_decisions_and_bits(taped: tuple[Path, dict[str, Any]]) -> None:
    tape, told = taped
    verdict = replay(read_journal(tape), None)
    assert verdict.model_hash == told["model_hash"]
    assert verdict.merges == told["merges"]
    assert replay_decisions(read_journal(tape)) == Verdict(verdict.decisions, verdict.merges, 0, "", True)


def test_a_tape_of_learners_who_insisted_on_their_norms_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was refused stands on no tape, and a replay must not refuse the one who was then taken."""
    monkeypatch.setattr(deltas, "NORM_FACTOR", 1.0)
    monkeypatch.setattr(deltas, "PERSISTENT_AFTER", 2)
    refusals, is_implausible = [0], deltas.NormFilter.is_implausible

    def counted(self: deltas.NormFilter, *given: Any) -> bool:
        refused = is_implausible(self, *given)
        refusals[0] += refused
        return refused

    monkeypatch.setattr(deltas.NormFilter, "is_implausible", counted)
    told = make(tmp_path, steps=32)
    assert refusals[0] > 10
    seen = refusals[0]
    assert replay(read_journal(tmp_path), None).model_hash == told["model_hash"]
    assert refusals[0] == seen


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("tokens_to", -1), ("tokens_from", -5), ("steps_to", 1), ("base_version", 1),
    ],
)  # fmt: skip
def test_an_answer_whose_counters_were_changed_is_reported(
    changed: Callable[..., Path], what: str, change: int
) -> None:
    def other(row: dict[str, Any]) -> None:
        if row["what"] == "answer" and not row["refused"]:
            row[what] += change

    with pytest.raises(SettingError, match=rf"syncer-1\.jsonl, line \d+: .*{what}|decision|other"):
        replay(read_journal(changed("syncer", other)), None)


def test_a_good_merge_that_is_said_to_have_failed_is_reported(changed: Callable[..., Path]) -> None:
    place, said = changed("syncer", lambda _: None), []
    path = place / "syncer-1.jsonl"
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["what"] == "merged":
            said.append(json.dumps({"what": "failed", "at": 1e9, "slot": row["slot"]}))
            break
        said.append(line)
    path.write_text("\n".join(said) + "\n")
    with pytest.raises(SettingError, match="a merge that failed there succeeds here"):
        replay(read_journal(place), None)


@pytest.mark.parametrize(
    "changes",
    [
        {"adopt": "rebase"}, {"adopt": "mix"}, {"codec_up": "f32", "codec_down": "f32"}, {"codec_up": "int8"},
        {"outer_momentum": 0.9, "outer_lr": 0.5}, {"quorum": 2, "grace_seconds": 0.0},
    ],
    ids=str,
)  # fmt: skip
def test_every_kind_of_run_gives_the_same_bits_again(tmp_path: Path, changes: dict[str, Any]) -> None:
    told = make(tmp_path, **changes)
    assert replay(read_journal(tmp_path), None).model_hash == told["model_hash"]


def test_another_decision_is_named_by_its_line(changed: Callable[..., Path]) -> None:
    def other(row: dict[str, Any]) -> None:
        if row["what"] == "alive" and row["tokens"] > 100:
            row["step_seconds"] *= 3

    with pytest.raises(SettingError, match=r"syncer-1\.jsonl, line \d+: .* differ"):
        replay_decisions(read_journal(changed("syncer", other)))


def test_other_bits_are_named_by_their_version(changed: Callable[..., Path]) -> None:
    def other(row: dict[str, Any]) -> None:
        if row["what"] == "boundary" and "progress" in row and row["steps"] > 2:
            row["progress"] += 1.0

    tape = read_journal(changed("learner-1", other))
    replay_decisions(tape)
    with pytest.raises(SettingError, match=r"version \d+ of fragment \d+ has other bits here"):
        replay(tape, None)


def test_an_adoption_of_what_was_not_made_yet_is_an_error(changed: Callable[..., Path]) -> None:
    def other(row: dict[str, Any]) -> None:
        for adopted in row.get("adopted", ()):
            adopted[2] += 1000

    with pytest.raises(SettingError, match="was not made by then"):
        replay(read_journal(changed("learner", other)), None)


def test_a_learner_s_file_that_is_not_there_is_asked_for(changed: Callable[..., Path]) -> None:
    place = changed("none", lambda row: row)
    for path in place.glob("learner-1-*.jsonl"):
        path.unlink()
    with pytest.raises(SettingError, match=r"no file learner-1-\d+\.jsonl"):
        replay(read_journal(place), None)


def test_a_tape_of_another_model_or_text_is_refused(changed: Callable[..., Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("something else " * 1000)
    place = changed("syncer", lambda row: row.update(plan_digest="0" * 64) if row["what"] == "tape" else None)
    with pytest.raises(SettingError, match="another model"):
        replay(read_journal(place), None)
    with pytest.raises(SettingError, match="on another text"):
        replay(read_journal(place), text)


def test_a_tape_whose_writer_was_killed_is_read_up_to_its_last_whole_line(changed: Callable[..., Path]) -> None:
    place = changed("none", lambda row: row)
    syncer = place / "syncer-1.jsonl"
    octets = syncer.read_bytes()
    syncer.write_bytes(octets[: len(octets) * 2 // 3])
    verdict = replay(read_journal(place), None)
    assert verdict.merges
    assert not verdict.model_hash
    assert not verdict.complete


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no syncer's tape"),
        ("no json\n", "line 1: not an event"),
        ('{"what": "tape", "version": 1, "of": "syncer"}\n', "has no 'epoch'"),
        (
            '{"what": "tape", "version": 99, "of": "syncer", "epoch": 1}\n',
            "a tape of version 99, but this program reads version 1",
        ),
        ('["what"]\n', "line 1: not an event"),
    ],
)
def test_what_is_no_tape_is_one_sentence(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "syncer-1.jsonl").write_text(content)
    with pytest.raises(SettingError, match=said):
        replay_decisions(read_journal(tmp_path))


def test_what_is_no_file_is_no_tape(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "syncer-1.jsonl")
    with pytest.raises(SettingError, match="holds no syncer's tape"):
        read_journal(tmp_path)


def test_rows_that_make_no_sense_are_named(changed: Callable[..., Path]) -> None:
    def other(row: dict[str, Any]) -> None:
        if row["what"] == "answer":
            row["tokens_to"] = "many"

    with pytest.raises(SettingError, match=r"line \d+: the event cannot be replayed"):
        replay_decisions(read_journal(changed("syncer", other)))


def test_no_tape_at_all(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="not a folder with a tape"):
        read_journal(tmp_path / "nowhere")
    with pytest.raises(SettingError, match="holds no syncer's tape"):
        read_journal(tmp_path)


def test_a_tape_is_not_written_over(tmp_path: Path) -> None:
    JournalWriter(tmp_path, "syncer-1", of="syncer").close()
    with pytest.raises(SettingError, match="is never overwritten"):
        JournalWriter(tmp_path, "syncer-1", of="syncer")


# --- anything at all -------------------------------------------------------------------------------------------------
VALUES: list[Any] = [None, -1, 10**30, "x", "\ud800", ALL_AT_ONCE, [], {}, [[1]], float("nan"), True]


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_tape_with_any_field_changed_is_the_same_or_one_sentence(
    taped: tuple[Path, dict[str, Any]], tmp_path: Path, data: st.DataObject
) -> None:
    paths = sorted(taped[0].iterdir())
    chosen = data.draw(st.sampled_from(paths))
    rows = [json.loads(line) for line in chosen.read_text().splitlines()]
    row = rows[data.draw(st.integers(0, min(len(rows), 60) - 1))]
    field = data.draw(st.sampled_from(sorted(row)))
    if data.draw(st.booleans()):
        del row[field]
    else:
        row[field] = data.draw(st.sampled_from(VALUES))
    for path in paths:
        lines = [json.dumps(r) for r in rows] if path == chosen else path.read_text().splitlines()
        (tmp_path / path.name).write_text("".join(line + "\n" for line in lines))
    for again in (replay_decisions, lambda tape: replay(tape, None)):
        said = ""
        try:
            again(read_journal(tmp_path))
        except SettingError as wrong:
            said = str(wrong)
        assert said.isprintable()


def test_hostile_text_in_any_field_of_a_tape_gives_a_sentence_that_can_be_printed(
    taped: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {path.name: path.read_text() for path in sorted(taped[0].iterdir())}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    refused = 0
    for name, text in texts.items():
        rows = [json.loads(line) for line in text.splitlines()]
        first = {row["what"]: number for number, row in reversed(list(enumerate(rows)))}
        for at, field in [(number, key) for number in first.values() for key in rows[number]]:
            spoilt = [*rows[:at], rows[at] | {field: ALL_AT_ONCE}, *rows[at + 1 :]]
            (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in spoilt))
            refused += run_command(["replay", "--decisions", str(tmp_path)]) == 2
            out, err = capsys.readouterr()
            check_shown(out + err)
        (tmp_path / name).write_text(text)
    assert refused > 20
