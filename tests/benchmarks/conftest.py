from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulation")
    group.addoption("--seed", type=int, help="run this seed of the simulation only, and show its trace")
    group.addoption("--runs", type=int, help="how many seeds to simulate (default 2000)")


def _option(request: pytest.FixtureRequest, name: str, variable: str) -> int | None:
    # The options are known only if this directory was named on the command line.
    value = request.config.getoption(name, default=None)
    if value is None:
        value = os.environ.get(variable)
    return None if value is None else int(value)


@pytest.fixture
def only_seed(request: pytest.FixtureRequest) -> int | None:
    return _option(request, "--seed", "KVSIDECAR_SIM_SEED")


@pytest.fixture
def runs(request: pytest.FixtureRequest) -> int:
    return _option(request, "--runs", "KVSIDECAR_SIM_RUNS") or 2000
