"""Pinned memory and plans for the tests of `kvsidecar.device`."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt
import pytest

from kvsidecar.device.base import COPY, Platform
from tests.plans import CopyList

GUARD = 0xA5
cuda = pytest.param("cuda", marks=pytest.mark.gpu)
only_cuda = pytest.mark.parametrize("platform", [cuda], indirect=True)
"""For what the host has nothing like."""


def plan_of(*copies: tuple[int, int, int, int, int]) -> CopyList:
    """(device address, pitch, host offset, row bytes, rows) each; without a gap in the pool."""
    array = np.array([(address, pitch, host, width, width, rows) for address, pitch, host, width, rows in copies], COPY)
    return CopyList(array, int((array["row_bytes"] * array["num_rows"]).sum()))


class Pool:
    """Pinned host memory, full of guard bytes."""

    def __init__(self, platform: Platform, nbytes: int) -> None:
        self._platform = platform
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self.nbytes)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.bytes[:] = GUARD
        platform.pin(self.address, self.nbytes)

    def close(self) -> None:
        self._platform.unpin(self.address, self.nbytes)
