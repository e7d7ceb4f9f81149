from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvsidecar.pool.host_pool import HostPool, PoolSpec
from tests.pool.host_pools import MlockPlatform, NewPool, ignore, never


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


@pytest.fixture
def pinned(new_pool: NewPool) -> NewPool:
    """Makes such pools of a spec, on an `MlockPlatform` unless it is told another, and pins them."""

    def new(spec: PoolSpec, platform: MlockPlatform | None = None, **options: Any) -> HostPool:
        pool = new_pool(spec, platform or MlockPlatform(), **options)
        pool.pin(ignore, never())
        return pool

    return new
