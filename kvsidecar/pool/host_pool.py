"""The host pool: reserve host memory, bind it to NUMA nodes and have it pinned; all of it or nothing.

Exactly the configured bytes: one file in memory, which other processes can map, registered chunk by chunk. No caching
allocator that rounds up. `kvsidecar.pool.pinning` faults the chunks in and pins them.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvsidecar.errors import PinFailed, PinStopped
from kvsidecar.pool.pinning import Chunk, PinnedChunks, Pinner, PinProgress, reason_of
from kvsidecar.support import failpoints, host_memory, log, memory_limits
from kvsidecar.support.memory_limits import ROOT, HugePages, PageKind, Pages
from kvsidecar.support.units import GiB, format_size

_log = log.get("pool")


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The pool to reserve. Sizes in bytes."""

    nbytes: int
    """A multiple of the system's page size."""
    slab_bytes: int
    """NUMA parts begin at multiples of it."""
    chunk_bytes: int = GiB
    """Pinned by one call of `Pinner.pin`; a multiple of ``slab_bytes``."""
    huge_pages: HugePages = HugePages.AUTO
    numa_nodes: tuple[int, ...] = ()
    """Nodes to split the pool over; empty: wherever the kernel puts it."""
    prefault_threads: int = 4
    memory_check: bool = True
    num_pins: int = 1
    """How many processes pin it: one for each device."""


@dataclass(frozen=True, slots=True)
class PoolPart:
    """Contiguous bytes of the pool that belong on one NUMA node. ``offset`` counts from the pool's base."""

    offset: int
    nbytes: int
    node: int | None


class HostPool:
    """The pinned memory of one daemon. Used once: after a failure, a stop or `close` it stays closed.

    `pin` and `close` block, and may be called from any thread; one runs at a time.

    Args:
        root: stands for ``/`` when limits are read.
        clock: seconds, monotonic.

    Raises:
        ValueError: the sizes of the spec do not fit together.
    """

    def __init__(
        self,
        spec: PoolSpec,
        platform: Pinner,
        *,
        root: Path = ROOT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if spec.nbytes <= 0 or spec.nbytes % mmap.PAGESIZE or spec.chunk_bytes % mmap.PAGESIZE:
            raise ValueError(f"pool and chunk must be multiples of the page size ({mmap.PAGESIZE} bytes)")
        if spec.slab_bytes <= 0 or spec.chunk_bytes <= 0 or spec.chunk_bytes % spec.slab_bytes:
            raise ValueError("chunk_bytes must be a multiple of slab_bytes")
        self._spec = spec
        self.nbytes = spec.nbytes
        self._platform = platform
        self._root = root
        self._lock = threading.Lock()
        self._used = False
        self._fd: int | None = None
        self._address: int | None = None
        self._pages: Pages | None = None
        self.numa_nodes: tuple[int, ...] = ()
        """Nodes that parts of the pool are bound to: empty on one node, before `pin`, or where binding was refused."""
        self._parts = split_over_nodes(spec.nbytes, spec.slab_bytes, self._nodes())
        chunks = list(_chunks(self._parts, spec.chunk_bytes))
        self._chunks = PinnedChunks(platform, chunks, spec.prefault_threads, clock)

    # -- facts ---------------------------------------------------------------------------------------------------------

    @property
    def address(self) -> int:
        """Address of the first byte. A RuntimeError before `pin` has reserved it and after it was given back."""
        if self._address is None:
            raise RuntimeError("the pool is not reserved")
        return self._address

    @property
    def fd(self) -> int:
        """The file, which stays the pool's. A RuntimeError when `address` is one."""
        if self._fd is None or self._address is None:
            raise RuntimeError("the pool is not reserved")
        return self._fd

    @property
    def pages(self) -> Pages:
        """The pages that were requested. A RuntimeError before `pin`."""
        if self._pages is None:
            raise RuntimeError("the pool is not reserved")
        return self._pages

    @property
    def page_kind(self) -> PageKind:
        """Kind of the pages that it got, at least most of it; known from `pin` on."""
        return PageKind.SMALL if self._chunks.small_bytes > self.nbytes / 2 else self.pages.kind

    def numa_of_slab(self) -> tuple[int | None, ...]:
        """The node that each ``slab_bytes`` are meant for, or None. Known before `pin`."""
        slab = self._spec.slab_bytes
        return tuple(part.node for part in self._parts for _ in range(0, part.nbytes, slab))

    @property
    def boundary(self) -> int:
        """Each chunk begins at a multiple of this many bytes."""
        return math.gcd(self._spec.chunk_bytes, *(part.offset for part in self._parts))

    def view(self) -> npt.NDArray[np.uint8]:
        """All bytes of the pool, not a copy. Using it after `close` is a segmentation fault."""
        return host_memory.as_array(self.address, self.nbytes)

    # -- pin and give back ---------------------------------------------------------------------------------------------

    def use(self, fd: int) -> None:
        """Pin this file instead of a new memfd; it becomes the pool's. What it holds stays. Call it before `pin`;
        the last one counts.

        Args:
            fd: of a file in memory that has the pool's size.
        """
        if self._fd is not None:
            os.close(self._fd)
        self._fd = fd

    def check(self) -> Pages:
        """The pages that the pool would have. Changes nothing.

        Raises:
            PoolRefused: it does not fit a limit, and ``memory_check`` is on; or its pages cannot be had here.
        """
        pages = self._choose_pages()
        if self._spec.memory_check:
            cuda = self._platform.name == "cuda"
            memory_limits.check_fits(
                self.nbytes,
                pages=pages,
                bookkeeping=memory_limits.bookkeeping_bytes(self.nbytes) * self._spec.num_pins if cuda else 0,
                pin_limit=self._platform.pin_limit(),
                node_bytes=self._node_bytes(),
                # What the file has already is not taken again.
                present=0 if self._fd is None else min(self.nbytes, os.fstat(self._fd).st_blocks * 512),
                root=self._root,
            )
        return pages

    def pin(
        self,
        on_progress: Callable[[PinProgress], None],
        stop: threading.Event,
        before_unpin: Callable[[], None] = lambda: None,
    ) -> None:
        """Reserve, bind, then prefault and pin chunk by chunk. Returns when the whole pool is pinned.

        Args:
            on_progress: called in this thread, before the first chunk and after each. Chunks are pinned in the order of
                their offsets. The pool is given back if it raises.
            stop: looked at before each chunk.
            before_unpin: called in this thread before chunks are given back. No copy may use them when it returns.

        Raises:
            PoolRefused: it does not fit a limit; nothing was touched.
            PinFailed: a chunk failed; everything before it has been given back.
            PinStopped: ``stop`` was set; everything has been given back.
        """
        with self._lock:
            if self._used:
                raise RuntimeError("a pool is pinned once")
            self._used = True
            try:
                pages = self.check()
                self._reserve(pages)
                self._bind()
                self._chunks.pin(self.address, pages, on_progress, stop)
                self._warn_of_small_pages(pages)
            except (PinFailed, PinStopped) as error:
                before_unpin()
                outcome = self._give_back()
                raise type(error)(f"{error}: {outcome}" if outcome else str(error)) from error.__cause__
            except BaseException:
                before_unpin()
                self._give_back()
                raise

    def close(self) -> None:
        """Unpin and unmap. Does nothing the second time. Waits for a running `pin`: set its ``stop`` first.

        No copy may be using the pool. Takes about as long as pinning: a process that only exits need not call it, the
        kernel does the same.

        Raises:
            PinFailed: some chunks could not be unpinned; everything else was.
        """
        with self._lock:
            self._used = True
            pinned = len(self._chunks.pinned)
            outcome = self._give_back()
            if self._chunks.num_lost:
                raise PinFailed(f"of {pinned} chunks, {outcome}")

    # -- steps -----------------------------------------------------------------------------------------------------

    def _nodes(self) -> tuple[int, ...]:
        bindable = memory_limits.numa_nodes(self._root)
        if len(bindable) < 2:
            return ()
        wanted = tuple(dict.fromkeys(self._spec.numa_nodes))
        if unusable := sorted(set(wanted) - bindable.keys()):
            _log.warning("NUMA nodes not used: not online, without memory, or outside the cpuset", nodes=unusable)
        return tuple(node for node in wanted if node in bindable)

    def _node_bytes(self) -> dict[int, int]:
        return {part.node: part.nbytes for part in self._parts if part.node is not None}

    def _choose_pages(self) -> Pages:
        wish = self._spec.huge_pages
        if self._fd is not None:
            huge_page_bytes = host_memory.huge_page_bytes(self._fd) or 0
            return memory_limits.pages_of_file(wish, self.nbytes, huge_page_bytes, self._root)
        candidates = memory_limits.page_candidates(wish, self.nbytes, self._root)
        for pages in candidates:
            if pages.kind is not PageKind.HUGETLB:
                return pages
            # mbind refuses to cut an explicit huge page in two.
            cut = any(part.offset % pages.nbytes for part in self._parts)
            if not cut and not memory_limits.hugetlb_problem(self.nbytes, pages.nbytes, self._node_bytes(), self._root):
                return pages
        return candidates[0]  # Explicit huge pages were asked for and do not fit: the check or the kernel says why.

    def _reserve(self, pages: Pages) -> None:
        self._pages = pages
        try:
            failpoints.hit("pool.reserve")
            if self._fd is None:
                self._fd = host_memory.create_file(self.nbytes, pages)
            self._address = host_memory.map_file(self._fd, self.nbytes, pages)
            # A core dump would hold every prompt of the node, and take the pool's size on disk.
            host_memory.advise(self._address, self.nbytes, mmap.MADV_DONTDUMP)
            # No child has a use for it, and one that lives on would keep the memory.
            host_memory.advise(self._address, self.nbytes, mmap.MADV_DONTFORK)
        except (OSError, failpoints.FailpointError) as error:
            raise PinFailed(f"{format_size(self.nbytes)} could not be reserved: {reason_of(error)}") from error

    def _bind(self) -> None:
        for part in self._parts:
            if part.node is None:
                continue
            try:
                host_memory.bind(self.address + part.offset, part.nbytes, part.node)
            except OSError as error:
                # Docker's default seccomp profile allows mbind only with CAP_SYS_NICE. A pool on the wrong node is
                # slower, not wrong.
                _log.warning("the pool is not bound to its NUMA node", node=part.node, error=reason_of(error))
            else:
                self.numa_nodes += (part.node,)

    def _warn_of_small_pages(self, pages: Pages) -> None:
        if pages.kind is not PageKind.HUGETLB and self._spec.huge_pages is not HugePages.NONE:
            small = self._chunks.small_bytes if pages.kind is PageKind.THP else self.nbytes
            if small >= memory_limits.THP_BYTES:
                tables = memory_limits.page_table_bytes(small)
                _log.warning(
                    "the pool has small pages",
                    bytes=format_size(small),
                    page_tables=f"{format_size(tables)} in each process that maps it",
                    hint=memory_limits.HUGE_PAGES_HINT,
                )

    def _give_back(self) -> str:
        """Unpin in reverse order and unmap. Returns the result in words, or "" if nothing was pinned."""
        pinned = len(self._chunks.pinned)
        self._chunks.unpin()
        lost = self._chunks.num_lost
        if self._address is not None and not lost:
            host_memory.unmap(self._address, self.nbytes)
        # Memory that the driver still has registered stays mapped: other memory at these addresses would silently be
        # copied from and to the old pages.
        self._address = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if lost:
            return f"{lost} could not be released; restart the daemon"
        return "the chunks before it were released" if pinned else ""


def split_over_nodes(nbytes: int, slab_bytes: int, nodes: tuple[int, ...]) -> tuple[PoolPart, ...]:
    """Cut a pool into one contiguous part per node, nearly equal in size.

    Parts begin at multiples of a unit: of ``slab_bytes`` and of a huge page (2 MiB). A pool of fewer units than nodes
    uses only some nodes.
    """
    unit = math.lcm(slab_bytes, memory_limits.THP_BYTES)
    nodes = nodes[: max(1, nbytes // unit)]
    if not nodes:
        return (PoolPart(0, nbytes, None),)
    starts = [nbytes // unit * index // len(nodes) * unit for index in range(len(nodes))]
    ends = [*starts[1:], nbytes]
    return tuple(PoolPart(start, end - start, node) for start, end, node in zip(starts, ends, nodes, strict=True))


def _chunks(parts: tuple[PoolPart, ...], chunk_bytes: int) -> Iterator[Chunk]:
    """The pieces that one call pins. A chunk never lies in two parts; the last of a part may be shorter."""
    for part in parts:
        end = part.offset + part.nbytes
        for offset in range(part.offset, end, chunk_bytes):
            yield Chunk(offset, min(chunk_bytes, end - offset))
