"""The README's first commands work as they stand for an ordinary user, who may lock 8 MiB."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.harness import SECONDS, DaemonProcess, environment
from tests.marks import promise

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
LOCKS_8_MIB = [
    *(["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"] if os.geteuid() == 0 else []),
    *("sh", "-c", 'ulimit -l 8192 && exec "$@"', "sh"),
]
"""Runs a command with the limit that many systems give: root would otherwise lock as much as it likes."""


def commands(section: str) -> list[list[str]]:
    """Those that stand in a section of the README, word by word."""
    text = README.partition(f"## {section}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [words for line in "".join(blocks).splitlines() if (words := shlex.split(line, comments=True))]


FIRST = commands("Try the daemon without a GPU")


def run(words: list[str], **variables: str) -> str:
    """A command of the page, of this environment, as a user who may lock 8 MiB; what it prints."""
    assert words[0] in ("kvsidecar", "python"), "what else is installed here is not known"
    program = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "kvsidecar"]
    ran = subprocess.run(
        [*LOCKS_8_MIB, *program, *words[1:]],
        capture_output=True, text=True, timeout=SECONDS, cwd=ROOT, env=environment(**variables),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@promise("stores three blocks, finds them and loads them")
def test_the_first_commands_of_the_readme_work_for_a_user_who_may_lock_8_mib(short_dir: Path) -> None:
    (serve,) = [words for words in FIRST if words[:2] == ["kvsidecar", "serve"]]
    (engine,) = [words for words in FIRST if words[-1].endswith("engine.py")]
    (load,) = [words for words in FIRST if "examples/load.py" in words]
    paths = [words[-1].removeprefix("localhost:9464") for words in FIRST if words[0] == "curl"]
    with DaemonProcess(short_dir, *serve[2:], under=LOCKS_8_MIB) as daemon:
        daemon.wait_ready()
        said = run(engine, KVSIDECAR_SOCKET=daemon.socket)
        assert "3 blocks can be loaded" in said
        assert "state=<State.READY" in said
        said = run([*load[:2], "--seconds", "0.1"], KVSIDECAR_SOCKET=daemon.socket)
        assert "conversations, blocks of" in said
        assert "kvsidecar ready" in run(["kvsidecar", "status"], KVSIDECAR_SOCKET=daemon.socket)
        assert [(path, daemon.get(path)[0]) for path in paths] == [("/ready", 200), ("/metrics", 200)]


def test_the_demo_of_the_readme_works_for_a_user_who_may_lock_8_mib() -> None:
    (demo,) = [line for line in re.findall(r"^kvsidecar .*", README, re.MULTILINE) if line.startswith("kvsidecar demo")]
    assert "byte for byte" in run(shlex.split(demo, comments=True))


def test_a_user_who_may_lock_8_mib_is_one_here_too() -> None:
    """Otherwise the tests above would show nothing."""
    code = "from kvsidecar.support.memory_limits import memlock_limit as limit; print(limit())"
    ran = subprocess.run([*LOCKS_8_MIB, sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "8388608\n"
