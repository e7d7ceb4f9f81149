"""A load through the staging memory, tile by tile. Pure; see `kvsidecar.integrations.sglang.staging`.

A tile is a range of the pages in a chunk's layers. Tiles are loaded in the order of the layers, and moved on in the
same order. A chunk whose pages fit into its slots is one tile, up to `MOST_PAGES`. Otherwise it has two places for
tiles: while one is loaded, the other one is moved on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvsidecar.integrations.rank_memory import RankMemory
from kvsidecar.integrations.sglang.groups import Groups


class Staging(Protocol):
    """See `kvsidecar.integrations.sglang.staging.StagingMemory`."""

    slots: int
    groups: Groups
    memory: RankMemory

    def on_device(self, ids: npt.NDArray[np.int64]) -> Any: ...
    def move(self, chunk: int, first: int, pages: Any) -> None: ...
    def wait_free(self, chunk: int) -> None: ...
    def keep_order(self) -> None: ...
    def wait(self) -> None: ...


SMALL_PIECE_BYTES = 128 << 10
"""Bytes of a page in one tensor below which copies are slower than the link allows, unless pages are adjacent."""
DEFAULT_BYTES = 1 << 30
"""Default size of the staging memory. A larger load is cut into tiles of half of this, which is 10 ms on the link; each
takes the scheduler's thread half a millisecond."""
DEFAULT_SHARE = 8
"""Divisor of the memory that SGLang has left free, which its forward needs as well: the default size is at most this
part of it."""
LEAST_CHUNKS = 3
CHUNK_BYTES = 64 << 10
"""Bytes of a page for each chunk of a load: each chunk is a job that takes the daemon a microsecond per page."""
MOST_PAGES = 4096
"""Most pages in a tile. The daemon takes a microsecond for each before it copies the first one, so it prepares one tile
while the one before is copied."""
MOST_TILES = 4
"""Most tiles on their way at once, so that the link has work while the first ones are moved on."""


def default_bytes(piece_bytes: int, free: int) -> int:
    """Bytes of the staging memory of a GPU; 0: pages are loaded directly.

    Args:
        piece_bytes: bytes of a page in the tensor with the fewest.
        free: bytes that SGLang has left free.
    """
    return 0 if piece_bytes >= SMALL_PIECE_BYTES else min(DEFAULT_BYTES, free // DEFAULT_SHARE)


def chunks_of(page_bytes: int, most: int) -> int:
    """The number of chunks of a load through the staging memory: at most ``most``."""
    return min(most, max(LEAST_CHUNKS, page_bytes // CHUNK_BYTES))


@dataclass(frozen=True, slots=True)
class Tile:
    """Layers of a chunk, for pages ``[first, end)`` of the load, on their way through slots from ``slot`` on."""

    chunk: int
    first: int
    end: int
    slot: int


def tiles_of(pages: int, slots: int, chunks: Iterable[int]) -> Iterator[Tile]:
    size = min(slots, MOST_PAGES)
    if pages > size:
        size = min(slots // 2, MOST_PAGES)
    for chunk in chunks:
        for number, first in enumerate(range(0, pages, size)):
            yield Tile(chunk, first, min(pages, first + size), number % 2 * size)


class StagedLoad:
    """The tiles of one batch.

    Args:
        pages: the load's pages, in order, on the device.
        send: starts to load a tile, and returns its job.
    """

    def __init__(self, staging: Staging, pages: Any, send: Callable[[Tile], int]) -> None:
        self._staging, self._pages, self._send = staging, pages, send
        self._waiting = deque(tiles_of(len(pages), staging.slots, staging.groups.all[0].slices))
        self._sent: deque[tuple[Tile, int]] = deque()
        """Tiles that have not been moved on, with their jobs."""
        self.jobs: list[int] = []
        """Jobs of all tiles that were sent."""
        self.keep_order, self.wait = staging.keep_order, staging.wait

    def send(self) -> None:
        """Start to load all tiles for which there is room."""
        while self._waiting and len(self._sent) < MOST_TILES:
            tile = self._waiting[0]
            if any((each.chunk, each.slot) == (tile.chunk, tile.slot) for each, _ in self._sent):
                return
            self._waiting.popleft()
            self._staging.wait_free(tile.chunk)
            job = self._send(tile)
            self._sent.append((tile, job))
            self.jobs.append(job)

    @property
    def uses_slots(self) -> bool:
        """Whether there are tiles that have not been moved on."""
        return bool(self._sent or self._waiting)

    def next_job(self) -> int | None:
        """The job of the next tile to move on; None if all have been."""
        return self._sent[0][1] if self._sent else None

    def is_beyond(self, layer: int) -> bool:
        """Whether the next tile's layers come after this layer."""
        return self._sent[0][0].chunk > self._staging.groups.chunk_of(layer)

    def move(self) -> None:
        """Start to move the next tile on, whose job has succeeded."""
        tile, _ = self._sent.popleft()
        self._staging.move(tile.chunk, tile.slot, self._pages[tile.first : tile.end])
