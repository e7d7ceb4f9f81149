"""Two tiers behind one pool: what one does not have, the other may, and each is given what its own plan says."""

from __future__ import annotations

from typing import cast

import pytest

from kvsidecar.cache.grants import LoadGrant
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.tier_fetches import NOTHING, ExpectedHits, FetchGain, TierHits, shard_space
from kvsidecar.core.tiering import Tiering, TierPlan
from kvsidecar.tiers.policy import Admission
from kvsidecar.tiers.tier import Tier
from tests.cache.support import PAGE, keys, new_cache, open_space, readable, store
from tests.core.scripted_tier import ScriptedTier

SLOTS = 32


class Bench:
    def __init__(self, *admissions: Admission) -> None:
        self.cache = new_cache(SLOTS)
        self.space = open_space(self.cache)
        memory = dict.fromkeys(range(0, SLOTS * PAGE, PAGE), "nothing")
        self.disk, self.cluster = ScriptedTier(memory, "disk"), ScriptedTier(memory, "cluster")
        self.metrics = Metrics("host")
        tiers = zip((self.disk, self.cluster), admissions or (Admission.ALL, Admission.ALL), strict=True)
        self.tiering = Tiering(
            self.cache,
            [TierPlan(cast(Tier, tier), admission) for tier, admission in tiers],
            self.metrics,
            lambda: 0.0,
            soon=lambda call: call(),
        )

    def keep(self, tier: ScriptedTier, *names: int) -> None:
        tier.kept.update({(shard_space(self.space, 0), each): each for each in keys(*names)})

    def ask(self, *names: int, hits: int = 0) -> ExpectedHits:
        return self.tiering.coming(self.space, keys(*names), hits, 10.0, 0.0)

    def held(self, *names: int, hits: tuple[int, ...] = ()) -> TierHits:
        return self.tiering.held(self.space, keys(*names), [name in hits for name in names])

    def find(self, tier: ScriptedTier) -> list[bytes]:
        (call,) = tier.finds
        tier.end_find(call)
        return call.hashes

    def read(self, tier: ScriptedTier) -> list[bytes]:
        """Returns what was read."""
        names = [each for call in tier.reads for each in call.hashes]
        while tier.reads:
            tier.end_read(tier.reads[0])
        return names

    def use(self, *names: int) -> None:
        grant = self.cache.begin_load([(self.space, 0, keys(*names))], None, 0.0)
        assert isinstance(grant, LoadGrant)
        self.tiering.used(grant)
        self.cache.end_load(grant)

    def refused(self, tier: str, reason: str) -> float:
        self.tiering.count()  # as each scrape does
        return self.metrics.value("kvsidecar_tier_unfetched_blocks_total", tier=tier, reason=reason)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_prefix_comes_in_pieces_from_the_tiers_that_have_them(bench: Bench) -> None:
    names = (1, 2, 3, 4, 5, 6)
    bench.keep(bench.disk, 1, 2, 5)
    bench.keep(bench.cluster, 2, 3, 4)
    assert bench.ask(*names) == ExpectedHits(0, asking=True)
    assert not bench.cluster.finds, "what the disk has is not known yet"
    bench.find(bench.disk)
    assert bench.ask(*names) == ExpectedHits(2, asking=True)
    assert bench.find(bench.cluster) == keys(3, 4, 5, 6), "what the disk has is not asked for"
    assert bench.ask(*names) == ExpectedHits(4)
    assert bench.read(bench.cluster) == keys(3, 4)
    assert bench.read(bench.disk) == keys(1, 2)
    assert bench.ask(*names, hits=4) == ExpectedHits(0, asking=True), "the disk, for what the cluster does not have"
    bench.find(bench.disk)
    assert bench.ask(*names, hits=4) == ExpectedHits(1, asking=True)
    assert bench.find(bench.cluster) == keys(6)
    assert bench.read(bench.disk) == keys(5)
    assert readable(bench.cache, bench.space, *names) == [True] * 5 + [False]
    assert bench.ask(*names, hits=5) == NOTHING


def test_what_the_disk_does_not_have_comes_from_the_cluster(bench: Bench) -> None:
    bench.keep(bench.cluster, 1)
    bench.ask(1)
    bench.find(bench.disk)
    assert bench.ask(1) == ExpectedHits(0, asking=True)
    bench.find(bench.cluster)
    assert bench.ask(1) == ExpectedHits(1)
    assert bench.read(bench.cluster) == keys(1)
    assert not bench.disk.reads


@pytest.mark.parametrize("off", ["disk", "cluster"])
def test_a_tier_that_is_off_does_not_stop_the_other_one(bench: Bench, off: str) -> None:
    broken, works = (bench.disk, bench.cluster) if off == "disk" else (bench.cluster, bench.disk)
    broken.off = "out of order"
    bench.keep(works, 1)
    assert bench.ask(1, 2) == ExpectedHits(0, asking=True)
    bench.find(works)
    assert bench.ask(1, 2) == ExpectedHits(1)
    bench.read(works)
    assert readable(bench.cache, bench.space, 1, 2) == [True, False]
    assert bench.refused(off, "off") > 0
    assert bench.refused(works.name, "off") == 0


def test_a_read_that_fails_in_one_tier_is_tried_in_the_other(bench: Bench) -> None:
    for tier in (bench.disk, bench.cluster):
        bench.keep(tier, 1)
    bench.ask(1)
    bench.find(bench.disk)
    bench.disk.end_read(bench.disk.reads[0], ok=False)
    assert bench.refused("disk", "failed") == 1
    assert bench.ask(1).asking
    bench.find(bench.cluster)
    bench.read(bench.cluster)
    assert readable(bench.cache, bench.space, 1) == [True]


def test_a_caller_that_chooses_is_told_what_all_of_them_hold(bench: Bench) -> None:
    bench.keep(bench.disk, 2, 3)
    bench.keep(bench.cluster, 3, 4)
    assert bench.held(1, 2, 3, 4, 5, hits=(1,)).asking
    assert not bench.cluster.finds
    assert bench.find(bench.disk) == keys(2, 3, 4, 5)
    assert bench.held(1, 2, 3, 4, 5, hits=(1,)) == TierHits([1, 2], asking=True)
    assert bench.find(bench.cluster) == keys(4, 5)
    assert bench.held(1, 2, 3, 4, 5, hits=(1,)) == TierHits([1, 2, 3])
    wanted = keys(3, 4)
    gain = FetchGain(2 * PAGE, 1 << 20)
    for _ in range(2):
        assert bench.tiering.coming(bench.space, wanted, 0, 10.0, 0.0, gain).asking
        for tier in (bench.disk, bench.cluster):
            if tier.finds:
                bench.find(tier)
    assert bench.tiering.coming(bench.space, wanted, 0, 10.0, 0.0, gain) == ExpectedHits(2)
    assert bench.read(bench.disk) == keys(3)
    assert bench.read(bench.cluster) == keys(4)


def test_each_tier_is_given_what_its_own_plan_says() -> None:
    bench = Bench(Admission.ALL, Admission.SECOND_USE)
    store(bench.cache, bench.space, 1)
    bench.use(1)
    assert [call.hashes for call in bench.disk.writes] == [keys(1)]
    assert [call.hashes for call in bench.cluster.writes] == [keys(1)]
    bench.cluster.end_write(bench.cluster.writes[0], ok=False)
    bench.disk.end_write(bench.disk.writes[0])
    bench.use(1)
    assert not bench.disk.writes, "it has it"
    assert [call.hashes for call in bench.cluster.writes] == [keys(1)], "a failed write is tried again"


def test_what_came_from_one_tier_is_written_to_the_other_when_it_is_used(bench: Bench) -> None:
    bench.keep(bench.cluster, 1)
    bench.disk.off = "out of order"
    bench.ask(1)
    bench.find(bench.cluster)
    bench.read(bench.cluster)
    bench.disk.off = ""
    bench.use(1)
    assert [call.hashes for call in bench.disk.writes] == [keys(1)]
    assert not bench.cluster.writes


def test_writes_to_all_tiers_together_hold_no_more_of_the_pool_than_to_one(bench: Bench) -> None:
    store(bench.cache, bench.space, *range(SLOTS))
    bench.use(*range(SLOTS))
    referenced = [len(call.hashes) for tier in (bench.disk, bench.cluster) for call in tier.writes]
    assert sum(referenced) == SLOTS // 2
    assert all(referenced)


def test_what_is_cleared_is_forgotten_by_all(bench: Bench) -> None:
    bench.tiering.forget(bench.space.namespace)
    assert bench.disk.forgotten == bench.cluster.forgotten == [bench.space.namespace]


def test_status_has_each_tier(bench: Bench) -> None:
    bench.cluster.off = "out of order"
    assert bench.tiering.off() == {"disk": "", "cluster": "out of order"}
