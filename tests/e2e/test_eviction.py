"""What a full pool gives up: by ``--eviction``, and by the priorities that clients give."""

from __future__ import annotations

import itertools
from math import inf
from pathlib import Path

import pytest

from kvsidecar.client import Blocks, LookupMode, Outcome, Priority, pack_ids
from kvsidecar.errors import Refusal
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.e2e.wire import raw_rank
from tests.harness import NAMESPACE, NUM_BLOCKS, DaemonProcess, Rank, done, hashes
from tests.marks import both_protocols, promise

IDS = list(range(NUM_BLOCKS))


def names(kind: object) -> list[str]:
    return [f"{kind} {number}" for number in IDS]


def store(rank: Rank, kind: object, priority: Priority = Priority.NORMAL) -> None:
    done(rank.finish(rank.client.store([Blocks(0, hashes(*names(kind)), IDS)], priority=priority)))


@promise("blocks without references are evicted")
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


@both_protocols
def test_only_the_last_hits_of_a_group_are_leased_if_the_client_says_so(short_dir: Path, local: bool) -> None:
    with DaemonProcess(short_dir, local=local) as daemon:
        daemon.wait_ready()
        rank = Rank(daemon)
        store(rank, "a")
        block_bytes = daemon.get("/status")[1]["pool"]["used_bytes"] // NUM_BLOCKS
        for last, leased in ((3, 3), (0, NUM_BLOCKS), (2 * NUM_BLOCKS, NUM_BLOCKS)):
            found = rank.client.lookup(
                NAMESPACE, {0: hashes(*names("a"))}, mode=LookupMode.BITMAP, lease_seconds=30, lease_last={0: last}
            )
            assert found.groups[0].hits == NUM_BLOCKS
            assert daemon.get("/status")[1]["pool"]["leased_bytes"] == leased * block_bytes
            assert found.lease
            assert rank.client.release(found.lease)
        rank.close()


@both_protocols
def test_of_a_group_with_a_tail_the_daemon_looks_only_at_its_end(short_dir: Path, local: bool) -> None:
    with DaemonProcess(short_dir, local=local) as daemon:
        daemon.wait_ready()
        rank = Rank(daemon)
        store(rank, "a")
        joined = b"".join(hashes(*names("a"), "nobody's"))
        cut = bytes(bytearray(joined))  # equal, but another object: sent as well
        for tail in (joined, cut):
            found = rank.client.lookup(NAMESPACE, {0: joined, 7: tail}, mode=LookupMode.BITMAP, tails={7: 1})
            assert found.groups[0].found == (*[True] * NUM_BLOCKS, False)
            assert (found.groups[7].first, found.groups[7].found) == (NUM_BLOCKS - 1, (False, False))
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


# -- priorities ------------------------------------------------------------------------------------------------------


@promise("expired blocks are evicted first, then low, normal and high ones")
def test_high_blocks_stay_and_low_ones_go_also_after_a_restart(short_dir: Path, pool_dir: Path, local: bool) -> None:
    flags = ("--pool-dir", str(pool_dir))
    with DaemonProcess(short_dir, *flags, local=local) as daemon:
        daemon.wait_ready()
        rank = Rank(daemon)
        store(rank, "high", Priority.HIGH)
        store(rank, "normal")
        store(rank, "low", Priority.LOW)
        rank.close()
        daemon.process.kill()
        daemon.process.wait()
    with DaemonProcess(short_dir, *flags, local=local) as daemon:
        daemon.wait_ready()
        rank = Rank(daemon)
        for number in range(1000):  # until the pool is full
            if daemon.metric("kvsidecar_evicted_blocks_total"):
                break
            store(rank, number)
        assert (rank.hits(*names("high")), rank.hits(*names("normal"))) == (NUM_BLOCKS, NUM_BLOCKS)
        assert rank.hits(*names("low")) < NUM_BLOCKS, "the newest of the three"
        for number in range(1000, 1020):  # twice what the pool holds
            store(rank, number)
        assert (rank.hits(*names("high")), rank.hits(*names("normal"))) == (NUM_BLOCKS, 0)


def test_a_priority_that_does_not_exist_is_refused(daemon: DaemonProcess) -> None:
    with raw_rank(daemon) as rank:
        blocks = [pb.Blocks(group=0, hashes=hashes("a")[0], block_ids=pack_ids([0]))]
        rank.send(pb.AttachRequest(store=pb.Store(job=1, blocks=blocks, priority=7)))  # type: ignore[arg-type]
        end = rank.next("done").done
        assert (end.outcome, end.reason) == (pb.JobDone.OUTCOME_DECLINED, "invalid_request")
        assert "priority is 7" in end.error
        rank.store(2)
        assert rank.ended(1) == [(2, "")]


def test_a_client_refuses_a_priority_that_does_not_exist(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    with pytest.raises(ValueError, match="7"):
        rank.client.store([Blocks(0, hashes("a"), [0])], priority=7)  # type: ignore[arg-type]
    assert rank.store("a").outcome is Outcome.DONE
