"""The program tells what became of each bug, and leaves the tree as it is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.planted import __main__ as planted
from tests.planted.bugs import Bug

TESTS = Path(__file__).parents[1]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository of one function, and its test."""
    for name in ("__init__.py", "planted/__init__.py", "planted/examples.py"):
        (target := tmp_path / "tests" / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(TESTS / name, target)
    (tmp_path / "tests" / "conftest.py").write_text("")
    (tmp_path / "code_of_tree.py").write_text("def twice(n):\n    count = 1\n    return n + n\n")
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["alone", "torch"]\n')
    (tmp_path / "tests" / "test_code.py").write_text(
        "from code_of_tree import twice\n\n\ndef test_twice():\n    assert twice(3) == 6\n"
    )
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def bug(name: str, old: str, new: str, test: str = "tests/test_code.py") -> Bug:
    return Bug(name, "code_of_tree.py", old, new, (test,))


FOUND = bug("adds nothing", "n + n", "n")
SURVIVES = bug("counts wrongly", "count = 1", "count = 2")
HANGS = bug("never ends", "    return", "    while True:\n        pass\n    return")
GONE = bug("of earlier code", "n * 2", "n * 3")
BREAKS = bug("cannot be imported", "def twice", "import nothing_of_this_name\n\n\ndef twice")


def run(tree: Path, capsys: pytest.CaptureFixture[str], *bugs: Bug) -> tuple[int, list[str]]:
    before = {path: path.read_bytes() for path in tree.rglob("*.py")}
    status = planted.main([], bugs, tree)
    assert {path: path.read_bytes() for path in tree.rglob("*.py")} == before, "the tree itself was changed"
    return status, capsys.readouterr().out.splitlines()


def test_a_bug_that_is_found_is_reported_with_the_test_that_found_it(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = run(tree, capsys, FOUND)
    assert lines[0].startswith("found")
    assert "adds nothing: tests/test_code.py::test_twice" in lines[0]
    assert (status, lines[-1]) == (0, "1 of 1 planted bugs are found")


def test_a_bug_that_hangs_is_found(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planted, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(planted, "LONGER", 1.0)
    status, lines = run(tree, capsys, HANGS)
    assert lines[0].startswith("hangs")
    assert status == 0


@pytest.mark.parametrize(("each", "says"), [(SURVIVES, "SURVIVES"), (GONE, "is no more"), (BREAKS, "does not run")])
def test_a_bug_that_is_not_found_or_not_planted_is_a_failure(
    tree: Path, capsys: pytest.CaptureFixture[str], each: Bug, says: str
) -> None:
    status, lines = run(tree, capsys, each)
    assert status == 1
    assert lines[0].startswith(says)
    assert lines[-1] == "0 of 1 planted bugs are found"


def test_tests_that_fail_anyway_find_nothing(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "code_of_tree.py").write_text("def twice(n):\n    return n + 1\n")
    status, lines = run(tree, capsys, bug("adds nothing", "n + 1", "n"))
    assert status == 1
    assert lines[0] == "without any bug tests/test_code.py exits with 1:"
