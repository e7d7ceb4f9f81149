"""A word in shared memory by which an engine ends the copies of its memory without the daemon's help.

A daemon that hangs cannot be asked to stop, and does not report what still runs. When it resumes, it may hand a copy to
its copier that writes into blocks which the engine has given to another request by then. So the engine shuts the fence:

    engine                              copier, before each call to the driver
    1. shut = 1                         1. under way = under way + 1
    2. a barrier on every processor     2. if shut: under way = under way - 1, and the copy has failed
    3. read the numbers under way       3. the call; when it is over, under way = under way - 1

Either the copier sees the word, or the engine sees the number. So with all numbers at 0 after the barrier, nothing of
this engine's memory is copied any more, whatever the daemon still asks for. A fence is never opened again.

The daemon makes the memory, sealed at its size, one for each connection. The copier keeps its numbers itself and only
writes them here: what an engine writes over them deceives nobody but that engine.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import time
from typing import Final

from kvsidecar.types import Direction

_NBYTES: Final = 4096
_SHUT: Final = 0
_UNDER_WAY: Final = {direction: 8 * (1 + index) for index, direction in enumerate(Direction)}
"""Indices of words of 8 bytes, each in a cache line of its own."""
_SYS_MEMBARRIER: Final = {"x86_64": 324, "aarch64": 283}.get(platform.machine())
_MEMBARRIER_GLOBAL: Final = 1
_BARRIER_SECONDS: Final = 0.02
"""Longer than a processor keeps a store to itself."""


def create() -> int:
    """The descriptor of a new fence, which is the caller's."""
    fd = os.memfd_create("kvsidecar-fence", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, _NBYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


class Fence:
    """The engine's side. ``fd`` stays the caller's."""

    def __init__(self, fd: int) -> None:
        self._words = memoryview(mmap.mmap(fd, _NBYTES)).cast("Q")
        self.is_shut = False

    def shut(self) -> None:
        """Let no further call begin. Cannot be undone."""
        if not self.is_shut:
            self._words[_SHUT] = 1
            _barrier()
            self.is_shut = True

    def is_quiet(self) -> bool:
        """Whether nothing is copied any more: it is shut, and all calls that had begun are over."""
        return self.is_shut and not any(self._words[word] for word in _UNDER_WAY.values())


def _barrier() -> None:
    """A memory barrier on every processor that runs a thread of any process: membarrier(2)."""
    if _SYS_MEMBARRIER is None or ctypes.CDLL(None).syscall(_SYS_MEMBARRIER, _MEMBARRIER_GLOBAL, 0):
        time.sleep(_BARRIER_SECONDS)  # it may be forbidden, and does not exist with nohz_full=


class FenceLane:
    """A copier's side, for one direction; used by that direction's thread."""

    def __init__(self, words: memoryview, direction: Direction) -> None:
        self._words, self._word = words, _UNDER_WAY[direction]
        self._calls = 0

    def enter(self) -> bool:
        """A call is about to begin. False: it must not, and need not `leave`."""
        self._calls += 1
        self._words[self._word] = self._calls
        if not self._words[_SHUT]:
            return True
        self.leave()
        return False

    def leave(self) -> None:
        """A call is over."""
        self._calls -= 1
        self._words[self._word] = self._calls


def lanes(fd: int) -> dict[Direction, FenceLane]:
    """Begin with nothing under way: the earlier copier of this connection is dead. ``fd`` stays the caller's."""
    words = memoryview(mmap.mmap(fd, _NBYTES)).cast("Q")
    for word in _UNDER_WAY.values():
        words[word] = 0
    return {direction: FenceLane(words, direction) for direction in Direction}
