"""A class has a name that no other has, and a docstring says what a thing is: it does not continue a line of code."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

PACKAGE = ROOT / "kvsidecar"
CONTINUES = re.compile(r"(Of|By|As|That|Those|Which|The same|Whether its?)\b")
"""How a docstring begins that cannot be read alone."""


def modules() -> list[Path]:
    """The modules of all packages. Generated ones do not count."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] != "v1"]


def classes(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Where the classes of each name are."""
    found = defaultdict(list)
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{name}:{node.lineno}")
    return found


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: of modules, classes and functions, and below fields and constants."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, Sequence) else ():
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                yield each.lineno, each.value.value.strip()


def continuing(source: str) -> list[int]:
    """Lines of the docstrings that cannot be read alone."""
    return [line for line, text in docstrings(source) if CONTINUES.match(text)]


def test_no_two_classes_have_the_same_name() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in modules()}
    assert {name: places for name, places in classes(sources).items() if len(places) > 1} == {}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings_can_be_read_alone(path: Path) -> None:
    assert continuing(path.read_text()) == []


def test_a_name_that_stands_twice_is_seen() -> None:
    found = classes({"a.py": "class Options: ...\nclass Other: ...", "b.py": "def f():\n    class Options: ..."})
    assert found["Options"] == ["a.py:1", "b.py:2"]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""Of a module."""', [1]),
        ('MOST = 3\n"""The same of jobs."""', [2]),
        ('class A:\n    jobs: int\n    """By device."""\n    def f(self):\n        """As `g`."""', [3, 5]),
        ('"""Oftener than expected."""\nMOST = 3\n"""Most jobs, by device."""', []),
    ],
)
def test_a_docstring_that_continues_a_line_is_seen(source: str, lines: list[int]) -> None:
    assert continuing(source) == lines
