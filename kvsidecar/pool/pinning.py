"""Faults in and pins a mapped pool, chunk by chunk, and reports its progress: most of the time of a start.

Why faulting and pinning are apart: MADV_POPULATE_WRITE faults with several threads and returns an error where a touch
would be a SIGBUS; the driver faults with one thread. While a chunk is pinned, the next one is faulted in. Why chunks:
during one registration the kernel holds this process's ``mmap_lock``, so everything else in it that maps memory waits;
and one call on 512 GiB or more fails in current drivers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from kvsidecar.errors import PinFailed, PinStopped
from kvsidecar.support import failpoints, host_memory, log
from kvsidecar.support.memory_limits import Pages
from kvsidecar.support.threads import submit
from kvsidecar.support.units import MiB, format_size

_log = log.get("pool")

PREFAULT_BYTES: Final = 32 * MiB
"""The most that one call faults in. The call holds this process's ``mmap_lock``, for which an engine's attach has to
wait. (For the same reason these threads keep their priority: a thread of low priority that loses the CPU while it holds
the lock would delay an attach for seconds.)"""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of the pool that one call pins. ``offset`` counts from the pool's base."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PinProgress:
    """How far pinning has come. Bytes and seconds since the start of `HostPool.pin`."""

    total_bytes: int
    pinned_bytes: int
    bytes_per_second: float
    eta_seconds: float | None
    """None until the first chunk is pinned."""
    seconds: float
    register_seconds: float = 0.0
    """Time in calls of `Pinner.pin`. The kernel clears the pages of the next chunk meanwhile."""
    faulted_seconds: float = 0.0
    """When the last page so far was faulted in."""


class Pinner(Protocol):
    """Pins a pool; `kvsidecar.device.base.Platform` has the contract. Called in the thread of `HostPool.pin`."""

    @property
    def name(self) -> str: ...

    def pin_limit(self) -> int | None: ...

    def pin(self, address: int, nbytes: int) -> None: ...

    def unpin(self, address: int, nbytes: int) -> None: ...


class PinnedChunks:
    """The chunks of a pool, and which of them are pinned.

    Args:
        chunks: all of the pool, by offset.
        threads: number of threads that fault in.
        clock: seconds, monotonic.
    """

    def __init__(self, pinner: Pinner, chunks: Sequence[Chunk], threads: int, clock: Callable[[], float]) -> None:
        self._pinner, self._chunks, self._threads, self._clock = pinner, chunks, threads, clock
        self._total_bytes = sum([chunk.nbytes for chunk in chunks])
        self._address = 0
        self.pinned: list[Chunk] = []
        self.num_lost = 0
        """How many could not be unpinned."""
        self.small_bytes = 0
        """Bytes that have small pages, though huge ones were asked for."""

    def pin(
        self, address: int, pages: Pages, on_progress: Callable[[PinProgress], None], stop: threading.Event
    ) -> None:
        """Fault in and pin one chunk after the other. Returns when all are pinned; called once.

        Args:
            address: where the pool is mapped.
            on_progress: called in this thread, before the first chunk and after each.
            stop: looked at before each chunk.

        Raises:
            PinFailed: a chunk failed; those before it stay pinned.
            PinStopped: ``stop`` was set; the chunks so far stay pinned.
        """
        self._address = address
        started = self._clock()
        registering = faulted = 0.0
        chunks = self._chunks
        done = 0
        on_progress(self._progress(done, started, registering, faulted))
        # Leaving the block waits for all threads, also after a failure: nothing may be unmapped under one that still
        # touches it.
        with ThreadPoolExecutor(self._threads, thread_name_prefix="kvsidecar-prefault") as threads:
            faulting = [] if stop.is_set() else self._prefault(chunks[0], pages, threads)
            for number, chunk in enumerate(chunks, start=1):
                if stop.is_set():
                    raise PinStopped(f"pinning was stopped before chunk {number} of {len(chunks)}")
                try:
                    failpoints.hit("pool.prefault_chunk")
                    ends, small = zip(*(piece.result() for piece in faulting), strict=True)
                    faulted = max(ends) - started
                    self.small_bytes += sum(small)
                    if number < len(chunks):
                        faulting = self._prefault(chunks[number], pages, threads)
                    failpoints.hit("pool.pin_chunk")
                    began = self._clock()
                    self._pinner.pin(address + chunk.offset, chunk.nbytes)
                    registering += self._clock() - began
                except Exception as error:
                    where = f"{format_size(chunk.nbytes)} at {format_size(chunk.offset)}"
                    raise PinFailed(f"chunk {number} of {len(chunks)} ({where}): {reason_of(error)}") from error
                self.pinned.append(chunk)
                done += chunk.nbytes
                on_progress(self._progress(done, started, registering, faulted))

    def unpin(self) -> None:
        """Unpin all, in reverse order. What the driver refuses stays pinned, and is counted."""
        while self.pinned:
            chunk = self.pinned.pop()
            try:
                self._pinner.unpin(self._address + chunk.offset, chunk.nbytes)
            except Exception as error:  # noqa: BLE001 - the chunks before it must still be given back
                _log.error("a chunk cannot be unpinned", offset=chunk.offset, nbytes=chunk.nbytes, error=str(error))
                self.num_lost += 1

    def _prefault(self, chunk: Chunk, pages: Pages, threads: ThreadPoolExecutor) -> list[Future[tuple[float, int]]]:
        """Begin to fault a chunk in. It is there when all of these are done; each returns the time at which it was, and
        the result of `host_memory.populate`."""
        step = min(PREFAULT_BYTES, -(-chunk.nbytes // self._threads))
        step = -(-step // pages.nbytes) * pages.nbytes  # Two threads in one huge page would wait for each other.
        start, end = self._address + chunk.offset, self._address + chunk.offset + chunk.nbytes

        def populate(address: int, nbytes: int) -> tuple[float, int]:
            small = host_memory.populate(address, nbytes, pages.kind)
            return self._clock(), small

        pieces = range(start, end, step)
        return [submit(threads, partial(populate, piece, min(step, end - piece))) for piece in pieces]

    def _progress(self, done: int, started: float, registering: float, faulted: float) -> PinProgress:
        seconds = self._clock() - started
        rate = done / seconds if seconds > 0 else 0.0
        eta = (self._total_bytes - done) / rate if rate else None
        return PinProgress(self._total_bytes, done, rate, eta, seconds, registering, faulted)


def reason_of(error: Exception) -> str:
    """The error's text; an OSError's without its number, which means nothing to a person."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
