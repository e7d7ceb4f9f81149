from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.sglang.engine import STAND_INS
from tests import harness
from tests.harness import DaemonProcess
from tests.sglang.engine import SGLangProcess, linker
from tests.vllm import models

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
elif harness.DEVICE == "host":
    sys.path.insert(0, str(STAND_INS))
else:
    collect_ignore_glob = ["test_tree.py"]  # on the CPU, and imports what the bundle for a GPU leaves out

never_invalid = pytest.fixture(autouse=True)(harness.never_invalid)
TIMEOUT = 900
"""Seconds after which a test is taken to hang: the first one starts the engines."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(TIMEOUT))
            item.add_marker(pytest.mark.filterwarnings("default"))  # SGLang's own


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.save("full", tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of the same shape."""
    return models.save("other", tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """The directory of the daemon's socket. Engines live longer than daemons, and find each at the same path."""
    directory = Path(tempfile.mkdtemp(prefix="kvs-"))
    yield directory
    shutil.rmtree(directory)


POOL = ("--pool-size", "6MiB")
"""About 250 pages, and below the 8 MiB that an ordinary user may lock."""


def failing(home: Path, rules: str, *flags: str) -> DaemonProcess:
    """A daemon in which things go wrong as these failpoints say."""
    return DaemonProcess(home, *POOL, *flags, KVSIDECAR_FAILPOINTS=rules).wait_ready()


@pytest.fixture
def pool() -> tuple[str, ...]:
    """Flags of `daemon`; a test may have its own."""
    return POOL


@pytest.fixture
def daemon(home: Path, pool: tuple[str, ...]) -> Iterator[DaemonProcess]:
    with DaemonProcess(home, *pool) as process:
        yield process.wait_ready()


class Engines:
    """Engines with the same configuration, each of which is started when it is first asked for."""

    def __init__(self, model: str, home: Path, logs: Path) -> None:
        self._arguments, self._logs = (model, linker(str(home / "kvs.sock"))), logs
        self._started: list[SGLangProcess] = []

    def __getitem__(self, index: int) -> SGLangProcess:
        while len(self._started) <= index:
            log = self._logs / f"engine-{len(self._started)}.log"
            self._started.append(SGLangProcess(*self._arguments, log))
        self._started[index].wait_started()
        return self._started[index]

    def close(self) -> None:
        for each in self._started:
            each.__exit__(None, None, None)


@pytest.fixture(scope="module")
def engines(model: str, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    found = Engines(model, home, tmp_path_factory.mktemp("engines"))
    yield found
    found.close()


@pytest.fixture
def engine(engines: Engines) -> SGLangProcess:
    return engines[0]
