"""What pages, docstrings and comments point at is there: files, tests, links, commands, options, names, Redis keys."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import click
from decoupled_diloco.cli.commands import group
from decoupled_diloco.common.redis_keys import RedisKeys

ROOT = Path(__file__).parents[3]
BESIDE = ("tests", "benchmarks", "docs")
"""Folders that are no part of the package."""
FOLDERS = sorted({*BESIDE, *(path.parent.name for path in ROOT.glob("*/__init__.py"))})
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SOURCES = [
    path
    for path in [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]
    if path.relative_to(ROOT).parts[:2] != ("tests", "path")
]
CODE = [path for path in SOURCES if "tests" not in path.relative_to(ROOT).parts]
PROSE = re.compile(r'"""(?:.|\n)*?"""|#.*')
FILES = {path.name for path in [*PAGES, *SOURCES, *(ROOT / "compose").iterdir()]}
MADE_BY_A_USER = {"compose/.env", "train.py"}
OTHERS_OPTIONS = {
    "--build", "--volumes", "--scale", "--no-deps", "--rm", "--env-file",  # docker compose
    "--help", "--strict", "--scan", "--pattern",
}  # fmt: skip
OTHERS_NAMES = {"ps", "scp", "exited", "run1", "run10", "_bytes"}
"""Commands of other programs, a container's state, examples, and the ending of a name."""


@cache
def prose(path: Path) -> str:
    """A page, or the docstrings and comments of a source."""
    text = path.read_text(encoding="utf-8")
    return text if path.suffix == ".md" else "\n".join(PROSE.findall(text))


@cache
def names() -> set[str]:
    """Every word of the code, docstrings and comments left out; and of what is neither Python nor a page."""
    others = [*(ROOT / "compose").iterdir(), ROOT / "Makefile", ROOT / "pyproject.toml"]
    texts = [PROSE.sub("", path.read_text(encoding="utf-8")) for path in SOURCES]
    texts += [path.read_text(encoding="utf-8") for path in others if path.is_file()]
    return set(re.findall(r"\w+", "\n".join(texts)))


@cache
def options() -> set[str]:
    def of(command: click.Command) -> Iterator[str]:
        for option in command.params:
            yield from (*option.opts, *option.secondary_opts)
        for below in command.commands.values() if isinstance(command, click.Group) else ():
            yield from of(below)

    return set(of(group))


def code(page: str) -> list[str]:
    """What a page shows as code: spans between backticks, and lines that are indented by four."""
    spans = re.findall(r"`([^`\n]+)`", page)
    return [*spans, *re.findall(r"^    (\S.*)$", page, re.MULTILINE)]


def stale(found: Callable[[Path], Iterable[str]], paths: Iterable[Path] = PAGES) -> list[str]:
    return [f"{path.relative_to(ROOT)}: {what}" for path in paths for what in found(path)]


def missing_files(path: Path) -> Iterator[str]:
    text = prose(path)
    for name in set(re.findall(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w/.-]*[\w/])", text)) - MADE_BY_A_USER:
        if not any((ROOT / (name + end)).exists() for end in ("", ".py", ".md")):
            yield name
    for name in set(re.findall(r"(?<![\w/.*-])([\w-]+\.(?:py|md|yaml))\b", text)) - FILES - MADE_BY_A_USER:
        if not re.match(r"[A-Z]+\.", name):  # SUITE.md: any suite's
            yield name


def broken_links(path: Path) -> Iterator[str]:
    for place, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", prose(path)):
        there = path.parent / place if place else path
        if not there.exists():
            yield place
        elif anchor:
            heads = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            if anchor not in {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}:
                yield f"{place}#{anchor}"


def unknown_commands(path: Path) -> Iterator[str]:
    for shown in code(prose(path)):
        meant: click.Command = group
        for word in shown.split()[1:] if shown.startswith("diloco ") else ():
            if isinstance(meant, click.Group) and re.fullmatch(r"[a-z]+", word):
                if word not in meant.commands:
                    yield shown
                    break
                meant = meant.commands[word]


def unknown_options(path: Path) -> Iterator[str]:
    known = options() | OTHERS_OPTIONS
    for shown in code(prose(path)):
        if "-->" in shown or shown.startswith(("python ", "redis-cli ")):  # a drawing, and what is no command of ours
            continue
        yield from set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", shown)) - known


def unknown_names(path: Path) -> Iterator[str]:
    for name in re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", prose(path)):
        if name not in FILES | OTHERS_NAMES and not set(name.split(".")) <= names():
            yield name


@cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def missing_tests(path: Path) -> Iterator[str]:
    for file, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", prose(path)):
        if not (ROOT / file).exists() or name not in functions_of(ROOT / file):
            yield f"{file}::{name}"


def unknown_keys(path: Path) -> Iterator[str]:
    keys = RedisKeys("r")
    known = (keys.run, keys.learners, keys.fragments, keys.events, keys.epoch, keys.learner("n"), keys.fragment(0))
    kinds = {key.split(":")[2] for key in known}
    yield from set(re.findall(r"\bdd:[\w*$-]+:(\w+)", prose(path))) - kinds


def test_files_that_are_named_are_there() -> None:
    assert stale(missing_files, [*PAGES, *SOURCES]) == []


def test_tests_that_are_named_are_there() -> None:
    assert stale(missing_tests) == []


def test_links_lead_somewhere() -> None:
    assert stale(broken_links) == []


def test_commands_that_are_named_exist() -> None:
    assert stale(unknown_commands, [*PAGES, *SOURCES]) == []


def test_options_that_are_named_exist() -> None:
    assert stale(unknown_options) == []


def test_names_between_backticks_are_in_the_code() -> None:
    assert stale(unknown_names, [*PAGES, *CODE]) == []


def test_redis_keys_are_those_of_the_registry() -> None:
    assert stale(unknown_keys) == []


def test_the_tables_of_folders_are_complete() -> None:
    """CONTRIBUTING.md's is also in the order in which parts may import one another, as test_architecture.py has it."""
    expected = sorted(FOLDERS)
    listed = re.findall(r"^    ([a-z]+/)  ", prose(ROOT / "CONTRIBUTING.md"), re.MULTILINE)
    assert sorted(name.rstrip("/") for name in listed) == expected
    rows = re.findall(r"^\| ([a-z]+) \| `", prose(ROOT / "docs" / "design.md"), re.MULTILINE)
    assert sorted(rows) == [name for name in expected if name not in {"tests", "docs"}]
