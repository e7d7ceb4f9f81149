"""What fails in a cluster, seen through a tier: nobody waits for it, nothing wrong is given out, and it comes back."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsidecar.errors import TierFailed
from kvsidecar.tiers.backend import ReadEnd, WriteEnd
from kvsidecar.tiers.cluster.backend import BATCH, ClusterBackend, ClusterOptions, _address, _keys
from kvsidecar.tiers.shard_bytes import TRAILER_BYTES
from kvsidecar.tiers.tier import FAILURES
from tests.harness import eventually, eventually_in_loop
from tests.mooncake_cluster import Cluster, OwnMemory, missing
from tests.tiers.bench import NEVER, SHARD, SPACE, Bench, bench, name, names
from tests.tiers.support import key, read, space, there, write

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(missing()), reason=missing() or "it is there")]


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """One that the test may stop and kill."""
    started = Cluster(tmp_path, node_bytes=16 << 20)
    yield started
    started.close()


async def written(each: Bench, *numbers: int) -> None:
    await each.on()
    for number in numbers:
        each.slot(number)[:] = number
    assert await each.write(*numbers) == [WriteEnd.DONE] * len(numbers)


async def works_again(each: Bench, number: int) -> None:
    """The tier is on, and takes and gives what was not there."""

    def probed() -> bool:
        each.tier.check(NEVER)
        return not each.tier.off

    async def takes() -> bool:
        await eventually_in_loop(probed)
        try:
            return await each.write(number) == [WriteEnd.DONE]
        except TierFailed:
            return False

    while not await takes():
        pass
    each.slot(number)[:] = 0
    assert await each.read(number) == [ReadEnd.DONE]


async def test_a_block_comes_back_from_another_node(own_cluster: Cluster) -> None:
    """One daemon writes it, another one reads it."""
    async with bench(backend="cluster", master=own_cluster.address) as one:
        await written(one, 1, 2)
    async with bench(backend="cluster", master=own_cluster.address) as two:
        await two.on()
        assert await two.find(1, 3, 2) == [True, False, True]
        assert await two.read(2, 3, 1) == [ReadEnd.DONE, ReadEnd.MISS, ReadEnd.DONE]
        assert [set(two.slot(number).tolist()) for number in (2, 1)] == [{2}, {1}]
        two.tier.forget(SPACE.namespace)
        await two.on()
        assert await two.find(1, 2) == [False, False]


async def test_a_storage_node_that_stops_costs_the_deadline_and_no_more(own_cluster: Cluster) -> None:
    """The client would wait for a minute: its process is killed, which gives the slots back."""
    async with bench(backend="cluster", master=own_cluster.address, deadline=1.0) as each:
        await written(each, 1)
        own_cluster.stop_node(0)
        late: list[bool] = []
        ends: list[Any] = []
        each.tier.read(SPACE, name(1), np.array([0]), ends.append, lambda: late.append(True))
        await eventually_in_loop(lambda: bool(late))
        assert not ends, "the call may still write to its slot"
        process = each.tier.pid
        each.tier.check(0.5)
        await eventually_in_loop(lambda: each.tier.pid not in (0, process))
        assert ends == [[]]
        own_cluster.nodes[0].send_signal(signal.SIGCONT)


async def test_a_storage_node_that_dies_during_a_read_is_a_failure_and_then_a_miss(own_cluster: Cluster) -> None:
    async with bench(backend="cluster", master=own_cluster.address) as each:
        await written(each, *range(8))
        own_cluster.stop_node(0)
        ends: list[Any] = []
        each.tier.read(SPACE, names(*range(8)), np.arange(8) * SHARD, ends.append, lambda: None)
        own_cluster.nodes[0].kill()
        await eventually_in_loop(lambda: bool(ends))
        assert ends == [[]]
        assert each.tier.counts.failures == 1
        own_cluster.start_node()
        while True:  # until the master gives the node up, a find still has a hit: a hint only
            await eventually_in_loop(lambda: each.tier.check(NEVER) or not each.tier.off)
            answer = await each.read(1)
            assert answer in ([], [ReadEnd.MISS])
            if answer:
                break
        await works_again(each, 20)


async def test_a_master_that_dies_turns_the_tier_off_until_there_is_one(own_cluster: Cluster) -> None:
    async with bench(backend="cluster", master=own_cluster.address) as each:
        await written(each, 1)
        own_cluster.master.kill()
        own_cluster.master.wait()
        for _ in range(FAILURES):
            assert await each.find(1) == []
        assert "the master does not answer (code -900)" in each.tier.off
        own_cluster.start_master()
        await works_again(each, 2)
        assert await each.read(1) == [ReadEnd.MISS], "it has forgotten everything"


async def test_a_standby_takes_over_with_all_that_is_there(tmp_path: Path) -> None:
    """Masters that write a log to etcd: what one of them knew is known to the next one, but for the last second."""
    cluster = Cluster(tmp_path, standby=True)
    try:
        async with bench(backend="cluster", master=cluster.address, hostname="127.0.0.1") as each:
            await written(each, *range(8))
            await written(each, *range(100, 164))
            cluster.wait_standby(entries=64)  # Of some of them, hence of the eight before: it reads in order.
            cluster.leader.kill()
            cluster.leader.wait()
            for _ in range(FAILURES):
                assert await each.find(1) in ([], [True])
            await works_again(each, 20)
            each.pool[:] = 0
            assert await each.read(*range(8)) == [ReadEnd.DONE] * 8
            assert [set(each.slot(number).tolist()) for number in range(8)] == [{number} for number in range(8)]
    finally:
        cluster.close()


async def test_a_block_with_two_replicas_is_back_when_one_of_its_nodes_was_given_up(tmp_path: Path) -> None:
    """Until then reads fail, or are a miss, although a replica lives."""
    cluster = Cluster(tmp_path, nodes=2)
    try:
        async with bench(backend="cluster", master=cluster.address, replicas=2) as each:
            await written(each, *range(8))
            cluster.nodes[0].kill()
            answers: list[ReadEnd] = []
            while answers != [ReadEnd.DONE] * 8:
                await eventually_in_loop(lambda: each.tier.check(NEVER) or not each.tier.off)
                each.pool[:] = 0
                answers = await each.read(*range(8))
                assert set(answers) <= {ReadEnd.DONE, ReadEnd.MISS}
            assert [set(each.slot(number).tolist()) for number in range(8)] == [{number} for number in range(8)]
    finally:
        cluster.close()


def test_a_cluster_full_of_what_others_have_pinned_refuses_and_serves(own_cluster: Cluster) -> None:
    backend, of = OwnMemory(own_cluster), space(nbytes=1 << 20)
    other, theirs = OwnMemory(own_cluster), space("theirs", nbytes=1 << 20)
    other._config.with_hard_pin = True
    pinned = 0
    while write(other, theirs, [pinned]) == [WriteEnd.DONE]:
        pinned += 1
    assert pinned > 1
    assert write(backend, of, range(4)) == [WriteEnd.FULL] * 4
    backend.probe()
    assert read(backend, of, [0]) == {0: ReadEnd.MISS}
    assert read(backend, theirs, [0, pinned - 1]) == {0: ReadEnd.DONE, pinned - 1: ReadEnd.DONE}
    other.close()
    backend.close()


def test_a_full_cluster_refuses_and_makes_room_later(own_cluster: Cluster) -> None:
    of = space(nbytes=1 << 20)
    backend = OwnMemory(own_cluster)
    first = write(backend, of, range(12))
    assert first == [WriteEnd.DONE] * 12
    assert set(read(backend, of, range(12)).values()) == {ReadEnd.DONE}  # which protects them for a while
    ends = write(backend, of, range(100, 112))
    assert set(ends) == {WriteEnd.DONE, WriteEnd.FULL}
    written = {number for number, end in zip(range(100, 112), ends, strict=True) if end is WriteEnd.DONE}
    assert written >= {
        *there(backend, of, range(100, 112))
    }  # Some may have made room already: nothing protects them yet.
    backend.probe()

    def has_room() -> bool:
        read(backend, of, [300])
        return WriteEnd.FULL not in write(backend, of, [200])

    eventually(has_room)  # it makes room in the background, once nothing protects the others
    backend.close()


def test_a_shard_under_the_name_of_another_is_corrupt(own_cluster: Cluster) -> None:
    """As after a defect of the store: whole, but not what was asked for."""
    backend, of = OwnMemory(own_cluster), space()
    write(backend, of, [1])
    mine, other = _keys(of, [key(1), key(2)])
    value = memoryview(bytearray(of.shard_bytes + TRAILER_BYTES))
    at = [_address(value)], [len(value)]
    backend.registered([value], lambda: backend._store.batch_get_into([mine], *at))
    assert backend.registered([value], lambda: backend._store.batch_put_from([other], *at)) == [0]
    assert read(backend, of, [1, 2]) == {1: ReadEnd.DONE, 2: ReadEnd.CORRUPT}
    assert there(backend, of, [1, 2]) == [1]
    assert write(backend, of, [2]) == [WriteEnd.DONE]
    assert read(backend, of, [2]) == {2: ReadEnd.DONE}
    backend.close()


def test_without_a_master_the_engine_says_so_at_once() -> None:
    with pytest.raises(TierFailed, match=r"the Mooncake master 127\.0\.0\.1:1 cannot be reached: .*refused"):
        ClusterBackend(memoryview(bytearray(4096)), ClusterOptions("127.0.0.1:1"))


def test_calls_under_way_share_no_trailer(cluster: Cluster) -> None:
    backend = OwnMemory(cluster)
    with backend._room(BATCH) as one, backend._room(BATCH) as two:
        begins = sorted(map(_address, [*one, *two]))
    assert all(later - sooner >= TRAILER_BYTES for sooner, later in itertools.pairwise(begins))
    backend.close()
