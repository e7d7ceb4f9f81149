"""``--eviction``: the option reaches the pool, and who asks is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.priorities import names, store
from tests.harness import NAMESPACE, NUM_BLOCKS, DaemonProcess, Rank, hashes


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


def test_blocks_that_are_touched_stay_and_are_not_counted_as_looked_up(short_dir: Path, local: bool) -> None:
    with DaemonProcess(short_dir, local=local) as daemon:
        daemon.wait_ready()
        rank = Rank(daemon)
        store(rank, "touched")
        number = 0
        while not daemon.metric("kvsidecar_evicted_blocks_total"):
            rank.client.touch_nowait(NAMESPACE, {0: hashes(*names("touched"), "not there")})
            store(rank, number)
            number += 1
        assert daemon.metric('kvsidecar_lookup_blocks_total{result="hit"}') == 0
        assert daemon.metric('kvsidecar_lookup_blocks_total{result="miss"}') == 0
        assert rank.hits(*names("touched")) == NUM_BLOCKS
        assert rank.hits(*names(0)) < NUM_BLOCKS
        rank.close()
