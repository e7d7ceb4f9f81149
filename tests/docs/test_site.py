"""The site builds without a warning, and asks nobody else for anything while it is read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason="the group docs is not installed")

from tests.docs.pages import ROOT

_LOADED = re.compile(
    r"""<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=["']((?:https?:)?//[^"']+)"""
    r"""|@import\s+["']?(?:url\()?["']?((?:https?:)?//[^"')]+)|url\(["']?((?:https?:)?//[^"')]+)"""
)


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "--builder", "html", "--nitpicky", "--fail-on-warning", "--keep-going"]
    return subprocess.run([*command, "--quiet", str(source), str(out)], capture_output=True, text=True, cwd=ROOT)


def loaded(text: str) -> list[str]:
    """What a browser would fetch from elsewhere to show this."""
    return ["".join(found) for found in _LOADED.findall(text)]


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    built = build(ROOT / "docs", tmp_path)
    assert built.returncode == 0, built.stderr
    pages = [path for path in tmp_path.rglob("*") if path.suffix in (".html", ".css")]
    assert len(pages) > 20
    assert {path.name: found for path in pages if (found := loaded(path.read_text()))} == {}
    assert "EXTEND_TIMEOUT_USEC" in (tmp_path / "systemd.html").read_text(), "the text beside the units is taken in"


def test_what_is_loaded_is_seen() -> None:
    assert loaded('<script async src="https://cdn.example/x.js">')
    assert loaded("@import url(//fonts.example/css);")
    assert loaded("a { background: url('https://x.example/a.png') }")
    assert not loaded('<a href="https://example.org">there</a>')
