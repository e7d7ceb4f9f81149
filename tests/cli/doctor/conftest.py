from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVSIDECAR_")]:
        monkeypatch.delenv(name)
