"""Every bug of `tests.planted` can be planted in the code as it is now."""

from __future__ import annotations

from tests.docs.pages import ROOT
from tests.planted.bugs import BUGS


def test_every_bug_can_be_planted_and_its_tests_exist() -> None:
    assert {bug.name: problem for bug in BUGS if (problem := bug.problem(ROOT))} == {}
    for bug in BUGS:
        before = (ROOT / bug.file).read_text()
        assert bug.plant(before) != before, bug.name
        if bug.file.endswith(".py"):
            compile(bug.plant(before), bug.file, "exec")
    assert len({bug.name for bug in BUGS}) == len(BUGS), "a line of the report could mean two"


def test_there_are_bugs_in_each_package_where_one_would_do_most_harm() -> None:
    packages = [bug.file.split("/")[1] for bug in BUGS]
    assert {name for name in packages if packages.count(name) >= 20} == {
        "cache",
        "client",
        "copier",
        "core",
        "integrations",
    }
