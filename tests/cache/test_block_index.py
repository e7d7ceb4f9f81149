from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvsidecar.cache.array_kernels import LANES
from kvsidecar.cache.block_index import BLOCKS_PER_BUCKET, BlockIndex
from tests.cache.integrity import check_index
from tests.cache.support import hashes_of, instructions_of, rows_in
from tests.marks import examples

pytestmark = pytest.mark.timeout(600)


def index(hash_bytes: int = 32, capacity: int = 4096, seed: int = 0) -> BlockIndex:
    return BlockIndex(hash_bytes, capacity, seed)


def digests(*numbers: int, width: int = 32) -> list[bytes]:
    return [hashlib.shake_128(b"%d" % number).digest(width) for number in numbers]


def find(blocks: BlockIndex, hashes: list[bytes]) -> list[int]:
    return blocks.find(blocks.keys(hashes)).tolist()


@pytest.mark.parametrize("width", [16, 17, 20, 31, 32, 33, 64])
def test_hashes_of_every_width_are_found_and_come_back(width: int) -> None:
    blocks = index(width)
    hashes = digests(*range(100), width=width)
    blocks.add(blocks.keys(hashes), np.arange(100))
    assert find(blocks, hashes) == list(range(100))
    assert hashes_of(blocks, np.arange(100)) == hashes
    assert find(blocks, digests(*range(100, 200), width=width)) == [-1] * 100
    check_index(blocks)


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5, 100])
def test_hashes_may_come_as_one_string(count: int) -> None:
    blocks = index()
    hashes = digests(*range(count))
    blocks.add(blocks.keys(b"".join(hashes)), np.arange(count))
    assert blocks.find(blocks.keys(b"".join(hashes))).tolist() == find(blocks, hashes) == list(range(count))


def test_hashes_that_share_a_tag_are_told_apart() -> None:
    """As an attacker would choose them who knew the seed: all in one bucket, which overflows."""
    blocks = index()
    hashes = digests(*range(3 * LANES))
    blocks._multipliers[:] = 0
    assert len(set(blocks.keys(hashes).tags.tolist())) == 1
    blocks.add(blocks.keys(hashes), np.arange(3 * LANES))
    assert find(blocks, hashes) == list(range(3 * LANES))
    assert [find(blocks, [each]) for each in hashes] == [[row] for row in range(3 * LANES)]
    check_index(blocks)
    blocks.remove(np.arange(0, 3 * LANES, 2))
    assert find(blocks, hashes) == [row if row % 2 else -1 for row in range(3 * LANES)]
    check_index(blocks)


@pytest.mark.parametrize("here", [90, 380, 760, 3060])
def test_a_call_costs_no_more_where_all_blocks_share_a_bucket_and_however_many_they_are(here: int) -> None:
    """Whoever knows the draw, or finds hashes that collide whatever it is, gains nothing."""
    blocks = index(capacity=4096)
    blocks._multipliers[:] = blocks._addend = 0  # all are in bucket 0, which one of these calls splits
    blocks.add(blocks.keys(digests(*range(here))), np.arange(here))
    more, one = blocks.keys(digests(*range(here, here + 50))), blocks.keys(digests(here + 50))
    there, last = blocks.keys(digests(*range(here - 50, here))), blocks.keys(digests(here - 1))
    rows = np.arange(here, here + 50)
    calls: list[tuple[int, Callable[[], object]]] = [
        (50, lambda: blocks.find(more)),
        (50, lambda: blocks.find(there)),
        (50, lambda: blocks.add(more, rows)),
        (50, lambda: blocks.remove(rows)),
        (1, lambda: blocks.find(one)),
        (1, lambda: blocks.find(last)),
        (1, lambda: blocks.add(one, np.array([here + 50]))),
        (1, lambda: blocks.remove(np.array([here + 50]))),
    ]
    for number, (count, call) in enumerate(calls):
        assert instructions_of(call) < 1000 + 1000 * count, f"call {number}"
    check_index(blocks)


@pytest.mark.parametrize("width", [16, 20, 32, 64])
@pytest.mark.parametrize("top", [32, 64])
def test_hashes_chosen_to_differ_in_top_bits_alone_spread_as_others_do(width: int, top: int) -> None:
    """In the six bits below bit ``top`` of each word: whatever the seed, a sum of products of whole words with numbers
    of 64 bits gives all of them 64 tags."""
    for seed in range(5):
        rng, blocks = random.Random(seed), index(width, 10000, seed)
        words = [[rng.getrandbits(6) << top - 6 for _ in range(8)] for _ in range(5000)]
        hashes = blocks.keys(sorted({struct.pack("<8Q", *each)[:width] for each in words}))
        assert len(np.unique(hashes.tags)) > 0.99 * len(hashes), "the tags"
        assert len(np.unique(hashes.tags & np.uint32(511))) > 400, "the buckets"
        blocks.add(hashes, np.arange(len(hashes)))
        assert len(blocks.overflowed()) < 200
        check_index(blocks)


def test_hashes_that_differ_in_few_bits_spread_over_the_buckets() -> None:
    blocks = index(capacity=20000)
    hashes = [number.to_bytes(2, "little").rjust(32, b"#") for number in range(10000)]
    blocks.add(blocks.keys(hashes), np.arange(10000))
    assert len(blocks.overflowed()) < 200


def test_the_table_grows_by_few_buckets_a_call() -> None:
    blocks = index(capacity=100000)
    split = 0
    for first in range(0, 60000, 600):
        before = blocks._num_buckets
        blocks.add(blocks.keys(digests(*range(first, first + 600))), np.arange(first, first + 600))
        split = max(split, blocks._num_buckets - before)
    assert 0 < split <= 600 // BLOCKS_PER_BUCKET + 1
    assert len(blocks.overflowed()) < 60
    check_index(blocks)


@given(st.integers(0, 2**64 - 1))
def test_it_works_with_every_seed(seed: int) -> None:
    blocks = index(seed=seed)
    blocks.add(blocks.keys(digests(*range(500))), np.arange(500))
    assert find(blocks, digests(*range(500))) == list(range(500))
    check_index(blocks)


class IndexMachine(RuleBasedStateMachine):
    """Against a dict. Few tags, so that buckets overflow; few rows at the start, so that it grows."""

    @initialize(tag_bits=st.sampled_from([0, 1, 3, 32]))
    def start(self, tag_bits: int) -> None:
        self.index = index(capacity=16)
        self.index._tags_of = self.few_tags  # type: ignore[method-assign]
        self.mask = np.uint32((1 << tag_bits) - 1)
        self.rows: dict[bytes, int] = {}
        self.next_row = 0

    def few_tags(self, words: np.ndarray) -> np.ndarray:
        return BlockIndex._tags_of(self.index, words) & self.mask | np.uint32(1 << 31)

    @rule(names=st.lists(st.integers(0, 200), max_size=60, unique=True))
    def add(self, names: list[int]) -> None:
        new = [each for each in digests(*names) if each not in self.rows]
        rows = range(self.next_row, self.next_row + len(new))
        self.next_row += len(new)
        if self.next_row > len(self.index._words):
            self.index.reserve(2 * self.next_row)
        self.index.add(self.index.keys(new), np.array(rows, np.int64))
        self.rows |= dict(zip(new, rows, strict=True))

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.rows:
            gone = data.draw(st.lists(st.sampled_from(sorted(self.rows)), max_size=40, unique=True))
            self.index.remove(np.array([self.rows.pop(each) for each in gone], np.int64))

    @rule(names=st.lists(st.integers(0, 200), max_size=60))
    def look(self, names: list[int]) -> None:
        hashes = digests(*names)
        assert find(self.index, hashes) == [self.rows.get(each, -1) for each in hashes]

    @invariant()
    def it_adds_up(self) -> None:
        if hasattr(self, "mask"):
            check_index(self.index)
            assert sorted(rows_in(self.index).tolist()) == sorted(self.rows.values())


IndexMachine.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
TestIndex = IndexMachine.TestCase
