"""A few seconds of `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.run import Soak

WHAT = ("stores", "loads", "hits", "kills", "copier_kills")


@pytest.mark.timeout(600)
def test_engines_that_are_killed_at_random_leave_no_wrong_byte_and_no_leak(short_dir: Path) -> None:
    result = Soak(short_dir, device="host", seed=1, progress=print).run(8, until=WHAT)
    assert result.good, (result.leaks, result.problems, result.counts)
    assert all(result.counts[what] for what in WHAT)
