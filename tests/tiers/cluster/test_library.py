from __future__ import annotations

import sys

import pytest

from kvsidecar.errors import TierFailed
from kvsidecar.tiers.cluster.backend import open_backend


def test_without_the_package_the_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(TierFailed, match="pip install 'mooncake-transfer-engine-non-cuda"):
        open_backend(memoryview(bytearray(4096)), master="127.0.0.1:1")
