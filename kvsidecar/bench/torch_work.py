"""The engine work that needs torch: a decode-like CUDA graph."""

from __future__ import annotations

import torch

BATCH = 32
HIDDEN = 8192
GEMMS = 64
WEIGHTS = 8
"""Number of weights, 128 MiB each, used in turn: more than the cache of any GPU, so each is read from memory as in
decoding."""


class DecodeGraph:
    """The GPU's work in a step of decoding: many small GEMMs that read weights, replayed from one CUDA graph."""

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

    def step(self) -> None:
        """Run one step, and wait for it."""
        self.issue()
        torch.cuda.synchronize()
