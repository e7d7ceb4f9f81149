"""The two distributions, built once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.once import made_once
from tests.packages.support import TAG, make_package, repository


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of this checkout as it is, with the tag of a release."""
    return made_once(tmp_path_factory, "source", lambda directory: repository(directory, TAG))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What `make package` leaves in dist/, by name."""
    place = made_once(tmp_path_factory, "built", lambda directory: make_package(repository(directory, TAG)))
    return {path.name: path for path in (place / "dist").iterdir()}
