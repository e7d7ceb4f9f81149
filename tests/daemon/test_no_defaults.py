"""No test starts a daemon on the machine's default HTTP port or socket: one may run there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]


def texts(node: ast.AST) -> set[str]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def starts(tree: ast.Module) -> Iterator[tuple[int, set[str]]]:
    """Line and texts of each function that has the command line of a daemon."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            found = texts(function)
            if {"serve", "--device", "--socket"} <= found or {"serve", "kvsidecar", "-m"} <= found:
                yield function.lineno, found


def test_every_daemon_of_a_test_has_a_socket_and_a_port_of_its_own() -> None:
    found = 0
    for file in sorted(TESTS.rglob("*.py")):
        for line, said in starts(ast.parse(file.read_text())):
            if file == Path(__file__) or "--help" in said:
                continue
            found += 1
            where = f"{file.relative_to(TESTS)}:{line}"
            assert "--socket" in said, f"{where} starts a daemon on the default socket"
            assert said & {"--http-port", "--http-port=0"}, f"{where} starts a daemon on the default HTTP port"
    assert found > 10
