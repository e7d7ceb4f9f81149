"""What tests are run with."""

from __future__ import annotations

import resource

import pytest

both_protocols = pytest.mark.parametrize("local", [True, False], ids=["local", "grpc"])
"""Once with clients that use the local protocol, once with gRPC: every daemon and client of the test is given it."""

lent_daemon = pytest.mark.lent_daemon
"""The fixture ``daemon`` is one that other tests have had: empty, and with counters and a log that start over."""


def daemon_may_open(descriptors: int) -> pytest.MarkDecorator:
    """For a test of a daemon that needs so many: a daemon takes as many as its user may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return pytest.mark.skipif(
        hard != resource.RLIM_INFINITY and hard < descriptors,
        reason=f"a daemon may have {hard} descriptors here (ulimit -Hn), and needs {descriptors}",
    )
