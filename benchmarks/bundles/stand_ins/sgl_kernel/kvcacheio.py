"""HiCache's copies between its pool and the GPU with the backend ``direct`` and the layout ``layer_first``. The backend
``kernel`` needs none from here: SGLang compiles its own."""

import itertools
from typing import Any

import torch

from . import _find


def transfer_kv_direct(
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """As the original: a copy of each layer for each run of rows that lie side by side on both ends. That one is C++,
    which takes less of the scheduler's thread."""
    # `page_size` is not needed: a page is a run, or a part of one.
    src, dst = src_indices.cpu(), dst_indices.cpu()
    ends = ((src.diff() != 1) | (dst.diff() != 1)).nonzero().flatten() + 1
    for first, end in itertools.pairwise([0, *ends.tolist(), len(src)]):
        if first == end:  # there is none
            continue
        rows = end - first
        at_src, at_dst = int(src[first]), int(dst[first])
        for one, other in zip(src_layers, dst_layers, strict=True):
            other[at_dst : at_dst + rows].copy_(one[at_src : at_src + rows], non_blocking=True)


def __getattr__(name: str) -> Any:
    return _find(name)
