"""``--eviction``: the option reaches the pool, and who asks is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_priorities import names, store
from tests.harness import NUM_BLOCKS, DaemonProcess, Rank


@pytest.mark.parametrize(("flags", "policy"), [((), "lru"), (("--eviction", "rhythm"), "rhythm")])
def test_a_full_pool_makes_room_and_status_names_the_policy(
    short_dir: Path, flags: tuple[str, ...], policy: str
) -> None:
    with DaemonProcess(short_dir, *flags) as daemon:
        daemon.wait_ready()
        with daemon.client() as operator:
            assert operator.status().pool.eviction == policy
        rank = Rank(daemon)
        number = 0
        while not daemon.metric("kvsidecar_evicted_blocks_total"):
            store(rank, number)
            number += 1
        assert rank.hits(*names(number - 1)) == NUM_BLOCKS
        assert rank.hits(*names(0)) < NUM_BLOCKS
        rank.close()
