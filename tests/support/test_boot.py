from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvsidecar.support.boot import boot_offset, boot_time
from tests.harness import environment
from tests.marks import processes

ELSEWHERE = ["unshare", "--user", "--map-root-user", "--time", "--boottime", "86400"]
"""Runs what follows in a time namespace whose clock is a day ahead."""


@processes
def test_the_time_since_the_boot_is_the_same_in_every_time_namespace() -> None:
    try:
        subprocess.run([*ELSEWHERE, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no time namespace: {error}")
    program = "from kvsidecar.support.boot import boot_time; print(boot_time())"
    before = boot_time()
    ran = subprocess.run(
        [*ELSEWHERE, sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment()
    )
    assert before < float(ran.stdout) < boot_time()


@pytest.mark.parametrize(
    ("text", "offset"),
    [
        ("monotonic           0         0\nboottime            0         0\n", 0),
        ("monotonic    3        4\nboottime        86400         7\n", 86400 * 10**9 + 7),
        ("monotonic    3        4\nboottime        -5         500000000\n", -4_500_000_000),
        ("monotonic    3        4\n", 0),
    ],
)
def test_the_offset_of_a_time_namespace_is_what_the_kernel_says(tmp_path: Path, text: str, offset: int) -> None:
    (offsets := tmp_path / "timens_offsets").write_text(text)
    assert boot_offset(offsets) == offset


def test_a_kernel_without_time_namespaces_has_no_offset(tmp_path: Path) -> None:
    assert boot_offset(tmp_path / "timens_offsets") == 0
