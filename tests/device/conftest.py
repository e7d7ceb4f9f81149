"""One contract, two implementations: everything here comes once for the host and once for CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvsidecar.device.base import Device, Platform
from kvsidecar.device.platforms import open_platform
from tests.device.device_support import Pool, cuda


@pytest.fixture(scope="session", params=["host", cuda])
def platform(request: pytest.FixtureRequest) -> Iterator[Platform]:
    # "auto", so that a driver that is there but does not work is an error and not a skipped test.
    platform, why = open_platform("auto" if request.param == "cuda" else "host")
    if platform.name != request.param:
        pytest.skip(why)
    yield platform
    platform.close()


@pytest.fixture(scope="session")
def kind(platform: Platform) -> str:
    return platform.name


@pytest.fixture
def device(platform: Platform) -> Device:
    return platform.device(platform.device_uuids()[0])


@pytest.fixture
def pool(platform: Platform) -> Iterator[Pool]:
    pool = Pool(platform, 8 << 20)
    yield pool
    pool.close()
