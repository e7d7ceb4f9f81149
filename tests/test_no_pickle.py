"""Nothing that runs code from bytes: the first cause of the CVEs of comparable systems (docs/security.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvsidecar

FORBIDDEN = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
SOURCES = sorted(Path(kvsidecar.__file__).parent.rglob("*.py"))


def dangers(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (each.name for each in names if each.name.split(".")[0] in FORBIDDEN)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in FORBIDDEN:
                yield module
            case ast.Call(func=ast.Name(id=("eval" | "exec") as name)):
                yield name
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                yield "allow_pickle"


def test_nothing_of_the_package_unpickles_or_evaluates() -> None:
    assert len(SOURCES) > 50
    assert {str(path): found for path in SOURCES if (found := list(dangers(path.read_text())))} == {}


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from pickle import loads", "import numpy, dill.source", "eval('1')", "f(x, allow_pickle=True)"],
)
def test_what_is_forbidden_is_found(line: str) -> None:
    assert list(dangers(line))
