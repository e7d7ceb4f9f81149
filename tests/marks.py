"""What tests are run with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

both_protocols = pytest.mark.parametrize("local", [True, False], ids=["local", "grpc"])
"""Once with clients that use the local protocol, once with gRPC: every daemon and client of the test is given it."""

SHM = Path("/dev/shm")
needs_shared_memory = pytest.mark.skipif(not os.access(SHM, os.W_OK), reason="there is no /dev/shm to write to")
"""For tests with a ``pool_dir``."""
