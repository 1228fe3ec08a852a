"""Architecture: what imports what, what the package lists, and how tests wait."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = "decoupled_diloco"
LEVELS = {
    "common": 0, "broker": 1, "learner": 1, "syncer": 1,
    "simulator": 2, "monitor": 2, "compose": 3, "experiments": 3, "cli": 4,
}  # fmt: skip
"""Arrows point down only; parts of one level never import one another."""
NOT_PARTS = {"tests", "docs", "benchmarks", "build", "dist"}


def parts() -> list[str]:
    """Folders at the top that hold Python."""
    folders = (path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
    return sorted(path.name for path in folders if path.name not in NOT_PARTS and list(path.glob("*.py")))


def sources() -> list[Path]:
    return [path for part in parts() for path in sorted((ROOT / part).rglob("*.py"))]


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Every module or name that a file imports, at whatever depth, in full, and its line."""
    package = (NAME, *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def part_of(module: str) -> str | None:
    names = module.split(".")
    return names[1] if names[0] == NAME and len(names) > 1 else None


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", sources(), ids=ids)
def test_arrows_point_down_only(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0]
    assert own in LEVELS, f"{own} is a new part: give it a level"
    for module, line in imported(path):
        other = part_of(module)
        if other is None or other in {own, "__version__"}:
            continue
        assert other in LEVELS, f"{ids(path)}:{line} imports {module}, which is no part"
        assert LEVELS[other] < LEVELS[own], f"{ids(path)}:{line}: {own} must not import {other}"


@pytest.mark.parametrize("path", sources(), ids=ids)
def test_parts_import_one_another_under_the_package_s_name_only(path: Path) -> None:
    for module, line in imported(path):
        assert module.split(".")[0] not in LEVELS, f"{ids(path)}:{line}: `{module}` may be somebody else's"


def test_every_folder_with_code_is_listed_as_a_package_and_no_other() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for path in sources()}
    expected = {NAME} | {".".join((NAME, *folder.parts)) for folder in folders}
    assert set(settings["packages"]) == expected
    for folder in folders:
        assert (ROOT / folder / "__init__.py").is_file(), f"{folder} has no __init__.py"


def test_type_checkers_see_every_part() -> None:
    links = {path.name for path in (ROOT / "tests" / "path" / NAME).iterdir()}
    assert links >= {*parts(), "__init__.py"}


@pytest.mark.parametrize(
    "module", ["broker.__main__", "broker.broker", "common.sockets", "common.wire", "cli.commands"]
)
def test_what_needs_no_torch_does_not_load_it(module: str) -> None:
    heavy = ("torch", "numpy", "matplotlib", "redis", "safetensors")
    program = f"import sys, {NAME}.{module}; print(sorted(set(sys.modules) & set({heavy!r})))"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_commands_handle_signals_and_what_a_program_of_the_user_s_imports_does_not() -> None:
    found = {ids(path) for path in sources() if "signal.signal(" in path.read_text()}
    commands = {"broker/__main__.py", "syncer/__main__.py", "learner/task/startup.py", "compose/signals.py"}
    assert found == commands | {"experiments/runner.py"}, "its workers leave Ctrl-C to their parent"
    for place in commands:
        assert "stop_signals()" in (ROOT / place).read_text()
    program = (
        "import signal, sys; before = [signal.getsignal(n) for n in signal.valid_signals()]; hooks = sys.excepthook\n"
        f"import {NAME}; from {NAME} import join\n"
        "print(before == [signal.getsignal(n) for n in signal.valid_signals()] and sys.excepthook is hooks)\n"
        f"print('{NAME}.learner.process' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def is_sleep(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "time" and any(alias.name == "sleep" for alias in node.names)
    return isinstance(node, ast.Attribute) and node.attr == "sleep"


def test_no_test_sleeps_where_it_could_wait_for_a_state() -> None:
    """Exempt are the helper that waits, and a pause that is itself the fault, which its line says in these words."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        inside = path.relative_to(ROOT / "tests").parts
        if inside[0] in ("path", "waiting.py"):
            continue
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            line = getattr(node, "lineno", 0)
            if is_sleep(node) and "this is the fault" not in lines[line - 1]:
                raise AssertionError(f"{ids(path)}:{line} sleeps: use waiting.wait_for")


def module_of(path: Path) -> str:
    names = (NAME, *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def test_no_modules_import_one_another_in_a_circle() -> None:
    """Imports inside functions count as well: they would only hide a circle."""
    modules = {module_of(path): path for path in sources()}

    def needed(path: Path) -> set[str]:
        found = {name for name, _ in imported(path)}
        return {module for name in found for module in (name, name.rpartition(".")[0]) if module in modules}

    left = {module: needed(path) - {module} for module, path in modules.items()}
    while free := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in free:
            del left[module]
    assert left == {}


MOST_LINES = 400


def test_no_file_is_too_long_to_be_read_at_once() -> None:
    """common/wire.py is exempt: one message after the other."""
    tests = [path for path in (ROOT / "tests").rglob("*.py") if (ROOT / "tests" / "path") not in path.parents]
    lines = {ids(path): len(path.read_text(encoding="utf-8").splitlines()) for path in (*sources(), *tests)}
    assert [name for name, count in lines.items() if count > MOST_LINES] == ["common/wire.py"]
