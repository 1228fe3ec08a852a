from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child import output_of
from decoupled_diloco.common import log as log_module
from decoupled_diloco.common.errors import SettingError
from decoupled_diloco.common.log import configure, get_logger

EVIL = 'a\n12:00:00 syncer merged fragment=1\r\x1b[2J\u2028{"event":"merged"}\u202e\ud800 ü 模型'


@pytest.fixture(autouse=True)
def own_outputs() -> Iterator[None]:
    yield
    configure("", json_file=None, level="info", terminal=True)


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def in_a_fresh_process(code: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        check=True,
        timeout=60,
    )


def test_an_event_is_one_json_line_with_its_own_fields_first(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "syncer.jsonl"
    configure("syncer", json_file=file, terminal=False)
    get_logger("syncer").info("delta_taken", fragment=3, learner="a", seconds=0.018)
    get_logger("registry").warning("registry_lost", level="mine", loss=float("nan"), at=Path("x"), names=("a", "b"))
    get_logger("syncer").info("norms", norm=np.float32(1.5), count=np.int64(3), bad=np.float32("inf"))
    first, second, third = events(file)
    assert list(first)[:4] == ["ts", "level", "process", "event"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("ts"))
    assert first == {
        "level": "info",
        "process": "syncer",
        "event": "delta_taken",
        "fragment": 3,
        "learner": "a",
        "seconds": 0.018,
    }
    assert (third["norm"], third["count"], third["bad"]) == (1.5, 3, "inf")
    assert second["part"] == "registry"
    assert second["level"] == "warning"
    assert second["level_"] == "mine"
    assert second["loss"] == "nan"
    assert second["at"] == "x"
    assert second["names"] == ["a", "b"]


def test_the_terminal_gets_a_short_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure("syncer")
    log = get_logger("syncer")
    log.info("delta_taken", fragment=3, learner="a", seconds=0.0180001, reason="two words")
    log.warning("learner_lost")
    log.debug("never_shown")
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r'\d\d:\d\d:\d\d syncer delta_taken fragment=3 learner=a seconds=0\.018 reason="two words"', first
    )
    assert re.fullmatch(r"\d\d:\d\d:\d\d syncer WARNING learner_lost", second)


def test_the_terminal_is_spared_what_happens_all_the_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("decoupled_diloco.common.log.time.monotonic", lambda: now)
    configure("syncer", json_file=tmp_path / "log.jsonl")
    log = get_logger("loop")
    for fragment in range(10):
        log.info("merged", fragment=fragment)
        log.info("joined", learner=f"learner-{fragment}")
        log.warning("rejected", learner="a")
    shown = capsys.readouterr().err
    assert (shown.count("merged"), shown.count("joined"), shown.count("rejected")) == (3, 10, 10)
    assert "part=" not in shown
    now = 11.0
    log.info("merged", fragment=10)
    assert capsys.readouterr().err.endswith(" merged fragment=10 (and 7 like it)\n")
    assert sum(event["event"] == "merged" for event in events(tmp_path / "log.jsonl")) == 11
    configure("syncer", level="debug")
    for _ in range(10):
        log.info("merged")
    assert capsys.readouterr().err.count("merged") == 10


def test_no_text_can_forge_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "log.jsonl"
    configure("syncer", json_file=file)
    get_logger("syncer").warning(EVIL, learner=EVIL, **{EVIL: 1})
    assert file.read_bytes().isascii()
    assert len(file.read_text().splitlines()) == 1
    (event,) = events(file)
    kept = EVIL.replace("\ud800", r"\ud800")
    assert event["event"] == event["learner"] == kept
    assert event[kept] == 1
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == 1
    assert shown.rstrip("\n").isprintable()
    assert "模型" in shown


def test_a_traceback_is_kept_and_cannot_forge_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "log.jsonl"
    configure("syncer", json_file=file)
    try:
        raise ValueError(EVIL)
    except ValueError:
        get_logger("syncer").exception("round_failed", fragment=1)
    (event,) = events(file)
    assert "ValueError" in event["exception"]
    assert event["level"] == "error"
    first, *others = capsys.readouterr().err.splitlines()
    assert "ERROR round_failed fragment=1" in first
    assert others
    assert all(line.startswith("    ") for line in others)


def test_the_level_is_a_threshold_and_reaches_loggers_made_before(tmp_path: Path) -> None:
    log = get_logger("syncer")
    configure("syncer", json_file=tmp_path / "a", level="warning", terminal=False)
    log.info("quiet")
    log.warning("loud")
    configure("syncer", json_file=tmp_path / "b", level="debug", terminal=False)
    log.debug("now_heard")
    assert [e["event"] for e in events(tmp_path / "a")] == ["loud"]
    assert [e["event"] for e in events(tmp_path / "b")] == ["now_heard"]


def test_a_later_process_appends_to_the_same_file(tmp_path: Path) -> None:
    for event in ("first", "second"):
        configure("syncer", json_file=tmp_path / "a", terminal=False)
        get_logger("syncer").info(event)
    assert [e["event"] for e in events(tmp_path / "a")] == ["first", "second"]


def test_an_unknown_level_and_an_impossible_file_are_setting_errors(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="debug, info, warning"):
        configure("syncer", level="loud")
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="cannot write the log file"):
        configure("syncer", json_file=tmp_path / "file" / "log.jsonl")


def test_a_full_disk_costs_lines_but_not_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    configure("syncer", json_file=Path("/dev/full"), terminal=False)
    for _ in range(3):
        get_logger("syncer").info("delta_taken")
    assert capsys.readouterr().err.count("the log file cannot be written") == 1


def test_a_terminal_that_is_gone_or_narrow_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure("syncer", json_file=tmp_path / "a")
    closed = io.StringIO()
    closed.close()
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    for stream in (closed, None, narrow):
        monkeypatch.setattr(sys, "stderr", stream)
        get_logger("syncer").info("event", name="模型")
    assert rb"name=\u6a21\u578b" in narrow.buffer.getvalue()
    assert len(events(tmp_path / "a")) == 3


@pytest.mark.parametrize("locale", ["C", "POSIX", "en_US.ISO-8859-1", "xx_YY"])
def test_names_outside_ascii_survive_any_locale(tmp_path: Path, locale: str) -> None:
    file = tmp_path / "Prüfung 模型 🙂.jsonl"
    code = (
        "import sys, pathlib, os\n"
        "from decoupled_diloco.common.log import configure, get_logger\n"
        f"configure('syncer', json_file=pathlib.Path(os.fsdecode({os.fsencode(file)!r})))\n"
        "get_logger('syncer').info('saved', folder='Pr\\u00fcfung \\u6a21', raw=os.fsdecode(b'\\xff'))\n"
    )
    done = in_a_fresh_process(code, LANG=locale, LC_ALL=locale)
    (event,) = events(file)
    assert event["folder"] == "Prüfung 模"
    assert done.stderr.count(b"\n") == 1


def test_importing_it_loads_no_torch_and_leaves_structlog_alone() -> None:
    code = (
        "import sys, structlog, decoupled_diloco.common.log as log; log.configure('x'); log.get_logger('x').info('y')\n"
        "assert not structlog.is_configured()\n"
        "print([m for m in ('torch', 'numpy', 'redis', 'zmq') if m in sys.modules])"
    )
    assert in_a_fresh_process(code).stdout.strip() == b"[]"


def test_the_name_of_an_unconfigured_logger_stands_for_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    get_logger("session").info("waiting")
    assert " session waiting\n" in capsys.readouterr().err
    assert log_module._outputs.file is None


def test_a_process_that_was_forked_while_another_thread_wrote_an_event_can_write_its_own() -> None:
    said = output_of(
        "import threading",
        "from decoupled_diloco.common import log",
        "held, free = threading.Event(), threading.Event()",
        "def write():",
        "    with log._outputs._lock:",
        "        held.set()",
        "        free.wait()",
        "writer = threading.Thread(target=write)",
        "writer.start()",
        "held.wait()",
        "if os.fork() == 0:",
        "    log.get_logger('learner').info('hello')",
        "    print('written', flush=True)",
        "    os._exit(0)",
        "os.wait()",
        "free.set()",
        "writer.join()",
    )
    assert said == "written\n"
