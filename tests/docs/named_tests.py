"""Tests, files, modules and targets that the documents name, and what there is of them. Nothing is imported or run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.docs.pages import ROOT, prose

TESTS = ROOT / "tests"
ALIASES = {"copier_death": "e2e/test_copier_death.py"}
"""Short names of test files -> what they stand for, as docs/faults.md says."""

_NAME = r"(?:…|test_)[\w…]*"
_NAMED = re.compile(rf"(?P<file>[\w/]*test_\w+\.py|{'|'.join(ALIASES)}|…)(?:::(?P<name>{_NAME}))?|(?P<only>{_NAME})")


@cache
def all_tests() -> dict[str, frozenset[str]]:
    """Path of each file of tests, below tests/ -> the names of its tests, and of its state machines."""
    return {path.relative_to(TESTS).as_posix(): frozenset(_tests_of(path)) for path in sorted(TESTS.rglob("test_*.py"))}


def _tests_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.name


def files_of(named: str) -> list[str]:
    """Files that a page may mean: by the end of their path."""
    named = ALIASES.get(named, named).removeprefix("tests/")
    return [path for path in all_tests() if path == named or path.endswith(f"/{named}")]


def unresolved(line: str) -> Iterator[str]:
    """Of a paragraph or a row of a table, the code that names a test or a file of tests that does not exist.

    A name may have `…` at its end, and at its begin; without a file it is one of the file that was named before it, or,
    before any was named, of any file."""
    before: list[str] | None = None
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", line):
        span = " ".join(span.split())
        if (found := _NAMED.fullmatch(span)) is None or span == "…":
            continue
        if found["file"] and found["file"] != "…":
            before = files_of(found["file"])
            if not before:
                yield span
        name = found["name"] or found["only"]
        if name and before != []:
            wanted = re.compile(name.replace("…", r"\w*") + (r"\w*" if found["only"] else ""))
            having = all_tests() if before is None else before
            if not any(wanted.fullmatch(test) for path in having for test in all_tests()[path]):
                yield span


def lines(page: str) -> list[str]:
    """Rows of tables and paragraphs of its running text."""
    return [
        each
        for block in re.split(r"\n\s*\n", prose(page))
        for each in (block.splitlines() if block.lstrip().startswith("|") else [block])
    ]
