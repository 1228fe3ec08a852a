"""Text from outside on terminals and in sentences: as it is, and nothing more."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from decoupled_diloco.cli import commands
from decoupled_diloco.common import errors
from decoupled_diloco.common.config import RunSettings, TaskSettings
from decoupled_diloco.common.errors import DilocoError, Malformed, SettingError
from decoupled_diloco.common.log import get_logger
from decoupled_diloco.common.output import echo
from decoupled_diloco.common.printable import json_line, printable, printable_lines
from decoupled_diloco.common.registry import Registry
from decoupled_diloco.common.run_folder import RunFolder, Setup
from decoupled_diloco.compose.embedded_redis import EmbeddedRedis
from decoupled_diloco.compose.final_report import figures, show_summary, show_unconfirmed
from decoupled_diloco.monitor.console import PlainConsole
from decoupled_diloco.monitor.status import RunSource, RunStatus, find_source
from decoupled_diloco.monitor.watch import dashboard, line, open_display, table
from hostile import ALL_AT_ONCE, HOSTILE, check_shown
from hypothesis import given
from hypothesis import strategies as st
from logged import logged
from rich.console import RenderableType
from rich.text import Text

ROOT = Path(__file__).parents[3]
ANY_TEXT = st.text(st.characters() | st.characters(categories=["Cs", "Cc", "Cf"]))


# --- the one place ---------------------------------------------------------------------------------------------------
@given(ANY_TEXT)
def test_any_text_can_be_printed_and_printable_text_stays_as_it_is(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    shown.encode("utf-8")
    assert printable(shown) == shown
    assert (shown == text) == text.isprintable()
    lines = printable_lines(text)
    assert lines.count("\n") == text.count("\n")
    assert lines.replace("\n", "").replace("\t", "").isprintable()


def test_characters_are_spelled_as_in_python_and_bytes_of_a_file_name_as_bytes() -> None:
    assert printable("a\x1b\n\u202e\ud800\x9b") == r"a\x1b\n\u202e\ud800\x9b"
    assert printable(os.fsdecode(b"\xff\xfe.txt")) == r"\xff\xfe.txt"
    assert printable_lines("a\n\tb\r") == "a\n\tb\\r"
    assert printable("Größe 模型 🙂") == "Größe 模型 🙂"


@pytest.mark.parametrize("hostile", HOSTILE)
def test_the_sentence_of_every_error_is_one_printable_line(hostile: str) -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DilocoError)]
    assert len(kinds) > 8
    for kind in kinds:
        for wrong in (kind(f"the file {hostile} is not there"), Malformed("shape", hostile)):
            assert str(wrong).isprintable()
            assert all(str(word).isprintable() for word in wrong.args)
            str(wrong).encode("utf-8")
    assert str(SettingError("two\nlines")) == "two lines"


def test_an_error_is_still_what_it_was_made_of() -> None:
    assert str(SettingError("plain")) == "plain"
    assert SettingError("plain").args == ("plain",)
    assert Malformed("shape", "not\x1bit").reason == "shape"
    assert str(Malformed("shape", "not\x1bit")) == r"shape: not\x1bit"


def test_text_of_several_lines_is_echoed_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    echo("one\n\ttwo\x1b[2J")
    echo("three", err=True)
    assert capsys.readouterr() == ("one\n\ttwo\\x1b[2J\n", "three\n")


# --- commands --------------------------------------------------------------------------------------------------------
COMMANDS = [
    ["status", "{}"], ["watch", "{}"], ["report", "{}"], ["export", "{}"], ["sample", "{}"], ["replay", "{}"],
    ["keys", "list", "--dir", "{}"], ["keys", "revoke", "--role", "learner", "--run", "{}", "--name", "{}"],
    ["keys", "new", "--role", "learner", "--run", "{}", "--name", "a"], ["keys", "new", "--role", "{}"],
    ["ping", "--broker", "{}"], ["learner", "--broker", "{}"], ["up", "--{}"], ["{}"], ["up", "--steps", "{}"],
    ["up", "--run", "{}"], ["up", "--data", "{}"], ["up", "--resume", "{}"], ["status", "--redis", "{}"],
    ["status", "--redis", "redis://user:{}@x:y"], ["compare", "--suite", "{}"], ["learner", "--key", "{}"],
    ["syncer", "--init", "{}"],
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_is_on_a_command_line_comes_back_printable(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hostile = ALL_AT_ONCE.replace("\x00", "").replace("\ud800", "")  # which no command line has
    assert commands.run_command([word.replace("{}", hostile) for word in command]) in (2, 3)
    out, err = capsys.readouterr()
    check_shown(out + err)
    assert err.splitlines()[-1].startswith("diloco: ")
    assert [line for line in err.splitlines()[:-1] if " settings " not in line] == []


def test_what_is_in_the_environment_comes_back_printable(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DILOCO_\x1b[2J", "1")
    monkeypatch.setenv("DILOCO_DATA", "\x1b[2J/nowhere")
    assert commands.run_command(["up"]) == 2
    err = capsys.readouterr().err
    check_shown(err)
    assert r"DILOCO_\x1b[2J" in err
    assert "(from DILOCO_DATA)" in err or "DILOCO_DATA" in err.splitlines()[-1]


PRINTS = """
import asyncio, gc, logging, sys, threading, traceback, warnings
from hostile import ALL_AT_ONCE
from decoupled_diloco.common.output import protect

def fail():
    raise RuntimeError(f"from a {threading.current_thread().name}" + ALL_AT_ONCE)

class Finalized:
    def __del__(self):
        raise RuntimeError("from a finalizer" + ALL_AT_ONCE)

async def forgotten():
    asyncio.get_running_loop().call_exception_handler({"message": "from a loop" + ALL_AT_ONCE})

protect()
thread = threading.Thread(target=fail, name="Thread" + ALL_AT_ONCE)
thread.start(); thread.join()
Finalized(); gc.collect()
warnings.warn("from a warning" + ALL_AT_ONCE)
logging.getLogger("x").warning("from another logger" + ALL_AT_ONCE)
logging.getLogger("x").warning("%d", "from a wrong call" + ALL_AT_ONCE)
asyncio.run(forgotten())
print("from a print" + ALL_AT_ONCE)
sys.stderr.writelines(["from lines" + ALL_AT_ONCE, "\\n"])
if sys.argv[1:]:
    sys.excepthook = None  # Python prints by itself what it can not hand on
fail()
"""


@pytest.mark.parametrize("more", [[], ["without a hook"]])
def test_whatever_prints_cannot_control_the_terminal(more: list[str]) -> None:
    command = [sys.executable, "-P", "-W", "default", "-c", PRINTS, *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, check=False)
    assert done.returncode == 1
    check_shown(done.stdout + done.stderr)
    for place in ("Thread", "finalizer", "warning", "another logger", "wrong call", "loop", "lines", "MainThread"):
        assert re.search(rf"from (a )?{place}.*{re.escape(printable(HOSTILE[2]))}", done.stderr), place
    assert "from a print" + printable_lines(ALL_AT_ONCE) in done.stdout
    assert done.stderr.count("Traceback (most recent call last):") == 4


def test_a_picture_is_drawn_past_the_escapes_in_order_with_what_is_printed() -> None:
    program = (
        "from decoupled_diloco.common.output import protect; protect()\n"
        "from decoupled_diloco.monitor.console import PlainConsole, styled\n"
        "print('one\\x1b[2J'); PlainConsole(force_terminal=True).print(styled('two\\x1b[2J', 'bold')); print('three')"
    )
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, check=True)
    assert done.stdout == "one\\x1b[2J\n\x1b[1mtwo\\x1b[2J\x1b[0m\nthree\n"


# --- JSON ------------------------------------------------------------------------------------------------------------
@given(st.recursive(ANY_TEXT | st.floats() | st.integers() | st.none() | st.booleans(),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
                    max_leaves=6))  # fmt: skip
def test_json_is_what_a_strict_reader_takes_and_keeps_what_it_can(value: Any) -> None:
    """A strict reader has no nan and no infinity, and no half of a pair of surrogates."""
    line = json_line(value)
    assert line.isascii()
    assert line.isprintable()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    read = json.loads(line, parse_constant=refuse)
    json.dumps(read, ensure_ascii=False).encode("utf-8")
    if isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value):
        assert read == value


def test_half_a_pair_is_spelled_in_the_log_and_on_standard_output(
    tmp_path: Path, odd_folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with logged(tmp_path) as events:
        get_logger("test").info("odd\ud800", **{"key\udcff": ["\ud800", {"\ud800": "\U0001f642"}]})
        [row] = events(r"odd\ud800")
    assert row[r"key\xff"] == [r"\ud800", {r"\ud800": "\U0001f642"}]
    assert commands.run_command(["status", "--json", str(odd_folder.path)]) == 0
    json.dumps(json.loads(capsys.readouterr().out), ensure_ascii=False).encode("utf-8")


NAME = "".join(HOSTILE).replace("/", "").replace("\x00", "").replace("\ud800", "")
"""What a folder can be called."""


@pytest.fixture
def odd_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A finished run whose folder has a hostile name, and whose files hold hostile text."""
    monkeypatch.chdir(tmp_path)
    settings = RunSettings(run="it", steps=8)
    folder = RunFolder.create(Path("runs") / NAME, Setup(settings=settings, task=TaskSettings(), data_hash="x"))
    rows = {"state": "finished", "t": 8, "merges": 2, "run": ALL_AT_ONCE, "quorum_state": ALL_AT_ONCE,
            "learners": [{"name": ALL_AT_ONCE, "local_steps": 8}, {"name": "b"}], "model_hash": ALL_AT_ONCE,
            "seconds": 10.0, "unconfirmed": {ALL_AT_ONCE: ALL_AT_ONCE}}  # fmt: skip
    (folder.path / "summary.json").write_text(json.dumps(rows))
    folder.write_run_map({"processes": {ALL_AT_ONCE: 1}, "learners_asked": [ALL_AT_ONCE]})
    row = {"t": 8, "part": "B", "size": "full", "val_loss": 2.0, "seconds": 1.0, "what": ALL_AT_ONCE}
    (folder.path / "evaluations.jsonl").write_text(json.dumps(row) + "\n")
    facts = {"source": ALL_AT_ONCE, "tokens": 5, "sha256": ALL_AT_ONCE, "baselines": {"B": {f"{ALL_AT_ONCE}$x^$": 3.0}}}
    (folder.path / "text.json").write_text(json.dumps(facts))
    return folder


@pytest.mark.parametrize("command", [["status"], ["status", "--json"], ["watch"], ["report"]], ids=" ".join)
def test_hostile_text_in_a_run_s_files_is_shown_printable(
    command: list[str], odd_folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.run_command([*command, str(odd_folder.path)]) == 0
    out, err = capsys.readouterr()
    check_shown(out + err)


def test_a_model_that_writes_control_characters_cannot_control_the_terminal(
    odd_folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = "def f():\n\treturn '\x1b[2J'\r"
    monkeypatch.setattr("decoupled_diloco.compose.final_report.sample_text", lambda *_: written)
    assert commands.run_command(["sample", str(odd_folder.path)]) == 0
    assert capsys.readouterr().out == "def f():\n\treturn '\\x1b[2J'\\r\n"


# --- pictures --------------------------------------------------------------------------------------------------------
def hostile_run(text: str) -> RunStatus:
    learner = {"name": text, "state": text, "local_steps": 1, "tokens_merged": 1}
    return RunStatus(run=text, state=text, t=5, steps=10, trouble=text, processes={text: 1},
               learners=[learner, learner], summary={"quorum_state": text, "model_hash": text})  # fmt: skip


def console(**more: Any) -> PlainConsole:
    return PlainConsole(file=io.StringIO(), width=4000, force_terminal=True, color_system="truecolor", **more)


def drawn(what: RenderableType | str) -> str:
    place = console()
    place.print(what)
    assert isinstance(place.file, io.StringIO)
    return place.file.getvalue()


@pytest.mark.parametrize("hostile", [*HOSTILE, ALL_AT_ONCE])
def test_pictures_and_tables_show_text_as_it_is(hostile: str) -> None:
    plain = hostile_run("plain")
    for draw in (dashboard, table, line):
        shown = drawn(draw(hostile_run(hostile)))
        check_shown(shown)
        assert shown.count("\n") == drawn(draw(plain)).count("\n"), "no row is forged"
        assert printable(hostile) in shown


@pytest.mark.parametrize("hostile", [*HOSTILE, ALL_AT_ONCE])
def test_a_live_picture_and_its_notes_show_text_as_it_is(hostile: str) -> None:
    place = console()
    display = open_display(place)
    display.show(hostile_run(hostile))
    display.note(f"a died ({hostile})")
    display.close()
    assert isinstance(place.file, io.StringIO)
    check_shown(place.file.getvalue(), live=True)
    assert f"a died ({printable(hostile)})" in place.file.getvalue()


def test_a_console_shows_any_string_and_any_text_as_it_is() -> None:
    for hostile in HOSTILE:
        assert drawn(hostile) == printable(hostile) + "\n"
        check_shown(drawn(Text.assemble("a", (hostile, "bold"), "b")))
    assert drawn(Text("two\nlines")) == "two\nlines\n"


def test_the_summary_of_a_run_shows_text_as_it_is(odd_folder: RunFolder) -> None:
    place = console()
    show_summary(figures(odd_folder), place)
    show_unconfirmed(odd_folder, place)
    assert isinstance(place.file, io.StringIO)
    check_shown(place.file.getvalue())


# --- Redis -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def hostile_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a store into which somebody else wrote."""
    import redis

    text = ALL_AT_ONCE.encode("utf-8", "replace")
    with EmbeddedRedis(tmp_path_factory.mktemp("store")) as store, redis.Redis.from_url(store.url) as client:
        row = {"state": text, "steps_total": "10", "step": "5", "quorum_state": text, "model_hash": text, "run": text}
        for run in (b"it", text.replace(b":", b"")):
            client.hset(b"dd:" + run + b":run", mapping=row)
        client.zadd("dd:it:learners", {text: 1.0})
        client.hset(b"dd:it:learner:" + text, mapping={"state": text, "host": text, "device": text})
        client.xadd("dd:it:events", {"kind": text, "at": "1"})
        yield store.url


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_hostile_text_in_redis_is_shown_printable(
    options: list[str], hostile_store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.run_command(["status", "it", "--redis", hostile_store, *options]) == 0
    assert commands.run_command(["status", "--redis", hostile_store, *options]) == 2, "its runs are named"
    out, err = capsys.readouterr()
    check_shown(out + err)


def test_hostile_text_in_redis_is_drawn_as_it_is(hostile_store: str) -> None:
    source = find_source("it", hostile_store)
    assert isinstance(source, RunSource)
    for draw in (dashboard, table, line):
        check_shown(drawn(draw(source.read())))


def test_what_the_registry_writes_is_printable(tmp_path: Path) -> None:
    import redis
    from waiting import wait_for

    with EmbeddedRedis(tmp_path) as store, redis.Redis.from_url(store.url, decode_responses=True) as client:
        registry = Registry(store.url, "it", get_logger("syncer"))
        registry.event("joined", learner=ALL_AT_ONCE)
        wait_for(lambda: client.exists("dd:it:events"), "the event is there")
        registry.close()
        ((_, event),) = client.xrange("dd:it:events")
        assert event["learner"] == printable(ALL_AT_ONCE)


# --- nothing beside it -----------------------------------------------------------------------------------------------
OUTPUTS = {"common/output.py", "common/log.py", "monitor/console.py"}
EXCEPT = {"cli/keys_command.py:_print", "compose/signals.py:_on_signal"}
"""Key files, which are ASCII and must be written whole; a handler of signals."""
FORBIDDEN = {"print", "click.echo", "click.secho", "Console", "os.write", "Text", "unescaped"}


def writes(path: Path) -> Iterator[str]:
    """FILE:FUNCTION of each call that puts text on a terminal by itself."""
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in FORBIDDEN or name.startswith(("sys.stdout.write", "sys.stderr.write")):
                    yield f"{path.relative_to(ROOT)}:{function.name}"


def test_nothing_writes_to_a_terminal_by_another_way() -> None:
    parts = ("common", "broker", "learner", "syncer", "simulator", "monitor", "compose")
    paths = [path for part in parts for path in (ROOT / part).rglob("*.py")]
    found = {place for path in paths if str(path.relative_to(ROOT)) not in OUTPUTS for place in writes(path)}
    assert found <= EXCEPT
