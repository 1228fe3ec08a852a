"""A Python process of a test's own, which runs a few lines with the tests' helpers at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def child(*lines: str, around: Sequence[str] = (), **environment: str) -> subprocess.Popen[str]:
    """A Python process that runs these lines; it dies with its standard input."""
    root = Path(__file__).parent
    program = "\n".join(["import os, sys", f"sys.path.insert(0, {str(root)!r})", *lines])
    return subprocess.Popen(
        [*around, sys.executable, "-P", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, **environment},
    )


def output_of(*lines: str, around: Sequence[str] = (), **environment: str) -> str:
    process = child(*lines, around=around, **environment)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    return out
