"""How much of the pool is lost to rounding when blocks of several sizes share it, and their proportions change."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rounding import lost_of, mix_of
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import LoadGrant, StoreGrant
from kvsidecar.cache.slabs import LARGEST_SHARE, LONGEST_SHARE, MAX_WASTE
from kvsidecar.cache.slots import SlotAllocator, size_class
from kvsidecar.cache.space_blocks import Space
from kvsidecar.cache.victims import AHEAD_SHARE
from tests.cache.integrity import check_slots
from tests.cache.support import key, namespace, table_of
from tests.marks import examples, long

MIB = 1 << 20
POOL = 64 * MIB


@dataclass
class Pool:
    """A pool in which blocks of several sizes are stored at random."""

    sizes: list[int]
    slab: int
    rng: random.Random
    stored: list[list[bytes]] = field(default_factory=list)
    """The latest blocks of each size."""

    def __post_init__(self) -> None:
        self.cache = BlockCache(SlotAllocator(POOL, self.slab))
        self.spaces: list[Space] = [
            self.cache.open_space(namespace(str(group)), 0, 1, 0, size) for group, size in enumerate(self.sizes)
        ]
        self.stored = [[] for _ in self.sizes]
        self.count = 0

    def store(self, weights: list[float], nbytes: float) -> None:
        """Store so many bytes, of each size in proportion to its weight; some of what is there is used meanwhile."""
        while nbytes > 0:
            which = self.rng.choices(range(len(self.sizes)), [w / s for w, s in zip(weights, self.sizes, strict=True)])[
                0
            ]
            batch = max(1, min(64, POOL // 64 // self.sizes[which]))
            hashes = [key(name) for name in range(self.count, self.count + batch)]
            self.count += batch
            grant = self.cache.begin_store([(self.spaces[which], 0, hashes)])
            assert isinstance(grant, StoreGrant), f"a store was refused with {grant}, and nothing is in use"
            self.cache.seal_all(grant)
            self.stored[which] = [*self.stored[which][-50:], *hashes]
            nbytes -= batch * self.sizes[which]
            if self.rng.random() < 0.2 and self.stored[used := self.rng.randrange(len(self.sizes))]:
                load = self.cache.begin_load([(self.spaces[used], 0, [self.rng.choice(self.stored[used])])], None, 0.0)
                if isinstance(load, LoadGrant):
                    self.cache.end_load(load)

    def go_through_proportions(self, lost: float) -> None:
        """Fill the pool with the first size, replace it by the last, then store all, each time in other proportions."""
        one = [1.0] + [0.0] * (len(self.sizes) - 1)
        for weights, times in (
            (one, 1.2), (one[::-1], 1.5), ([1.0] * len(one), 2), ([self.rng.random() for _ in one], 1)
        ):  # fmt: skip
            self.store(weights, times * POOL)
            self.check(lost)

    @property
    def unused(self) -> float:
        """The part of the pool that holds no block."""
        return 1 - self.cache.stats().used_bytes / POOL

    def slab_of(self, size: int) -> float:
        """The longest slab of this size, as part of the pool."""
        grid = table_of(self.cache).slots.grid
        return grid.shape(size_class(size)).units * grid.unit / POOL

    def check(self, lost: float) -> None:
        """No more than ``lost`` is unused, but for one slab of each size, which may be partly filled (of large slots,
        each of which is a slab: one slot), and for what evictions have freed for the next stores."""
        check_slots(table_of(self.cache).slots)
        stats = self.cache.stats()
        assert stats.used_bytes + stats.free_bytes + stats.reserved_bytes + stats.wasted_bytes == POOL
        slots = table_of(self.cache).slots
        assert stats.wasted_bytes == slots.wasted_bytes + slots.unfit_bytes, "a gap that fits no size in use is lost"
        open_slabs = sum(map(self.slab_of, table_of(self.cache).slots._cut_slabs))
        assert self.unused <= lost + open_slabs + 1 / AHEAD_SHARE


def sizes(least: int, most: int) -> st.SearchStrategy[int]:
    """As often between the least and twice of it as between the half of the largest and that; in pages."""
    return st.floats(least.bit_length() - 1, most.bit_length() - 1).map(lambda bits: size_class(int(2**bits)))


@long
@pytest.mark.no_cover  # slow when every line is counted
@settings(max_examples=examples(40), deadline=None)
@given(
    mix=st.lists(sizes(POOL // 8192, POOL // LONGEST_SHARE // 34), min_size=1, max_size=3, unique=True),
    slab=st.sampled_from([MIB // 2, MIB, 2 * MIB]),
    seed=st.integers(0, 1 << 30),
)
def test_blocks_of_any_sizes_up_to_a_544th_of_the_pool_fill_97_percent_of_it(
    mix: list[int], slab: int, seed: int
) -> None:
    pool = Pool(mix, slab, random.Random(seed))
    pool.go_through_proportions(MAX_WASTE)


@pytest.mark.no_cover  # slow when every line is counted
@settings(max_examples=examples(20), deadline=None)
@given(size=sizes(POOL // LONGEST_SHARE // 34, POOL // LARGEST_SHARE), seed=st.integers(0, 1 << 30))
def test_large_blocks_of_one_size_fill_the_pool_but_for_3_percent_and_a_slot(size: int, seed: int) -> None:
    Pool([size], MIB, random.Random(seed)).go_through_proportions(MAX_WASTE)


@long
@pytest.mark.no_cover  # slow when every line is counted
@pytest.mark.parametrize(
    "seeds", [*(range(tens, tens + 10) for tens in range(0, 60, 10)), (75, 249, 328, 363, 388, 472, 560, 644, 940)]
)
def test_large_blocks_of_several_sizes_lose_no_more_than_3_percent_and_a_block_of_the_smallest_size(
    seeds: Sequence[int],
) -> None:
    """Blocks do not move. Before their places were chosen by the gaps that they leave, more was lost in more than half
    of the mixes, and 11 % in the worst of these. The last seeds lost most of a thousand, with one price of gaps or
    another: 249 and 940 more than 3 %."""
    lost = {seed: lost_of(mix_of(seed), seed) for seed in seeds}
    assert max(lost.values()) <= MAX_WASTE, lost


@long
@pytest.mark.no_cover  # slow when every line is counted
@settings(max_examples=examples(20), deadline=None)
@given(
    mix=st.lists(sizes(POOL // 1024, POOL // LARGEST_SHARE), min_size=2, max_size=3, unique=True),
    seed=st.integers(0, 1 << 30),
)
def test_large_blocks_of_several_sizes_leave_gaps_of_no_more_than_a_sixth_of_the_pool(
    mix: list[int], seed: int
) -> None:
    """Blocks do not move, and what is evicted for a few small ones may be far more than they need: a place of the
    largest size is free at the end, too."""
    Pool(mix, MIB, random.Random(seed)).go_through_proportions(1 / 6 + max(mix) / POOL)
