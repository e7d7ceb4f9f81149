"""A few seconds of `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak.run import Soak

WHAT = ("stores", "loads", "hits", "kills", "copier_kills", "tier_kills", "disk_hits")


@pytest.mark.timeout(600)
def test_engines_that_are_killed_at_random_leave_no_wrong_byte_and_no_leak(short_dir: Path) -> None:
    result = Soak(short_dir, device="host", seed=1, progress=print).run(8, until=WHAT)
    assert result.good, (result.leaks, result.problems, result.counts)
    assert all(result.counts[what] for what in WHAT)


@pytest.mark.timeout(600)
def test_daemons_that_are_killed_at_random_on_one_disk_leave_no_wrong_byte(short_dir: Path) -> None:
    what = (*WHAT, "daemon_kills")
    result = Soak(short_dir, device="host", seed=2, progress=print).run(0, until=what, daemon_kills=12)
    assert result.good, (result.leaks, result.problems, result.counts)
    assert not result.counts["disk_corrupt"]
