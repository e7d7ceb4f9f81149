"""Memory that an engine shares."""

from __future__ import annotations

import pytest

from kvsidecar.client import HostBuffer, NotExportable, buffers
from kvsidecar.support.memory_limits import CgroupLimit


def test_more_memory_than_there_is_is_refused_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "meminfo", lambda: {"MemAvailable": 4095})
    with pytest.raises(NotExportable, match="4096 bytes of memory: 4095 are available"):
        HostBuffer(4096)


def test_more_memory_than_the_container_may_have_is_refused_before_any_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = (CgroupLimit("/", "memory.max", 1 << 20, 4096), CgroupLimit("/", "memory.high", 12288, 4096))
    monkeypatch.setattr(buffers, "memory_cgroups", lambda: limits)
    HostBuffer(8192).close()
    said = r"8193 bytes of memory: the container's cgroup allows 12 KiB \(4 KiB in use\)"
    with pytest.raises(NotExportable, match=said):
        HostBuffer(8193)
