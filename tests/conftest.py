from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
import uvloop

# Before they are imported: an assertion that fails in a helper says what it compared, as in a test.
for _package in sorted(path.name for path in Path(__file__).parent.iterdir() if (path / "__init__.py").exists()):
    pytest.register_assert_rewrite(f"tests.{_package}")

from tests.harness import DaemonProcess, Gate, close_what_is_open  # noqa: E402
from tests.lent_daemon import Lending  # noqa: E402
from tests.marks import THOROUGH, examples, goes_into_make_test, is_smoke, starts_processes  # noqa: E402

# A busy machine makes any example slow once. What is tried anew each time may find something by chance: that is for
# `make test-all`.
hypothesis.settings.register_profile("kvsidecar", deadline=None, derandomize=not THOROUGH, max_examples=examples(100))
hypothesis.settings.load_profile("kvsidecar")

# A shell starts what it puts in the background with Ctrl-C ignored, which is inherited; tests send it to their own.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What the tests start inherits the limit, and not all of it raises its own.
with contextlib.suppress(OSError, ValueError):
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)


class _Descriptors:
    """How many this process has open. Where 1024 are allowed, the tests need fewer."""

    most, most_at_once = 700, 1024

    def __init__(self) -> None:
        self.open, self.table = self.look()
        self.left_open: Counter[str] = Counter()

    @staticmethod
    def look() -> tuple[int, int]:
        """How many are open, and the size of the kernel's table, which doubles when it is full and never shrinks."""
        status = Path("/proc/self/status").read_text()
        return len(os.listdir("/proc/self/fd")), int(status.partition("FDSize:")[2].split()[0])

    def check(self, test: str) -> None:
        """After a test."""
        before, table = self.open, self.table
        self.open, self.table = self.look()
        self.left_open[test] = self.open - before
        if self.open > self.most >= before:
            left = ", ".join(f"{count} by {each}" for each, count in self.left_open.most_common(5) if count > 0)
            pytest.fail(f"{self.open} descriptors are open, of which {self.most} may be: {left}", pytrace=False)
        if self.table > max(table, self.most_at_once):
            pytest.fail(f"this test had more than {self.most_at_once} descriptors open at once", pytrace=False)


_descriptors = _Descriptors()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    yield
    close_what_is_open()
    _descriptors.check(item.nodeid)


PROCESS_EVENTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "tests.warm.start")
_may_start = True
"""Whether the test that runs is known to start processes."""


def _watch_processes(event: str, args: tuple[object, ...]) -> None:
    if event in PROCESS_EVENTS and not _may_start:
        raise AssertionError(f"a test that starts processes needs the marker `processes`: {event} {args[:2]}")


sys.addaudithook(_watch_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """What `make test` runs starts no process unless it shows a promise: the rule of CONTRIBUTING.md."""
    global _may_start
    _may_start = starts_processes(item)
    try:
        return (yield)
    finally:
        _may_start = True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if goes_into_make_test(item):
            item.add_marker("quick")
        if is_smoke(item):
            item.add_marker("smoke")


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], AbstractEventLoop]]:
    """The daemon's event loop: its transports, among others, are not asyncio's."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path leaves room for a Unix socket: pytest's own may exceed its 107 bytes."""
    directory = tempfile.mkdtemp(prefix="kvs-")
    yield Path(directory)
    shutil.rmtree(directory)


@pytest.fixture
def pool_dir() -> Iterator[Path]:
    """A directory in memory for ``--pool-dir``; the daemon makes it."""
    if not os.access(shm := Path("/dev/shm"), os.W_OK):
        pytest.skip("there is no /dev/shm to write to")
    with tempfile.TemporaryDirectory(prefix="kvs-", dir=shm) as directory:
        yield Path(directory) / "pool"


@pytest.fixture
def gate(short_dir: Path) -> Iterator[Gate]:
    """For a daemon that runs inside of the test, or of a fixture that asks for this one first."""
    gate = Gate(short_dir)
    yield gate
    gate.close()


@pytest.fixture
def local() -> bool:
    """Whether the test's clients use the local protocol; `tests.marks.both_protocols` runs a test without it too."""
    return True


@pytest.fixture(scope="session")
def lending() -> Iterator[Lending]:
    lending = Lending()
    yield lending
    lending.close()


@pytest.fixture
def daemon(request: pytest.FixtureRequest, short_dir: Path, local: bool) -> Iterator[DaemonProcess]:
    """A ready daemon with a pool of 1 MiB on the host device: the test's own, or one that is lent to it
    (`tests.marks.lent_daemon`)."""
    if request.node.get_closest_marker("lent_daemon") is None:
        with DaemonProcess(short_dir, local=local) as process:
            yield process.wait_ready()
    else:
        lending = request.getfixturevalue("lending")
        yield lending.lend(local)
        lending.take_back()
