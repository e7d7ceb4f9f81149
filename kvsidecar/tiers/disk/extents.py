"""Reads and writes extents of a file from and to the pool's memory, neighbouring ones in one call."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from kvsidecar.cache.arrays import Ints
from kvsidecar.errors import TierFailed
from kvsidecar.support import failpoints
from kvsidecar.support.units import format_size
from kvsidecar.tiers.shard_bytes import without_first

PAGE: Final = 4096
"""Direct I/O takes only multiples of this: addresses, offsets and lengths."""
CALL_BYTES: Final = 16 << 20
"""Most bytes of one call, unless a single extent has more: an error names what was read, and a hung disk is seen."""
CALL_EXTENTS: Final = 512
"""Most extents of one call; each takes up to two of the 1024 buffers that the kernel takes (IOV_MAX)."""

Call = Callable[[int, Sequence[memoryview], int], int]
Run = tuple[list[int], int]
"""Neighbouring extents of a call: their indices in the order of their offsets, and the first offset."""


class Unreadable(TierFailed):
    """The medium could not be read (EIO).

    Args:
        which: indices of the extents of the failed call.
    """

    def __init__(self, text: str, which: list[int]) -> None:
        super().__init__(text)
        self.which = which


class ExtentFile:
    """A file of extents. Its calls block; several threads may make them at once.

    Memory of an extent may be shorter than a multiple of `PAGE`: its last part goes through a page of this object, so
    that nothing beyond it is read or written.

    Args:
        direct: the file is open with O_DIRECT, and takes it.
        path: for errors.
    """

    def __init__(self, fd: int, path: str, *, direct: bool) -> None:
        self._fd = fd
        self._path = path
        self.direct = direct
        self._local = threading.local()

    def read(self, offsets: Ints, memory: Sequence[memoryview]) -> None:
        """Fill memory, each from the extent at its offset. All memory has one length. What lies beyond the end of the
        file is left as it is.

        Raises:
            TierFailed: what was to be filled is undefined.
        """
        nbytes, extent = _sizes(memory)
        for which, at in _runs(offsets, extent):
            pages = self._pages(len(which)) if nbytes % PAGE else None
            buffers = _buffers([memory[i] for i in which], pages)
            try:
                failpoints.hit("tier.read")
                self._move(os.preadv, buffers, at, extent * len(which))
            except (OSError, failpoints.FailpointError) as error:
                text = self._text("read", len(which) * extent, at, error)
                readable = isinstance(error, OSError) and error.errno != errno.EIO
                raise (TierFailed(text) if readable else Unreadable(text, which)) from error
            if pages is not None:
                for i, page in zip(which, pages, strict=False):
                    memory[i][nbytes - nbytes % PAGE :] = page[: nbytes % PAGE]

    def write(self, offsets: Ints, memory: Sequence[memoryview]) -> None:
        """Write memory, each to the extent at its offset. All memory has one length.

        Raises:
            TierFailed: the extents hold anything.
        """
        nbytes, extent = _sizes(memory)
        for which, at in _runs(offsets, extent):
            pages = self._pages(len(which)) if nbytes % PAGE else None
            if pages is not None:
                for i, page in zip(which, pages, strict=False):
                    page[: nbytes % PAGE] = memory[i][nbytes - nbytes % PAGE :]
            try:
                failpoints.hit("tier.write")
                done = self._move(os.pwritev, _buffers([memory[i] for i in which], pages), at, extent * len(which))
                if done < extent * len(which):
                    raise OSError(errno.EIO, f"only {done} bytes were written")
            except (OSError, failpoints.FailpointError) as error:
                raise TierFailed(self._text("write", len(which) * extent, at, error)) from error

    def _move(self, call: Call, buffers: list[memoryview], at: int, nbytes: int) -> int:
        """Repeat the call until this many bytes are moved, or it stops at the end of the file. Returns how many are."""
        done = 0
        while done < nbytes:
            moved = call(self._fd, buffers, at + done)
            done += moved
            if not moved or (self.direct and moved % PAGE):
                break
            if done < nbytes:
                buffers = without_first(buffers, moved)
        if not self.direct:
            os.posix_fadvise(self._fd, at, nbytes, os.POSIX_FADV_DONTNEED)
        return done

    def _pages(self, count: int) -> list[memoryview]:
        """Pages of this thread, at least this many."""
        pages: list[memoryview] | None = getattr(self._local, "pages", None)
        if pages is None or len(pages) < count:
            area = memoryview(mmap.mmap(-1, count * PAGE))
            pages = self._local.pages = [area[at : at + PAGE] for at in range(0, count * PAGE, PAGE)]
        return pages

    def _text(self, action: str, nbytes: int, at: int, error: OSError | failpoints.FailpointError) -> str:
        why = error.strerror if isinstance(error, OSError) else error
        return f"cannot {action} {format_size(nbytes)} at byte {at} of {self._path}: {why}"


def _sizes(memory: Sequence[memoryview]) -> tuple[int, int]:
    """Bytes of each piece of memory, and of its extent."""
    nbytes = memory[0].nbytes if memory else PAGE
    return nbytes, -(-nbytes // PAGE) * PAGE


def _runs(offsets: Ints, extent: int) -> list[Run]:
    if len(offsets) == 1:
        return [([0], int(offsets[0]))]
    most = max(1, min(CALL_BYTES // extent, CALL_EXTENTS))
    order = np.argsort(offsets, kind="stable")
    ends = (np.diff(offsets[order]) != extent).nonzero()[0] + 1
    bounds = [0, *ends.tolist(), len(order)]
    which = order.tolist()
    return [
        (which[at : min(at + most, end)], int(offsets[which[at]]))
        for start, end in pairwise(bounds)
        for at in range(start, end, most)
    ]


def _buffers(memory: list[memoryview], pages: list[memoryview] | None) -> list[memoryview]:
    """The buffers of a run, each followed by the page for its last part."""
    if pages is None:
        return memory
    pairs = zip(memory, pages, strict=False)
    return [part for each, page in pairs for part in (each[: each.nbytes // PAGE * PAGE], page) if part.nbytes]
