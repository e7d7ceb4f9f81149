"""``--eviction``: the option reaches the pool, and who asks is told."""

from __future__ import annotations

import itertools
from math import inf
from pathlib import Path

import pytest

from kvsidecar.client import Blocks, Outcome
from kvsidecar.errors import Refusal
from tests.e2e.priorities import IDS, names, store
from tests.harness import NAMESPACE, NUM_BLOCKS, DaemonProcess, Rank, hashes
from tests.marks import both_protocols


def test_a_full_pool_makes_room_and_status_names_the_policy(short_dir: Path) -> None:
    with DaemonProcess(short_dir) as daemon:
        daemon.wait_ready()
        with daemon.client() as operator:
            assert operator.status().pool.eviction == "lru"
        rank = Rank(daemon)
        number = 0
        while not daemon.metric("kvsidecar_evicted_blocks_total"):
            store(rank, number)
            number += 1
        assert rank.hits(*names(number - 1)) == NUM_BLOCKS
        assert rank.hits(*names(0)) < NUM_BLOCKS
        rank.close()


def thrash(rank: Rank) -> None:
    """Two prompts that are longer than the pool come in turns: an order by the last use would hit none of them."""
    for turn in range(10):
        prompt = [f"long {turn % 2} {number}" for number in range(500)]
        rank.client.lookup(NAMESPACE, {0: hashes(*prompt)}, lease_seconds=1.0)
        rank.client.touch_nowait(NAMESPACE, {0: hashes(*prompt)})


def test_a_full_pool_keeps_what_it_has_if_that_may_return_as_soon_as_what_is_new(short_dir: Path) -> None:
    with DaemonProcess(short_dir, "--eviction", "rhythm") as daemon:
        daemon.wait_ready()
        with daemon.client() as operator:
            assert operator.status().pool.eviction == "rhythm"
        rank = Rank(daemon)
        thrash(rank)
        for number in itertools.count():
            end = rank.finish(rank.client.store([Blocks(0, hashes(*names(number)), IDS)]))
            if end.outcome is not Outcome.DONE:
                break
        assert (end.outcome, end.reason) == (Outcome.DECLINED, Refusal.NOT_ADMITTED)
        assert rank.hits(*names(0)) == NUM_BLOCKS
        assert daemon.metric("kvsidecar_evicted_blocks_total") == 0
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


@both_protocols
def test_blocks_of_which_a_client_says_that_they_are_over_make_room(short_dir: Path, local: bool) -> None:
    with DaemonProcess(short_dir, "--eviction", "rhythm", local=local) as daemon:
        daemon.wait_ready()
        rank = Rank(daemon)
        thrash(rank)
        for number in itertools.count():
            new = [Blocks(0, hashes(*names(number)), IDS)]
            if rank.finish(rank.client.store(new)).outcome is not Outcome.DONE:
                break
        assert rank.hits("nothing") == 0  # connected
        rank.client.touch_nowait(NAMESPACE, {0: hashes(*names(0))}, pause=600)
        rank.client.touch_nowait(NAMESPACE, {0: hashes(*names(1))}, pause=inf)
        assert rank.hits("nothing") == 0  # answered after both
        assert rank.finish(rank.client.store(new)).outcome is Outcome.DONE
        assert [rank.hits(*names(each)) for each in (0, 2, number)] == [NUM_BLOCKS] * 3
        assert rank.hits(*names(1)) < NUM_BLOCKS
        with pytest.raises(ValueError, match="pause is 0"):
            rank.client.touch_nowait(NAMESPACE, {0: hashes(*names(0))}, pause=0)
        rank.close()
