from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.harness import DEVICE, DaemonProcess
from tests.vllm import models
from tests.vllm.engine import ENVIRONMENT, EngineProcess, Prompt

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.update(ENVIRONMENT)

never_invalid = pytest.fixture(autouse=True)(harness.never_invalid)


@pytest.fixture(autouse=True)
def _engine_log_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the connector logs goes where vLLM's messages go, which the fixture caplog does not see otherwise."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


TIMEOUT = 1800
"""Seconds after which a test is taken to hang. An engine of several processes starts in 40 on an idle machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(TIMEOUT))
            # vLLM's own; what this project warns of is held by the other tests.
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with one KV cache group."""
    return models.save("full", tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with several KV cache groups."""
    return models.save("hybrid", tmp_path_factory.getbasetemp())


@pytest.fixture
def by_name() -> None:
    """MultiConnector looks connectors up by name; an installed kvsidecar is registered by its entry point."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvsidecar.integrations.vllm import register

    register()
    for name, module in (("SecondConnector", "tests.vllm.second"), ("FailingConnector", "tests.vllm.failing")):
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether an engine schedules the step after a failed one before it knows of the failure. vLLM can do it on the CPU
    too, but turns it off there."""
    from vllm.platforms import current_platform

    update = current_platform.check_and_update_config

    def keeping(config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        update(config)
        config.scheduler_config.async_scheduling = wanted

    monkeypatch.setattr(type(current_platform), "check_and_update_config", staticmethod(keeping))
    return bool(request.param)


SOON_FULL = ("--pool-size", "6MiB")
"""About 120 blocks of the model with one group, and below the 8 MiB that an ordinary user may lock."""
POOL = ("--pool-size", "64MiB") if DEVICE == "cuda" else SOON_FULL
"""Room for what an engine on a GPU stores while a test waits."""


@pytest.fixture
def pool() -> tuple[str, ...]:
    """Flags of `daemon`; a file may have its own."""
    return POOL


@pytest.fixture
def daemon(short_dir: Path, pool: tuple[str, ...]) -> Iterator[DaemonProcess]:
    with DaemonProcess(short_dir, *pool) as process:
        yield process.wait_ready()


Truth = Callable[..., list[tuple[int, ...]]]


@pytest.fixture(scope="session")
def _oracle(model: str) -> Iterator[EngineProcess]:
    with EngineProcess(model, enable_prefix_caching=False) as process:
        yield process


@pytest.fixture
def truth(_oracle: EngineProcess) -> Truth:
    """The tokens that an engine without a connector and without a prefix cache gives, one prompt at a time."""

    def ask(*prompts: Prompt, tokens: int = 8) -> list[tuple[int, ...]]:
        _oracle.wait_started()
        return [_oracle.generate(each, tokens=tokens)[0].tokens for each in prompts]

    return ask
