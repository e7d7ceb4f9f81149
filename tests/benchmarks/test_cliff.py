"""The picture of the cliff, from its figures."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks.fleet import cliff
from benchmarks.fleet.policies import CLAIRVOYANT, POLICIES

EXCERPT = Path("tests/benchmarks/agentic_excerpt.jsonl")
RESULT = {
    "sessions": [1, 2, 4],
    "pool_tokens": 500_000,
    CLAIRVOYANT: [0.9, 0.8, 0.6],
    "rhythm": [0.9, 0.7, 0.41],
    "lru": [0.9, 0.5, 0.4],
}


def test_every_policy_has_a_line_that_falls_and_a_name_that_touches_no_other() -> None:
    picture = ET.fromstring(cliff.svg(RESULT))
    space = "{http://www.w3.org/2000/svg}"
    lines = [path.get("d") or "" for path in picture.iter(f"{space}path") if path.get("class") != "grid"]
    assert len(lines) == len(cliff.LINES) == len(POLICIES) + 1
    for line in lines:
        heights = [float(point.split()[1]) for point in re.split("[ML]", line)[1:]]
        assert heights == sorted(heights), "lower on the page is less"
    names = [float(text.get("y") or 0) for text in picture.iter(f"{space}text") if "name" in (text.get("class") or "")]
    assert all(below - above >= 20 for above, below in zip(sorted(names), sorted(names)[1:], strict=False))
    assert "With 1, 2, 4 sessions at once: what is possible 90 %, 80 %, 60 %" in cliff.svg(RESULT)
    assert "prefers-color-scheme: dark" in cliff.svg(RESULT)


def test_the_command_measures_and_draws_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures, picture, again = (str(tmp_path / name) for name in ("cliff.json", "cliff.svg", "again.svg"))

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["cliff", *arguments])
        cliff.main()

    run("--agentic", str(EXCERPT), "--sessions", "1,3", "--pool-tokens", "30000", "--hours", "1", "--jobs", "1",
        "--json", figures, "--plot", picture)  # fmt: skip
    run("--show", figures, "--plot", again)
    assert Path(picture).read_text() == Path(again).read_text()
    result = json.loads(Path(figures).read_text())
    assert all(0 < share < 1 for name in (*POLICIES, CLAIRVOYANT) for share in result[name])
    assert all(result[CLAIRVOYANT][at] >= result[name][at] for name in POLICIES for at in range(2))


def test_the_picture_on_the_readme_is_that_of_its_figures() -> None:
    (figures,) = Path("benchmarks/results").glob("fleet-*-cliff.json")
    assert cliff.svg(json.loads(figures.read_text())) == Path("docs/images/cliff.svg").read_text()
