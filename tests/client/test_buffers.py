"""Memory that an engine shares."""

from __future__ import annotations

import pytest

from kvsidecar.client import HostBuffer, NotExportable, buffers


def test_more_memory_than_there_is_is_refused_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "meminfo", lambda: {"MemAvailable": 4095})
    with pytest.raises(NotExportable, match="4096 bytes of memory: 4095 are available"):
        HostBuffer(4096)
