"""Writes what the image installs beside this project, in exact versions with hashes: `python -m deploy.image.lock`.

`requirements.txt` has the daemon's dependencies, `requirements-mooncake.txt` those of the image with a Mooncake client,
`requirements-build.txt` what builds the wheels. All are for the image's Python and every processor. Needs uv and PyPI.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
USUAL = ("events", "tracing")
EXTRAS = {"requirements.txt": USUAL, "requirements-mooncake.txt": (*USUAL, "mooncake")}
"""File -> extras of the daemon's distribution that the image has."""
FILES = (*EXTRAS, "requirements-build.txt")


def python() -> str:
    """The image's version, such as 3.12."""
    return str(re.findall(r"^ARG BASE=python:(\d+\.\d+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[0])


def wanted(file: str) -> list[str]:
    """The requirements of both distributions that one of `FILES` answers; without one another."""
    daemon, client = (_project(ROOT / "pyproject.toml"), _project(ROOT / "client" / "pyproject.toml"))
    if file not in EXTRAS:
        return sorted({*daemon["build-system"]["requires"], *client["build-system"]["requires"]})
    own: list[str] = daemon["tool"]["hatch"]["metadata"]["hooks"]["custom"]["dependencies"]
    extras = daemon["project"]["optional-dependencies"]
    return [*own, *client["project"]["dependencies"], *(each for name in EXTRAS[file] for each in extras[name])]


def _project(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def main() -> None:
    for file in FILES:
        options = ["--universal", "--python-version", python(), "--generate-hashes", "--no-annotate", "--upgrade"]
        command = ["uv", "pip", "compile", *options, "--quiet", "--output-file", str(HERE / file)]
        command += ["--custom-compile-command", "python -m deploy.image.lock", "-"]
        subprocess.run(command, input="\n".join(wanted(file)), text=True, check=True)


if __name__ == "__main__":
    main()
