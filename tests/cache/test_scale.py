from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_benchmark_of_scale_measures_every_size_and_row() -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "scale.py"),
        "--blocks",
        "600",
        "2000",
        "--shards",
        "1",
        "2",
        "--samples",
        "2",
        "--json",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    results = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout)
    assert [(each["blocks"], each["shards"]) for each in results] == [(600, 1), (2000, 1), (600, 2), (2000, 2)]
    for each in results:
        assert len(each) == 2 + 22
        assert all(value > 0 for value in each.values())
