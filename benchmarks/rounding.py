"""What large blocks of several sizes lose of a pool that they share: its bytes, and its hits.

    python -m benchmarks.rounding [--mixes 300] [--processes 2]

A mix is two or three sizes between a 1024th and an eighth of the pool, at random, each as likely between some size and
twice of it as between any other and its double. Three things are measured of each:

* "lost": stores fill the pool with one size, with another, with all and with all in other proportions; after each the
  bytes that can hold no block (`wasted_bytes`), less one block of the smallest size in the pool: so much is lost where
  nothing is, when no further block fits. The worst of the four counts.
* "hits, steady": blocks are looked up by a Zipf distribution, and stored where they miss. The bytes that were hit,
  divided by those of a pool that evicts the least recently used blocks by bytes alone and loses nothing. Its sizes are
  between a 256th and an eighth of the pool.
* "hits, changing": the same where every 250 accesses another size becomes the one that is mostly asked for.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate
from typing import NamedTuple

from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import LoadGrant, StoreGrant
from kvsidecar.cache.slots import SlotAllocator, size_class
from kvsidecar.types import Namespace

MIB = 1 << 20
POOL = 64 * MIB
SMALLEST, LARGEST = POOL // 1024, POOL // 8
SMALLEST_HIT = POOL // 256
ACCESSES, PHASE = 2000, 250
WORKING_SET = 3
"""Bytes of all blocks that are asked for, in pools."""
SKEW = 0.8
"""Exponent of the Zipf distribution."""


class Found(NamedTuple):
    """Of one mix."""

    lost: float
    """Part of the pool."""
    steady: float
    changing: float
    """Hits, as part of those of an ideal pool."""


class Mix:
    """A pool, and blocks of several sizes."""

    def __init__(self, sizes: Sequence[int], rng: random.Random) -> None:
        self.sizes, self.rng = sizes, rng
        self.allocator = SlotAllocator(POOL, MIB)
        self.cache = BlockCache(self.allocator)
        self.spaces = [
            self.cache.open_space(Namespace(str(group), "bf16", "l", 16, 1, 1, "sha256"), 0, 1, 0, size)
            for group, size in enumerate(sizes)
        ]

    def store(self, which: int, names: Iterable[str]) -> None:
        hashes = [hashlib.sha256(name.encode()).digest() for name in names]
        grant = self.cache.begin_store([(self.spaces[which], 0, hashes)])
        assert isinstance(grant, StoreGrant), f"a store was refused with {grant}, and nothing is in use"
        self.cache.seal_all(grant)

    def hit(self, which: int, name: str) -> bool:
        grant = self.cache.begin_load([(self.spaces[which], 0, [hashlib.sha256(name.encode()).digest()])], None, 0.0)
        if isinstance(grant, LoadGrant):
            self.cache.end_load(grant)
            return True
        return False

    @property
    def lost(self) -> float:
        """Part of the pool that can hold no block, less one block of the smallest size that is there."""
        stats = self.cache.stats()
        return (stats.wasted_bytes - min(self.allocator.sizes)) / stats.total_bytes


def mix_of(seed: int, smallest: int = SMALLEST) -> list[int]:
    """Two or three sizes."""
    rng = random.Random(seed)
    count, sizes = rng.choice([2, 3]), set[int]()
    while len(sizes) < count:
        sizes.add(size_class(int(2 ** rng.uniform(smallest.bit_length() - 1, LARGEST.bit_length() - 1))))
    mix = sorted(sizes)
    rng.shuffle(mix)
    return mix


def lost_of(sizes: Sequence[int], seed: int) -> float:
    """The most that is lost after any of the four changes."""
    mix, count = Mix(sizes, random.Random(seed)), 0
    one, worst = [1.0] + [0.0] * (len(sizes) - 1), 0.0
    proportions = (one, one[::-1], [1.0] * len(one), [mix.rng.random() for _ in one])
    for weights, pools in zip(proportions, (1.2, 1.5, 2.0, 1.0), strict=True):
        left = pools * POOL
        while left > 0:
            which = mix.rng.choices(range(len(sizes)), [w / size for w, size in zip(weights, sizes, strict=True)])[0]
            batch = max(1, min(64, POOL // 64 // sizes[which]))
            mix.store(which, map(str, range(count, count + batch)))
            count += batch
            left -= batch * sizes[which]
            if mix.rng.random() < 0.2:
                mix.hit(which, str(mix.rng.randrange(count)))
        worst = max(worst, mix.lost)
    return worst


def hits_of(sizes: Sequence[int], seed: int, *, changing: bool) -> float:
    """Bytes of the hits as part of those of an ideal pool."""
    mix = Mix(sizes, random.Random(seed))
    numbers = [int(WORKING_SET * POOL / len(sizes) / size) + 1 for size in sizes]
    ranks = [list(accumulate(1 / (rank + 1) ** SKEW for rank in range(number))) for number in numbers]
    ideal: OrderedDict[tuple[int, int], int] = OrderedDict()
    held = ours = theirs = 0
    for at in range(ACCESSES):
        favoured = at // PHASE % len(sizes)
        weights = [(8 if changing and which == favoured else 1) / size for which, size in enumerate(sizes)]
        which = mix.rng.choices(range(len(sizes)), weights)[0]
        block = which, mix.rng.choices(range(numbers[which]), cum_weights=ranks[which])[0]
        counts = at >= PHASE
        if mix.hit(which, str(block)):
            ours += counts * sizes[which]
        else:
            mix.store(which, [str(block)])
        if block in ideal:
            ideal.move_to_end(block)
            theirs += counts * sizes[which]
            continue
        ideal[block] = sizes[which]
        held += sizes[which]
        while held > POOL:
            held -= ideal.popitem(last=False)[1]
    return ours / theirs


def measure(seed: int) -> Found:
    """All of one mix."""
    hit = mix_of(seed, SMALLEST_HIT)
    return Found(lost_of(mix_of(seed), seed), hits_of(hit, seed, changing=False), hits_of(hit, seed, changing=True))


def main() -> None:
    """Print the distributions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", type=int, default=300)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    with ProcessPoolExecutor(args.processes) as executor:
        found = list(executor.map(measure, range(args.mixes), chunksize=4))
    lost = sorted(each.lost for each in found)
    over = {percent: sum(each > percent / 100 for each in lost) for percent in (1, 2, 3)}
    print(f"lost beside a block of the smallest size, of {len(lost)} mixes:", end=" ")
    print(*(f"over {percent} % in {count}," for percent, count in over.items()), f"worst {lost[-1]:.1%}")
    for name in ("steady", "changing"):
        ratios = sorted(getattr(each, name) for each in found)
        tenth, half = ratios[len(ratios) // 10], ratios[len(ratios) // 2]
        print(f"hits, {name}: worst {ratios[0]:.3f}, worst tenth below {tenth:.3f}, median {half:.3f} of an ideal pool")


if __name__ == "__main__":
    main()
