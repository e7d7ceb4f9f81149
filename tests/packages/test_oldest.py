"""The daemon of SGLang's tests runs on the oldest packages that pyproject.toml allows."""

from __future__ import annotations

import tomllib

from packaging.requirements import Requirement
from packaging.version import Version

from tests.packages.support import ROOT

OTHERS = {"click", "cuda-python", "numpy", "protobuf", "pydantic", "rich"}
"""Packages of which SGLang and what it imports want a newer one, and one that nothing imports without a GPU."""


def lists() -> list[Requirement]:
    daemon = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    client = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())["project"]
    return [Requirement(each) for each in (*daemon["dependencies"], *client["dependencies"])]


def test_what_is_installed_for_sglangs_tests_is_the_oldest_that_is_allowed() -> None:
    lines = (ROOT / "tests" / "sglang" / "requirements.txt").read_text().splitlines()
    pins = {each.name: each.specifier for each in map(Requirement, (line for line in lines if line[:1].isalpha()))}
    for each in lists():
        if each.name not in OTHERS:
            (oldest,) = (Version(bound.version) for bound in each.specifier if bound.operator == ">=")
            assert list(pins[each.name].filter([oldest])) == [oldest], f"{each.name}: {pins[each.name]}, not {oldest}"
