"""docs/code.md draws the packages that there are, in the order in which they may import, and names files that exist."""

from __future__ import annotations

import re
import tomllib

from tests.docs.pages import ROOT, fences, spans

PAGE = "docs/code.md"
PACKAGE = ROOT / "kvsidecar"


def drawn() -> list[set[str]]:
    """The packages and modules of each line, from the top."""
    lines = fences(PAGE, "text")[0].splitlines()
    return [set(re.split(r" {2,}", line)[0].split(" | ")) for line in lines]


def missing(names: list[str]) -> list[str]:
    """Of what looks like a path, what is neither in the package nor in the repository."""
    paths = [name for name in names if re.fullmatch(r"[\w./]+(?:/|\.(?:py|md|proto))", name)]
    return [path for path in paths if not ((PACKAGE / path).exists() or (ROOT / path).exists())]


def test_the_drawing_has_the_layers_of_the_import_contract_in_their_order() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    assert drawn() == [set(layer.split(" | ")) for layer in layers if layer != "__main__"]


def test_the_drawing_has_every_package() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= set().union(*drawn())


def test_every_path_exists() -> None:
    assert missing(spans(PAGE)) == []


def test_a_path_that_does_not_exist_is_seen() -> None:
    assert missing(["cache/victims.py", "types.py", "client/", "proto/", "a/renamed.py", "gone/"]) == [
        "a/renamed.py",
        "gone/",
    ]


def test_the_ten_changes_begin_in_a_file_of_the_package_that_the_ways_lead_through() -> None:
    text = (ROOT / PAGE).read_text()
    ways, _, changes = text.partition("## Ten changes")
    begins = re.findall(r"^\| (?!To|---)[^|]+\| `([\w./]+)`", changes, re.MULTILINE)
    assert len(begins) == 10
    for path in begins:
        package = path.split("/")[0]
        assert re.search(rf"\b{re.escape(package.removesuffix('.py'))}\b", ways), path
