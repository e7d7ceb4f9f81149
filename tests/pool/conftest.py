from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvsidecar.pool.host_pool import HostPool


@pytest.fixture
def pools() -> Iterator[list[HostPool]]:
    made: list[HostPool] = []
    yield made
    for pool in made:
        pool.close()
