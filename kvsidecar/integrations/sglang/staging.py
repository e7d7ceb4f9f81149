"""GPU memory through which pages pass whose pieces are too small to be copied one by one.

A piece is the part of a page in one tensor, K or V of a layer: 2 KiB with pages of one token and eight heads. Each
tensor is an allocation of its own, so each piece is a copy of its own unless pages are adjacent, and small copies are
not issued as fast as the link moves them. Here all pieces of a page that belong to one part of the layers are adjacent,
as in the daemon's pool, and kernels of this process move them on to SGLang's tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch

from kvsidecar.client import GroupLayout
from kvsidecar.client.torch import TorchExporter, shared_empty
from kvsidecar.errors import NotExportable
from kvsidecar.integrations.rank_memory import RankMemory
from kvsidecar.integrations.sglang.groups import Groups, groups_of
from kvsidecar.integrations.sglang.pools import PagePool
from kvsidecar.integrations.sglang.scatter import Scatter, scatter_for
from kvsidecar.integrations.sglang.staged_load import MOST_PAGES, chunks_of, default_bytes

_log = logging.getLogger("kvsidecar.sglang")

WORD_BYTES = 8
"""Kernels move pieces by words of int64."""


class StagingMemory:
    """Slots for each slice of a page, registered like a KV cache of its own, into which the daemon loads.

    Args:
        groups: a single group, whose chunks are those of the loads through this memory.
        layout: the layout of the pages themselves.
        nbytes: most bytes to allocate; never more than two of the largest tiles take.

    Raises:
        ValueError: pages of this kind cannot pass through, or not even one fits into ``nbytes``.
        torch.OutOfMemoryError: the GPU has no room.
        NotExportable: the memory cannot be shared.
    """

    def __init__(self, pool: PagePool, groups: Groups, layout: GroupLayout, nbytes: int) -> None:
        (group,), self.groups = groups.all, groups
        pieces = [
            [_words(tensor[: pool.num_pages]) for layer in layers for tensor in pool.layers[layer]]
            for layers in group.slices.values()
        ]
        widths = [sum(piece.shape[1] for piece in mine) for mine in pieces]
        self.slots = min(nbytes // (WORD_BYTES * sum(widths)), 2 * MOST_PAGES)
        if self.slots < 2:
            raise ValueError(f"a page has {WORD_BYTES * sum(widths)} bytes, and the staging memory {nbytes}")
        self._device = pieces[0][0].device
        size = self.slots * sum(widths)
        self.nbytes = WORD_BYTES * size
        if self._device.type == "cuda":
            memory = torch.empty(size, dtype=torch.int64, device=self._device)
            # Not allocated by each load, which must not fail for want of memory.
            self._ids = torch.empty(pool.num_pages, dtype=torch.int64, device=self._device)
            # With high priority: a load waits for these short kernels, which would be queued after a long prefill's.
            self._stream = torch.cuda.Stream(self._device, priority=-1)
        else:
            memory = shared_empty((size,), torch.int64)
            self._ids = torch.empty(pool.num_pages, dtype=torch.int64)
            self._stream = None
        exporter = TorchExporter()
        regions, first = [], 0
        self._scatters: dict[int, Scatter] = {}
        for chunk, width, mine in zip(group.slices, widths, pieces, strict=True):
            slots = memory[first : first + self.slots * width].view(self.slots, width)
            first += self.slots * width
            regions.append(exporter.regions([slots]))
            with self._on_stream():
                self._scatters[chunk] = scatter_for(mine, slots)
        cuts = tuple(map(len, regions)) if len(regions) > 1 else ()
        flat = tuple(region for each in regions for region in each)
        own = GroupLayout(layout.group, self.slots, layout.shard, layout.num_shards, flat, cuts)
        self.memory = RankMemory(exporter.kv_buffers(), (own,))
        self._ended: dict[int, torch.cuda.Event] = {}
        """The end of the last move from each chunk's slots, as an event."""
        self._last: torch.cuda.Event | None = None
        self._behind: set[int] = set()
        """Streams that already wait for the last move: a forward asks for each layer."""

    def on_device(self, ids: npt.NDArray[np.int64]) -> torch.Tensor:
        """Page numbers in the form that `move` takes, valid until the next call."""
        with self._on_stream():
            return self._ids[: len(ids)].copy_(torch.from_numpy(ids))

    def move(self, chunk: int, first: int, pages: torch.Tensor) -> None:
        """Start to move this chunk's layers from its slots, from the first one on, to these pages."""
        with self._on_stream():
            self._scatters[chunk](first, pages)
            self._behind.clear()
            if self._stream is not None:
                self._last = self._ended[chunk] = self._stream.record_event()

    def wait_free(self, chunk: int) -> None:
        """Return when all moves from this chunk's slots have ended: the daemon may load into them again."""
        if (ended := self._ended.pop(chunk, None)) is not None:
            ended.synchronize()

    def keep_order(self) -> None:
        """Make all later work on this thread's current stream wait for all moves so far."""
        if self._last is None:
            return
        stream = torch.cuda.current_stream(self._device)
        if stream.cuda_stream not in self._behind:
            stream.wait_event(self._last)
            self._behind.add(stream.cuda_stream)

    def wait(self) -> None:
        """Return when all moves have ended."""
        if self._last is not None:
            self._last.synchronize()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def staging_for(
    pools: Sequence[PagePool], groups: Groups, layouts: Sequence[GroupLayout], nbytes: int | None
) -> StagingMemory | None:
    """The staging memory; None if the daemon loads directly into the pages.

    Args:
        nbytes: its size; 0 for none; None for the default if the pages are on a GPU and have small pieces.
    """
    if len(groups.all) != 1:
        return None
    pool = next(each for each in pools if each.name == groups.all[0].pool)
    pieces = [tensor[0].nbytes for each in pool.layers.values() for tensor in each]
    device = next(iter(pool.layers.values()))[0].device
    if nbytes is None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        nbytes = default_bytes(min(pieces), free)
    if not nbytes:
        return None
    num_chunks = chunks_of(sum(pieces), groups.num_chunks)
    per_head = {pool.name: groups.all[0].ranks_per_head}
    own = groups_of([(pool.name, pool.layers, pool.replicated)], groups.ends[-1], num_chunks, per_head)
    try:
        staging = StagingMemory(pool, own, layouts[0], nbytes)
    except (ValueError, NotExportable, torch.OutOfMemoryError) as error:
        _log.warning("kvsidecar: no staging memory: %s", error)
        return None
    _log.info("kvsidecar: %.0f MiB of staging memory: pages have small pieces", staging.nbytes / (1 << 20))
    return staging


def _words(pages: torch.Tensor) -> torch.Tensor:
    """``[pages, ...]`` as ``[pages, words]``. Raises ValueError if the bytes of a page are not contiguous."""
    if not pages[0].is_contiguous():
        raise ValueError(f"pages of shape {tuple(pages.shape)} have strides {pages.stride()}")
    try:
        return pages.view(len(pages), -1).view(torch.int64)
    except RuntimeError as error:
        raise ValueError(f"pages of {pages[0].nbytes} bytes are no whole words: {error}") from error
