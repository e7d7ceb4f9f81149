"""`benchmarks.vllm.throughput` runs a model without offload and with it, and finds more of its prompts with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MODES = ("none", "kvsidecar")


def test_a_model_runs_without_offload_and_with_it_and_hits_more_with_it(model: str, tmp_path: Path) -> None:
    results = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.vllm.throughput", "--tiny", "--model", model, "--full", "0"]
    command += ["--modes", ",".join(MODES), "--json", str(results)]
    ran = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ran.returncode == 0, ran.stdout
    found = json.loads(results.read_text())["modes"]
    without, with_it = (found[f"{mode}, empty"][0] for mode in MODES)
    assert with_it["requests"] == without["requests"] > 0
    assert with_it["cached_tokens"] > 2 * without["cached_tokens"], "as many times does the GPU hold too little"
    assert all(f"│ {mode}, empty " in ran.stdout for mode in MODES)
