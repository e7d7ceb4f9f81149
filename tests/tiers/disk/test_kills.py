"""A tier's process that is killed at any instant: the next one reads the bytes that were written, or misses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.marks import processes

pytestmark = processes

ROOT = Path(__file__).parents[3]


def kills(directory: Path, count: int, *options: str) -> dict[str, int]:
    # One thread: the process forks.
    answer = subprocess.run(
        [sys.executable, "-m", "tests.tiers.disk.kill_and_reopen", directory, "--kills", str(count), *options],
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    result: dict[str, int] = json.loads(answer.stdout)
    return result


def test_after_each_of_200_kills_every_shard_that_is_read_has_the_bytes_that_were_written(tmp_path: Path) -> None:
    result = kills(tmp_path / "tier", 200)
    # Nothing corrupt either: that a record is of a whole extent does not depend on the checksums.
    assert (result["WRONG"], result["CORRUPT"]) == (0, 0)
    assert result["DONE"] > 5 * 200
    assert result["removes"] > 0


def test_if_records_are_never_unsealed_the_checksums_find_it(tmp_path: Path) -> None:
    result = kills(tmp_path / "tier", 40, "--never-unseal")
    assert result["CORRUPT"] > 0
    assert result["WRONG"] == 0


def test_the_same_kills_read_wrong_bytes_if_nothing_is_verified(tmp_path: Path) -> None:
    assert kills(tmp_path / "tier", 40, "--never-unseal", "--never-verify")["WRONG"] > 0
