"""The protocols of a device: pinned host memory, imported engine memory, and streams that copy.

There are two implementations, ``device/cuda/`` and ``device/host.py``; one contract suite
(``tests/device/test_contract.py``) checks both against the words below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvsidecar.types import Direction

COPY = np.dtype(
    [
        ("device_address", np.uint64),
        ("device_pitch", np.uint64),
        ("host_offset", np.uint64),
        ("host_pitch", np.uint64),
        ("row_bytes", np.uint64),
        ("num_rows", np.uint64),
    ]
)
"""One copy. Rows of ``row_bytes`` lie ``device_pitch`` apart on the device and ``host_pitch`` apart in the pool, from
``host_offset`` bytes after the pool's base. A copy of one row is a plain copy; its pitches are not used."""


@dataclass(frozen=True, slots=True)
class CopyCall:
    """The copies of one driver call."""

    copies: npt.NDArray[np.void]
    """dtype `COPY`, shape ``(n,)``, n at least 1."""
    batched: bool
    """All have one row, and there are so many that a batch of plain copies is fastest."""
    nbytes: int


class CopyPlan(Protocol):
    """All copies of one job in one direction, handed out slice by slice. Used by one thread."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole plan."""

    def take(self, chunk: int | None) -> Sequence[CopyCall]:
        """The next calls, in any order; empty when there are none left.

        Args:
            chunk: the most bytes of one call (or one row more), if the copies must leave room for an engine's own.
        """

    def rewind(self) -> None:
        """Begin again: nothing that was taken was issued."""


@dataclass(frozen=True, slots=True)
class CudaIpcSource:
    """An allocation that another process exported with ``cuIpcGetMemHandle``."""

    handle: bytes
    """64 bytes. A bearer secret: never logged, never echoed."""


@dataclass(frozen=True, slots=True)
class MemfdSource:
    """Host memory that another process shares as a memfd. The file descriptor stays the caller's."""

    fd: int


@dataclass(frozen=True, slots=True)
class RangesSource:
    """Physical memory that another process shares: from ``cuMemCreate``; memfds on the device ``host``."""

    ranges: tuple[tuple[int, int], ...]
    """Descriptor and bytes of each handle, to be mapped back to back. The descriptors stay the caller's, and are not
    needed after the import."""

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.ranges)


@dataclass(frozen=True, slots=True)
class ScratchSource:
    """No engine's memory: the device's own, for a self-test."""

    nbytes: int


MemorySource = CudaIpcSource | MemfdSource | RangesSource | ScratchSource


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory that a copy may use as its device side: imported from an engine, or the daemon's own scratch."""

    address: int
    nbytes: int
    """Bytes of the whole allocation, as the driver or kernel knows it, not as the client claims."""
    key: bytes
    """Identifies the allocation on its device."""
    reservation: int = 0
    """Address of the reserved range that it is mapped in: a pitched copy may go on from one allocation to another of
    the same reservation. 0: it is alone, and no copy may leave it."""


class DeviceEvent(Protocol):
    """An engine's event, opened here: done when the compute that wrote a store's blocks is done."""

    def is_done(self) -> bool:
        """Whether the last recorded work is done, or the event is closed. Never blocks; may be called from any thread.

        Raises:
            CopyFailed: with ``outcome_known=True``: the event cannot be polled.
            DeviceLost: the context is gone.
        """

    def close(self) -> None: ...


class CopyMark(Protocol):
    """The end of an issued call, and of all before it. Used by the thread of its stream."""

    def is_done(self) -> bool:
        """Never blocks.

        Raises:
            CopyFailed: with ``outcome_known=False``.
            DeviceLost: the context is gone.
        """

    def seconds(self) -> float:
        """How long the device itself copied, for a call that was issued ``timed`` and is done; to be called once. Never
        raises: 0 if the device does not know."""


class PreparedCall(Protocol):
    """A call in the form that its stream issues; opaque to other code."""


class CopyStream(Protocol):
    """One direction of one device. Used by exactly one thread, the one that opened it."""

    def prepare(self, call: CopyCall, pool_address: int) -> PreparedCall:
        """Do all slow work, so that `issue` does not keep the link waiting. Nothing moves yet."""

    def issue(self, prepared: PreparedCall, *, alone: bool = False, timed: bool = True) -> CopyMark:
        """Start all copies of the call, behind those that were issued before.

        Args:
            alone: nothing is in flight, and nothing will be issued before this is done.
            timed: `CopyMark.seconds` will be called. Costs a few microseconds of a call that is alone.

        Raises:
            CopyFailed: with ``outcome_known=True`` if no issued copy can move a byte any more, False if that is not
                known.
            DeviceLost: the context is gone.
        """

    def is_done(self) -> bool:
        """Whether all that was ever issued is done, also calls that failed and so have no mark. Never blocks.

        Raises:
            CopyFailed: with ``outcome_known=False``: the device does not say.
            DeviceLost: the context is gone.
        """

    def close(self) -> None:
        """Nothing may be in flight."""


class Device(Protocol):
    """One GPU, or the host that stands in for one. Its methods may be called from any thread and may block."""

    @property
    def uuid(self) -> str:
        """``GPU-...`` as the driver and NVML print it, or ``host``."""

    def import_memory(self, source: CudaIpcSource | MemfdSource) -> DeviceMemory:
        """Map another process's allocation, or count one more use if it is mapped already.

        Raises:
            ImportRefused: the handle does not open. The device is unharmed.
            DeviceLost: the context is gone.
        """

    def import_ranges(self, sources: Sequence[RangesSource]) -> list[DeviceMemory]:
        """Map another process's allocations at a constant distance from each other, all or none of them.

        Raises:
            ImportRefused: one does not open, or has another size. The device is unharmed.
            DeviceLost: the context is gone.
        """

    def release_memory(self, memory: DeviceMemory) -> None:
        """Undo one `import_memory`, `import_ranges` or `allocate`. Unmaps at the last one. No copy may be using it.

        Raises:
            DeviceLost: the context is gone, and the mapping with it.
            ValueError: released more often than imported: a bookkeeping error of the caller.
        """

    def import_event(self, handle: bytes) -> DeviceEvent:
        """Open another process's event.

        Raises:
            ImportRefused: it does not open, or this device has none. The device is unharmed.
        """

    def allocate(self, nbytes: int) -> DeviceMemory:
        """The daemon's own device memory, for the self-test."""

    def open_stream(self, direction: Direction) -> CopyStream:
        """Called in the thread that will use the stream."""


class Platform(Protocol):
    """All devices of one kind on this node, and how host memory is pinned for them. May block."""

    @property
    def name(self) -> str:
        """``cuda`` or ``host``."""

    def device_uuids(self) -> tuple[str, ...]:
        """The UUID of every device to use, in the driver's order."""

    def device(self, uuid: str) -> Device:
        """The device with this UUID, always the same object. The first call creates what it needs (a CUDA context).

        Raises:
            DeviceNotFound: no such device is visible, and the text lists those that are; or it is a MIG device.
            DriverUnusable: its context cannot be made; the text says why.
        """

    def numa_node(self, uuid: str) -> int | None:
        """The host NUMA node nearest to a device; None where the system does not say. Creates no context."""

    def pin_limit(self) -> int | None:
        """Bytes that this process may pin; None if the platform has no limit of its own."""

    def pin(self, address: int, nbytes: int) -> None:
        """Pin one chunk of host memory for the device that is open. Both numbers are multiples of the page size.

        Raises:
            PinFailed: nothing of this chunk is pinned.
        """

    def unpin(self, address: int, nbytes: int) -> None:
        """Undo `pin` of exactly this chunk."""

    def close(self) -> None:
        """Release the contexts, after everything else."""
