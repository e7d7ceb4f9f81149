from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvsidecar.pool.host_pool import HostPool
from tests.pool.host_pools import NewPool


@pytest.fixture
def new_pool() -> Iterator[NewPool]:
    """Makes pools that are closed after the test."""
    made: list[HostPool] = []

    def new(*args: Any, **options: Any) -> HostPool:
        made.append(HostPool(*args, **options))
        return made[-1]

    yield new
    for pool in made:
        pool.close()
