"""What tests are run with, and which command runs them.

The rule: `make test` runs every test that starts no process and is not marked `long`, and those that are marked with
the `promise` that they show. `.ci/run` also runs the tests of real engines that are marked so. `make test-all` runs
all.
"""

from __future__ import annotations

import os
import resource
from typing import Final

import pytest

both_protocols = pytest.mark.parametrize("local", [True, False], ids=["local", "grpc"])
"""Once with clients that use the local protocol, once with gRPC: every daemon and client of the test is given it."""

lent_daemon = pytest.mark.lent_daemon
"""The fixture ``daemon`` is one that other tests have had: empty, and with counters and a log that start over."""

promise = pytest.mark.promise
"""Shows a promise end to end: ``promise("its words in README.md or on a page of docs/")``."""

processes = pytest.mark.processes
"""Starts processes. Tests in the directories `PROCESSES`, of engines, and with a daemon or a browser of a fixture need
no mark."""

long = pytest.mark.long
"""Takes seconds of a core, however the machine is: a simulation, or a property of many sizes."""

THOROUGH: Final = os.environ.get("KVSIDECAR_TESTS") == "all"
"""Whether this is `make test-all`."""
QUICK_SHARE: Final = 10
"""`make test` tries one in so many of the examples that `make test-all` tries, and always the same ones."""
PROCESSES: Final = ("benchmarks", "deploy", "docs", "e2e", "examples", "packages", "planted")
"""Directories of tests that may all start processes. Those of deploy/ and docs/ are run by `make check`."""
ENGINES: Final = ("sglang", "vllm")
ELSEWHERE: Final = ("alone", "cluster", "gpu", "torch", *ENGINES)
"""Markers of what needs more than `make test` may take for granted, or has a target of its own."""


def daemon_may_open(descriptors: int) -> pytest.MarkDecorator:
    """For a test of a daemon that needs so many: a daemon takes as many as its user may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return pytest.mark.skipif(
        hard != resource.RLIM_INFINITY and hard < descriptors,
        reason=f"a daemon may have {hard} descriptors here (ulimit -Hn), and needs {descriptors}",
    )


def examples(most: int) -> int:
    """How many examples of a property are tried: ``most`` of them by `make test-all`."""
    return most if THOROUGH else max(1, most // QUICK_SHARE)


def directory_of(item: pytest.Item) -> str:
    """The directory below tests/; empty for a test that is in none."""
    return item.nodeid.partition("::")[0].removeprefix("tests/").rpartition("/")[0].partition("/")[0]


def starts_processes(item: pytest.Item) -> bool:
    """Whether it is known to start processes."""
    named = any(item.get_closest_marker(each) for each in ("processes", "promise", "lent_daemon", "gpu"))
    by_fixture = not {"daemon", "browser"}.isdisjoint(getattr(item, "fixturenames", ()))
    return named or by_fixture or directory_of(item) in (*PROCESSES, *ENGINES)


def goes_into_make_test(item: pytest.Item) -> bool:
    """Whether `make test` runs it."""
    if any(item.get_closest_marker(each) for each in ELSEWHERE):
        return False
    if item.get_closest_marker("promise"):
        # Of two carriers, the one that engines use.
        callspec = getattr(item, "callspec", None)
        return callspec is None or callspec.params.get("local", True) is True
    return not starts_processes(item) and not item.get_closest_marker("long")


def is_smoke(item: pytest.Item) -> bool:
    """Whether `.ci/run` runs it on a real engine."""
    return directory_of(item) in ENGINES and item.get_closest_marker("promise") is not None
