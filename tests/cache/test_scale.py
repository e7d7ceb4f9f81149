from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.marks import processes

pytestmark = processes

ROOT = Path(__file__).parents[2]


def measure(*options: str) -> list[dict[str, float]]:
    command = [sys.executable, str(ROOT / "benchmarks" / "scale.py"), *options, "--samples", "2", "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
    results: list[dict[str, float]] = json.loads(done.stdout)
    return results


def test_the_benchmark_of_scale_measures_every_size_and_row() -> None:
    results = measure("--blocks", "600", "2000", "--shards", "1", "2")
    assert [(each["blocks"], each["shards"]) for each in results] == [(600, 1), (2000, 1), (600, 2), (2000, 2)]
    for each in results:
        assert len(each) == 2 + 22
        assert all(value > 0 for value in each.values())


def test_with_records_it_also_measures_how_long_it_takes_to_take_all_blocks_over() -> None:
    (result,) = measure("--blocks", "600", "--shards", "2", "--records")
    assert len(result) == 2 + 22 + 3
    assert result["adopt"] > 0
    assert result["adopt_peak"] >= result["adopted"]
