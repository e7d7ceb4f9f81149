"""Copies of the checkout, and what `make package` makes of them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.harness import environment

ROOT = Path(__file__).parents[2]
TAG = "v9.8.7"
WHEN = "2026-01-02T03:04:05Z"


def run(*command: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """Standard output of a command that succeeds."""
    env = {name: value for name, value in environment(**variables).items() if name != "PYTHONPATH"}
    ran = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, f"{command}: {ran.stdout}\n{ran.stderr}"
    return ran.stdout


def new_environment(directory: Path) -> Path:
    """The interpreter of a new environment. It has no pip, which takes longer to install than all else: see `pip`."""
    run(sys.executable, "-m", "venv", "--without-pip", directory)
    return directory / "bin" / "python"


def pip(python: Path, *arguments: str | Path) -> str:
    """Run this interpreter's pip on another environment."""
    return run(sys.executable, "-m", "pip", "--python", python, *arguments)


def git(directory: Path, *arguments: str) -> str:
    person = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.com"]
    return run("git", *person, *arguments, cwd=directory, GIT_COMMITTER_DATE=WHEN, GIT_AUTHOR_DATE=WHEN)


def copy_of_the_checkout(to: Path) -> Path:
    """Its files without the repository and without what git ignores."""
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, names):
        source = ROOT / name
        if not os.path.lexists(source):
            continue  # deleted, and not committed yet
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, to / name, follow_symlinks=False)
    return to


def repository(to: Path, *tags: str) -> Path:
    copy_of_the_checkout(to)
    git(to, "init", "--quiet")
    git(to, "add", "--all")
    git(to, "commit", "--quiet", "--message", "All of it")
    for tag in tags:
        git(to, "tag", tag)
    return to


def make_package(source: Path) -> dict[str, Path]:
    """What `make package` leaves in dist/, by name. The tools are those of this interpreter, into which nothing is
    installed."""
    bin_ = source / "venv" / "bin"
    bin_.mkdir(parents=True)
    (source / ".git" / "info" / "exclude").write_text("venv/\n")
    for name in ("python", "twine"):
        module = "" if name == "python" else "-m twine "
        (bin_ / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module}"$@"\n')
        (bin_ / name).chmod(0o755)
    stamp = source / "venv" / "all.stamp"
    stamp.touch()
    run("make", "--old-file", "venv/all.stamp", "VENV=venv", "package", cwd=source)
    return {path.name: path for path in (source / "dist").iterdir()}
