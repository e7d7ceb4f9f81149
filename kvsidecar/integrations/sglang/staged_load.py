"""A load by way of the staging memory, tile by tile. Pure; see `kvsidecar.integrations.sglang.staging`.

A tile is a range of the pages, of a chunk's layers. Tiles are loaded in the order of the layers, and moved on in the
same order. A chunk whose pages find room in its slots is one tile, unless they are many. Otherwise it has two places
for tiles: while one is loaded, the other one is moved on.
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
    """See `kvsidecar.integrations.sglang.staging.Staging`."""

    slots: int
    groups: Groups
    memory: RankMemory

    def on_device(self, ids: npt.NDArray[np.int64]) -> Any: ...
    def move(self, chunk: int, first: int, pages: Any) -> None: ...
    def wait_free(self, chunk: int) -> None: ...
    def keep_order(self) -> None: ...
    def wait(self) -> None: ...


SMALL_PIECE_BYTES = 128 << 10
"""What one tensor has of a page: less is copied more slowly than the link allows where pages do not lie side by
side."""
DEFAULT_BYTES = 1 << 30
"""A larger load comes in tiles of half of this, which is 10 ms on the link; each takes the scheduler's thread half a
millisecond."""
DEFAULT_SHARE = 8
"""By default at most this part of what SGLang has left free, which its forward needs as well."""
LEAST_CHUNKS = 3
CHUNK_BYTES = 64 << 10
"""A load has one chunk per so many bytes of a page: each is a job that takes the daemon a microsecond per page."""
MOST_PAGES = 4096
"""Of a tile. The daemon takes a microsecond for each before it copies the first one, so it prepares one tile while
the one before is copied."""
MOST_TILES = 4
"""On their way at once, so that the link has work while the first ones are moved on."""


def default_bytes(piece_bytes: int, free: int) -> int:
    """Bytes of the staging memory of a GPU; 0: pages are loaded directly.

    Args:
        piece_bytes: the least that a tensor has of a page.
        free: bytes that SGLang has left free.
    """
    return 0 if piece_bytes >= SMALL_PIECE_BYTES else min(DEFAULT_BYTES, free // DEFAULT_SHARE)


def chunks_of(page_bytes: int, most: int) -> int:
    """The number of chunks of a load by way of the staging memory: at most ``most``."""
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
        """Those that have not been moved on, with their jobs."""
        self.jobs: list[int] = []
        """Of all tiles that were sent."""
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
        """The job of the tile that is to be moved on next; None if all have been."""
        return self._sent[0][1] if self._sent else None

    def is_beyond(self, layer: int) -> bool:
        """Whether that tile's layers come after this one."""
        return self._sent[0][0].chunk > self._staging.groups.chunk_of(layer)

    def move(self) -> None:
        """Start to move it on: its job has ended well."""
        tile, _ = self._sent.popleft()
        self._staging.move(tile.chunk, tile.slot, self._pages[tile.first : tile.end])
