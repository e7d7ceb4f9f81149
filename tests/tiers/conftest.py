from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mooncake_cluster import Cluster, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Mooncake Store that nobody stops."""
    if reason := missing():
        pytest.skip(reason)
    started = Cluster(tmp_path_factory.mktemp("mooncake"))
    yield started
    started.close()
