"""The engine work that needs torch: a decode-like CUDA graph, and large GEMMs."""

from __future__ import annotations

from itertools import pairwise

import torch

BATCH = 32
HIDDEN = 8192
GEMMS = 64
WEIGHTS = 8
"""Different ones, 128 MiB each, in turn: more than the cache of any GPU, so each is read from memory as in decoding."""
LARGE = 8192
ROUND = 20
"""Repeats between two synchronisations."""


class _Work:
    """Work that is submitted to the current stream and timed there."""

    def issue(self) -> None:
        raise NotImplementedError

    def step(self) -> None:
        """Once, and wait."""
        self.issue()
        torch.cuda.synchronize()

    def timed(self, repeats: int) -> list[float]:
        """Seconds of each of so many repeats, by events of the GPU."""
        for _ in range(3):
            self.step()
        seconds: list[float] = []
        while len(seconds) < repeats:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUND + 1)]
            marks[0].record()
            for mark in marks[1:]:
                self.issue()
                mark.record()
            torch.cuda.synchronize()
            seconds += [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]
        return seconds


class DecodeGraph(_Work):
    """A step of decoding as the GPU sees it: many small GEMMs that read weights, replayed from one CUDA graph."""

    def __init__(self) -> None:
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        # Scaled so that the states stay finite through any number of replays.
        self._weights = [torch.randn(HIDDEN, HIDDEN, **options) / HIDDEN**0.5 for _ in range(WEIGHTS)]
        self._states = [torch.randn(BATCH, HIDDEN, **options) for _ in range(2)]
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # cuBLAS allocates its workspace at the first call: not inside a capture
            self._gemms()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._gemms()

    def _gemms(self) -> None:
        for index in range(GEMMS):
            torch.mm(self._states[index % 2], self._weights[index % WEIGHTS], out=self._states[1 - index % 2])

    def issue(self) -> None:
        self._graph.replay()


class Gemm(_Work):
    """One large GEMM, bound by arithmetic, as in a prefill."""

    def __init__(self) -> None:
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        self._left, self._right, self._out = (torch.randn(LARGE, LARGE, **options) for _ in range(3))

    def issue(self) -> None:
        torch.mm(self._left, self._right, out=self._out)
