"""Thousands of interleavings of stores, loads, flushes, deaths, expiries, evictions and faults, each from its seed.

One seed again: ``pytest tests/benchmarks/test_simulation.py --seed N``, or ``KVSIDECAR_SIM_SEED=N``. More of them:
``--runs N``, or ``KVSIDECAR_SIM_RUNS=N``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from benchmarks.simulation.run import Failed, simulate

BATCH = 50


def failures(seeds: Iterable[int]) -> list[str]:
    texts = []
    for seed in seeds:
        try:
            simulate(seed)
        except Failed as error:
            texts.append(str(error))
    return texts


@pytest.mark.timeout(0)
def test_no_interleaving_breaks_a_promise(only_seed: int | None, runs: int) -> None:
    if only_seed is not None:
        print(*simulate(only_seed).trace, sep="\n")
        return
    batches = [range(start, min(start + BATCH, runs)) for start in range(0, runs, BATCH)]
    # Not by fork: this process has threads of gRPC, which a fork would leave half alive.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for texts in pool.map(failures, batches):
            if texts:
                pool.shutdown(wait=False, cancel_futures=True)
                pytest.fail(texts[0], pytrace=False)


def test_the_same_seed_gives_the_same_trace_in_every_process() -> None:
    script = "from benchmarks.simulation.run import simulate; print([simulate(seed).digest for seed in range(8)])"
    # Python's hash seed orders sets of strings and bytes: no choice may come from that.
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert outputs == {f"{[simulate(seed).digest for seed in range(8)]}\n"}


def test_different_seeds_give_different_traces() -> None:
    assert len({simulate(seed).digest for seed in range(8)}) == 8
