"""An engine's own GPU work, timed while the daemon copies: ``python -m benchmarks.daemon.work``. Needs torch.

A process of its own: nothing else runs in it, so what it sees is the GPU and the driver.
"""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any, Protocol

import torch

from kvsidecar.bench.processes import serve
from kvsidecar.bench.torch_work import DecodeGraph

LARGE = 8192
ROUND = 20
"""Repeats between two synchronisations."""


class Work(Protocol):
    def issue(self) -> None:
        """Submit it once to the current stream."""


class Gemm:
    """One large GEMM, bound by arithmetic, as in a prefill."""

    def __init__(self) -> None:
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        self._left, self._right, self._out = (torch.randn(LARGE, LARGE, **options) for _ in range(3))

    def issue(self) -> None:
        torch.mm(self._left, self._right, out=self._out)


def timed(work: Work, repeats: int) -> list[float]:
    """Seconds of each of so many repeats, by events of the GPU."""
    for _ in range(3):
        work.issue()
    torch.cuda.synchronize()
    seconds: list[float] = []
    while len(seconds) < repeats:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUND + 1)]
        marks[0].record()
        for mark in marks[1:]:
            work.issue()
            mark.record()
        torch.cuda.synchronize()
        seconds += [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]
    return seconds


def main() -> None:
    made: dict[str, Work] = {}

    def run(kind: str, repeats: int) -> dict[str, Any]:
        if kind not in made:
            made[kind] = DecodeGraph() if kind == "decode" else Gemm()
        return {"seconds": timed(made[kind], repeats)}

    gc.disable()
    serve({"work": run})


if __name__ == "__main__":
    main()
