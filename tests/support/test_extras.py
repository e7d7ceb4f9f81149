from __future__ import annotations

import re
import shlex
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from kvsidecar.support import extras

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("extra", PROJECT["optional-dependencies"])
def test_an_error_names_what_the_extra_brings_which_pip_finds_wherever_kvsidecar_is_from(extra: str) -> None:
    words = shlex.split(extras.install(extra))
    assert words[:2] == ["pip", "install"]
    wanted = {re.split(r"[<>=;]", line)[0] for line in PROJECT["optional-dependencies"][extra]}
    assert {re.split(r"[<>=]", word)[0] for word in words[2:]} == wanted
    assert all(re.search(r"[<>=]\d", word) for word in words[2:])


def test_files_that_were_not_installed_say_what_to_do_in_their_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert extras.install("events") == "pip install ./client '.[events]' in a checkout"


def test_no_text_names_an_extra_of_what_no_registry_has() -> None:
    texts = {path: path.read_text() for path in (ROOT / "kvsidecar").rglob("*.py")}
    assert [path for path, text in texts.items() if re.search(r"install '?kvsidecar\b", text)] == []
