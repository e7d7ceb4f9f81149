"""Moves pieces of pages from the staging memory to where SGLang has them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

_log = logging.getLogger("kvsidecar.sglang")

Scatter = Callable[[int, torch.Tensor], None]
"""Starts to move the pieces in the slots from the first one on to these pages. Takes the first slot, and the pages'
numbers as int64."""


def scatter_for(tensors: Sequence[torch.Tensor], slots: torch.Tensor) -> Scatter:
    """Choose a scatter for these tensors.

    Args:
        tensors: int64 ``[pages, words of a piece]``, on one device.
        slots: int64 ``[slots, words]``, contiguous; a slot holds the pieces of one page one after another.
    """
    if slots.is_cuda:
        try:
            from kvsidecar.integrations.sglang.scatter_kernel import ScatterKernel

            return ScatterKernel(tensors, slots)
        except Exception as error:  # noqa: BLE001 - of a compiler that may be missing; torch's kernels do it as well
            _log.info("kvsidecar: no kernel of its own for the staging memory: %s", error)
    return ScatterByTensor(tensors, slots)


class ScatterByTensor:
    """A scatter with torch's kernels, one for each tensor: each takes the scheduler's thread 10 us."""

    def __init__(self, tensors: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        self._moves = list(zip(tensors, slots.split([each.shape[1] for each in tensors], 1), strict=True))

    def __call__(self, first: int, pages: torch.Tensor) -> None:
        for tensor, pieces in self._moves:
            tensor.index_copy_(0, pages, pieces[first : first + len(pages)])
