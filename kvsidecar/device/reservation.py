"""Physical memory of another process, mapped at a constant distance in one reserved range of addresses.

So the layers of an engine that has an allocation for each of them are rows of one pitched copy, as if they lay in one
allocation. The driver copies across the handles of a reservation, and refuses it across allocations that were opened by
CUDA IPC, also where they lie at a constant distance (measured: docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvsidecar.device.base import DeviceMemory, RangesSource


class AddressSpace(Protocol):
    """What a device does with addresses. All sizes are in bytes."""

    granularity: int
    """Addresses and sizes of mappings are multiples of it."""

    def reserve(self, nbytes: int) -> int:
        """Returns the address of a range in which nothing is mapped."""

    def map(self, address: int, fd: int, nbytes: int) -> None:
        """Map a descriptor's memory, all of it, in a reserved range. Raises ImportRefused: nothing is mapped."""

    def permit(self, address: int, nbytes: int) -> None:
        """Let copies use what was mapped. Raises ImportRefused."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo `map` of adjacent ranges. The addresses stay reserved."""

    def free(self, address: int, nbytes: int) -> None:
        """Undo `reserve`. Nothing is mapped there."""


class Reservation:
    """The allocations of one import. Not thread-safe.

    Args:
        sources: at least one.
        number: no other reservation of the device has it; for the keys of the memories.

    Raises:
        ImportRefused: one of them cannot be mapped. Nothing is.
    """

    def __init__(self, space: AddressSpace, sources: Sequence[RangesSource], number: int) -> None:
        self._space = space
        largest = max(source.nbytes for source in sources)
        distance = -(-largest // space.granularity) * space.granularity
        self._nbytes = distance * len(sources)
        self._address = space.reserve(self._nbytes)
        self._mapped: dict[int, int] = {}
        """Address and bytes of what is mapped: of whole allocations, and of the beginning of one."""
        try:
            self.memories = [
                self._map(self._address + index * distance, source, b"ranges-%d-%d" % (number, index))
                for index, source in enumerate(sources)
            ]
        except BaseException:
            for address, nbytes in self._mapped.items():
                space.unmap(address, nbytes)
            space.free(self._address, self._nbytes)
            raise

    def _map(self, address: int, source: RangesSource, key: bytes) -> DeviceMemory:
        at = address
        for fd, nbytes in source.ranges:
            self._space.map(at, fd, nbytes)
            at += nbytes
            self._mapped[address] = at - address
        self._space.permit(address, source.nbytes)
        return DeviceMemory(address, source.nbytes, key, reservation=self._address)

    def release(self, memory: DeviceMemory) -> None:
        """Unmap one of the memories, which was not released before."""
        self._space.unmap(memory.address, self._mapped.pop(memory.address))
        if not self._mapped:
            self._space.free(self._address, self._nbytes)
