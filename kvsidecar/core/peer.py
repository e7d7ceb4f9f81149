"""A client that the kernel has identified, by the attach socket or on a gRPC stream, and its descriptors of memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvsidecar.core.access import Caller
from kvsidecar.core.registration import Allocation, CudaAllocation, FdAllocation, RangesAllocation
from kvsidecar.device.base import CudaIpcSource, MemfdSource, MemorySource, RangesSource
from kvsidecar.errors import InvalidRequest


@dataclass(slots=True)
class Peer:
    """One process connected to the attach socket, or with an Attach stream over gRPC alone."""

    token: bytes
    pid: int
    """Its id in the daemon's PID namespace; 0 if the kernel cannot name it there."""
    uid: int
    gid: int
    client: str
    """Free text of the client, for logs."""
    fds: tuple[int | None, ...]
    """Descriptors of memory that it sent or named; owned by this peer. None: closed."""
    caller: Caller
    """Its identity and grant. The grant is decided when it connects, and again when the policy changes."""
    copiers: frozenset[int] | None = frozenset()
    """Processes whose death its client can see. Ranks may attach to these only. None: it sees none, and may attach to
    any."""
    fence: int | None = None
    """Descriptor of its `kvsidecar.support.fence`, if it asked for one; owned by this peer."""
    on_closed: Callable[[int], None] = lambda _: None
    """Called with how many of ``fds`` were closed before it has gone."""
    registering: int = 0
    """Registrations under way: a driver call in a thread may be using the descriptors."""
    gone: bool = False
    _spent: set[int] = field(default_factory=set)
    """Indexes of ``fds`` that are closed when no registration is under way."""

    def close_fds(self) -> None:
        """Close the descriptors unless a registration uses them: another client's could get the same numbers."""
        if not self.registering:
            for fd in self.fds:
                if fd is not None:
                    os.close(fd)
            self.fds = ()
            if self.fence is not None:
                os.close(self.fence)
                self.fence = None

    def spend(self, allocations: Sequence[Allocation]) -> None:
        """A registration that named these has been answered: close its descriptors of physical memory, once none is
        under way. While one is open, the memory stays allocated although engine and copier have unmapped it."""
        self._spent |= {
            index
            for allocation in allocations
            if isinstance(allocation, RangesAllocation)
            for index in allocation.fd_indexes
            if index < len(self.fds) and self.fds[index] is not None
        }
        if self.registering or not self._spent:
            return
        spent, self._spent = self._spent, set()
        for index in spent:
            os.close(self.fds[index])  # type: ignore[arg-type]  # it is not None
        self.fds = tuple(None if index in spent else fd for index, fd in enumerate(self.fds))
        self.on_closed(len(spent))

    def source(self, allocation: Allocation) -> MemorySource:
        """The source of an allocation's memory. Raises InvalidRequest: it names a descriptor that is not there."""
        match allocation:
            case CudaAllocation():
                return CudaIpcSource(allocation.handle)
            case FdAllocation():
                return MemfdSource(self._descriptor(allocation.fd_index))
            case RangesAllocation():
                fds = map(self._descriptor, allocation.fd_indexes)
                return RangesSource(tuple(zip(fds, allocation.sizes, strict=True)))

    def _descriptor(self, index: int) -> int:
        fd = self.fds[index] if index < len(self.fds) and index not in self._spent else None
        if fd is None:
            raise InvalidRequest(
                f"fd_index {index} is not one of the {len(self.fds)} descriptors that came with the Hello, or is "
                "one of physical memory that a registration has already used: connect again"
            )
        return fd
