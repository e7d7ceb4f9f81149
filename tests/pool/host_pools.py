"""Host pools, and what must be left of them."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from kvsidecar.device.base import Device
from kvsidecar.errors import PinFailed
from kvsidecar.pool.host_pool import HostPool, PoolSpec
from kvsidecar.pool.pinning import PinProgress
from kvsidecar.support import failpoints, memory_limits
from kvsidecar.support.memory_limits import HugePages
from kvsidecar.support.units import KiB, MiB

NBYTES = 4 * MiB + 4 * KiB
"""Not a multiple of a chunk or of a huge page, and inside the usual RLIMIT_MEMLOCK of 8 MiB."""
CHUNKS = ((0, MiB), (MiB, MiB), (2 * MiB, MiB), (3 * MiB, MiB), (4 * MiB, 4 * KiB))
"""Offset and size of each chunk of `spec`."""

NewPool = Callable[..., HostPool]
"""Arguments as of `HostPool`."""

may_lock = pytest.mark.skipif(
    (memory_limits.memlock_limit() or 8 * MiB) < 8 * MiB, reason="this process may lock less than 8 MiB"
)

_libc = ctypes.CDLL(None, use_errno=True)


class MlockPlatform:
    """Pins with mlock and remembers every call; fails on demand."""

    def __init__(
        self,
        name: str = "host",
        *,
        fail_at: int | None = None,
        limit: int | None = None,
        refuse_unpin: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self.name = name
        self.calls: list[tuple[str, int, int]] = []
        self._fail_at = fail_at
        self._limit = limit
        self._refuse_unpin = refuse_unpin
        self._unpins = count()

    def pin_limit(self) -> int | None:
        return self._limit

    def pin(self, address: int, nbytes: int) -> None:
        if len(self.calls) == self._fail_at:
            raise PinFailed("out of memory")
        assert _libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) == 0
        self.calls.append(("pin", address, nbytes))

    def unpin(self, address: int, nbytes: int) -> None:
        if self._refuse_unpin(next(self._unpins)):
            raise RuntimeError("the context is gone")
        assert _libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) == 0
        self.calls.append(("unpin", address, nbytes))

    def numa_nodes(self) -> tuple[int, ...]:
        return ()

    def device_uuids(self) -> tuple[str, ...]:
        return ()

    def device(self, uuid: str) -> Device:
        raise NotImplementedError

    def close(self) -> None:
        pass


def pins(platform: MlockPlatform, base: int) -> list[tuple[int, int]]:
    return [(address - base, nbytes) for what, address, nbytes in platform.calls if what == "pin"]


def unpins(platform: MlockPlatform, base: int) -> list[tuple[int, int]]:
    return [(address - base, nbytes) for what, address, nbytes in platform.calls if what == "unpin"]


@dataclass
class Mapped:
    """Sums over the pool's mappings, in bytes: those that are in no core dump and not inherited by a fork."""

    size: int = 0
    resident: int = 0
    locked: int = 0
    flags: frozenset[str] = frozenset()


def mapped() -> Mapped:
    total = Mapped()
    for block in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
        flags = frozenset(re.search(r"^VmFlags:(.*)$", block, re.MULTILINE)[1].split())  # type: ignore[index]
        if {"dc", "dd"} <= flags:
            numbers = {name: int(kb) * KiB for name, kb in re.findall(r"^(\w+): +(\d+) kB$", block, re.MULTILINE)}
            total.size += numbers["Size"]
            total.resident += numbers["Rss"] + numbers["Private_Hugetlb"]
            total.locked += numbers["Locked"]
            total.flags |= flags
    return total


def spec(**changes: object) -> PoolSpec:
    values: dict[str, object] = {
        "nbytes": NBYTES,
        "slab_bytes": 256 * KiB,
        "chunk_bytes": MiB,
        "huge_pages": HugePages.NONE,
        "memory_check": False,
    }
    return PoolSpec(**values | changes)  # type: ignore[arg-type]


def ignore(progress: PinProgress) -> None:
    pass


def never() -> threading.Event:
    return threading.Event()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Whatever a test does: no pool memory was there before it, and none is after it."""
    assert mapped() == Mapped()
    yield
    failpoints.configure("")
    assert mapped() == Mapped()


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
