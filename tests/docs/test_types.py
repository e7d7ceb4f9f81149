"""The documented programs pass a strict type check, as an engine that has one would run it on its own code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, fences, text

pytest.importorskip("mypy")  # of the tools for development

GUIDE = [code for code in fences("docs/client.md", "python") if not code.startswith(("# with torch", "# on a GPU"))]
PROGRAMS = {"engine": text("examples/engine.py"), "guide": "\n".join(GUIDE)}


def test_the_documented_programs_pass_a_strict_type_check(tmp_path: Path) -> None:
    files = []
    for name, program in PROGRAMS.items():
        files.append(tmp_path / f"{name}.py")
        files[-1].write_text(program)
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", "pyproject.toml", *map(str, files)],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout
