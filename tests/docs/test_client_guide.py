"""The examples of docs/client.md run as they stand."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from kvsidecar.client import types
from tests.docs.pages import fences, text
from tests.harness import SECONDS, DaemonProcess, environment

GUIDE = "docs/client.md"
EXAMPLES = fences(GUIDE, "python")
PROGRAM = [code for code in EXAMPLES if not code.startswith(("# with torch", "# on a GPU"))]


def run(program: str, daemon: DaemonProcess) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=SECONDS, env=environment(KVSIDECAR_SOCKET=daemon.socket),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_examples_are_one_program_that_runs(short_dir: Path) -> None:
    assert len(PROGRAM) > 5
    with DaemonProcess(short_dir, "--pool-size", "4MiB") as daemon:
        said = run("\n".join(PROGRAM), daemon)
    assert "3 blocks can be loaded" in said


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_the_example_with_torch_runs(short_dir: Path) -> None:
    (with_torch,) = [code for code in EXAMPLES if code.startswith("# with torch")]
    namespace = PROGRAM[0].partition("rows = ")[0]
    with DaemonProcess(short_dir, "--pool-size", "4MiB") as daemon:
        run(namespace + with_torch, daemon)


def test_the_example_for_a_gpu_is_python() -> None:
    (on_a_gpu,) = [code for code in EXAMPLES if code.startswith("# on a GPU")]
    ast.parse(on_a_gpu)


def test_every_reason_of_the_client_is_named() -> None:
    own = {value for name, value in vars(types).items() if name.isupper() and isinstance(value, str)}
    assert len(own) > 5
    assert {reason for reason in own if f"`{reason}`" not in text(GUIDE)} == set()
