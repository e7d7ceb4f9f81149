"""What tests are run with."""

from __future__ import annotations

import pytest

both_protocols = pytest.mark.parametrize("local", [True, False], ids=["local", "grpc"])
"""Once with clients that use the local protocol, once with gRPC: every daemon and client of the test is given it."""

lent_daemon = pytest.mark.lent_daemon
"""The fixture ``daemon`` is one that other tests have had: empty, and with counters and a log that start over."""
