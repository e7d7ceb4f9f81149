"""The two distributions, built once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packages.support import TAG, make_package, repository


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of this checkout as it is, with the tag of a release."""
    return repository(tmp_path_factory.mktemp("source"), TAG)


@pytest.fixture(scope="session")
def built(source: Path) -> dict[str, Path]:
    return make_package(source)
