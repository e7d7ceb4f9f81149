"""One pool, by policy of eviction: the daemon's cache decides, block by block; beside it stands one that foresees all.

A prompt is looked up, its hits are loaded, and all of it is stored, as by an engine without a cache of its own; its
answer is stored when it ends. Hits are those of an engine: of a prompt, the blocks before the first miss. Not modelled:
the time that loads and stores take, and blocks that are in use meanwhile.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.fleet.cases import WARM_SHARE, load
from benchmarks.fleet.node import HASH_BYTES, LEASE_SECONDS, Kept, pack
from benchmarks.fleet.trace import Mix, uses_of
from kvsidecar.cache.arrays import Bools, Ints, first_of_each
from kvsidecar.cli.size.agentic import Sessions, schedule
from kvsidecar.cli.size.log import read_log
from kvsidecar.cli.size.uses import Use, Uses
from kvsidecar.types import Eviction, LookupMode

POLICIES: Final[tuple[str, ...]] = tuple(map(str, Eviction))
CLAIRVOYANT: Final = "clairvoyant"
SLAB_BLOCKS: Final = 8192
STEP_TOKENS: Final = 8192
"""Of a step of the engine."""
NEVER: Final = 1 << 40
DEPTH_BITS: Final = 22
"""Blocks of the longest prompt that ranks tell apart: more than the tokens of any."""
REPORT_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Prefill:
    """What it takes to compute a prompt: a token attends to all before it, so that later ones take longer.

    Args:
        rate: tokens a second at the start of a prompt.
        twice_at: position of the token that takes twice as long as the first one.
    """

    rate: float
    twice_at: float

    def seconds(self, tokens: int) -> float:
        """Of the first tokens of a prompt."""
        return (tokens + tokens * tokens / (2 * self.twice_at)) / self.rate


@dataclass
class Tally:
    """What is counted once the pool is warm."""

    prefill: Prefill
    requests: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    prefill_seconds: float = 0.0
    """Of all prompts, without a pool."""
    saved_seconds: float = 0.0
    stored_blocks: int = 0
    evicted_blocks: int = 0
    refused_blocks: int = 0
    """That found no place; of the clairvoyant, that it did not want."""

    def prompt(self, tokens: int, hits: int) -> None:
        """A prompt, of which so many tokens were hit."""
        self.requests += 1
        self.tokens += tokens
        self.hit_tokens += hits
        self.prefill_seconds += self.prefill.seconds(tokens)
        self.saved_seconds += self.prefill.seconds(hits)

    def row(self) -> dict[str, Any]:
        counted = {name: value for name, value in vars(self).items() if name != "prefill"}
        return {"hits": self.hit_tokens / self.tokens if self.tokens else 0.0, **counted}


class CachePool:
    """The daemon's cache with one of its policies.

    Args:
        store_tokens: store what a prompt misses so many tokens at a time, and touch the whole prompt then; 0: store it
            at once, as one use.
    """

    def __init__(self, policy: str, blocks: int, block_tokens: int, store_tokens: int = 0) -> None:
        self._kept = Kept(blocks, SLAB_BLOCKS, eviction=Eviction(policy))
        self._store_bytes = -(-store_tokens // block_tokens) * HASH_BYTES
        self._step_bytes = -(-STEP_TOKENS // block_tokens) * HASH_BYTES
        self._most_bytes = blocks * HASH_BYTES
        self._evicted = 0

    def prompt(self, use: Use, tally: Tally) -> int:
        """Blocks that are hit. What is missed is stored."""
        cache, packed = self._kept.cache, pack(use.runs.numbers())
        cache.expire(use.at)
        lease, (found,) = cache.lookup_and_lease(
            [(self._kept.space, packed)], LookupMode.PREFIX, use.at, LEASE_SECONDS, None
        )
        hits = found.count(True)
        if lease is not None:
            grant = self._kept.begin_load(packed[: hits * HASH_BYTES], lease.id, use.at)
            assert grant is not None, "leased blocks cannot be loaded"
            cache.release(lease.id)
            cache.end_load(grant)
        self._store(packed, hits * HASH_BYTES, tally)
        return hits

    def answer(self, use: Use, tally: Tally) -> None:
        self._kept.cache.expire(use.at)
        self._store(pack(use.runs.numbers()), 0, tally, pack(use.prompt.numbers()), use.pause)

    def _store(self, packed: bytes, hit_bytes: int, tally: Tally, prompt: bytes = b"", pause: float = 0.0) -> None:
        whole = packed[: self._most_bytes]  # the tail of a longer prompt would take the place of its head
        if self._store_bytes:
            for at in range(hit_bytes, len(packed), self._store_bytes):
                piece = packed[at : at + self._store_bytes]
                tally.refused_blocks += 0 if self._put(piece, tally) else len(piece) // HASH_BYTES
            self._kept.cache.touch([(self._kept.space, prompt + packed)], pause)  # as vLLM's connector does
        elif self._put(whole, tally):
            tally.refused_blocks += (len(packed) - len(whole)) // HASH_BYTES
        else:  # the policy declines it as a whole, but maybe not its head
            at = hit_bytes
            while at < len(whole) and self._put(whole[at : at + self._step_bytes], tally):
                at += self._step_bytes
            tally.refused_blocks += max(0, len(packed) - at) // HASH_BYTES
        if pause and not self._store_bytes:
            self._kept.cache.touch([(self._kept.space, prompt + packed)], pause)
        evicted = self._kept.cache.stats().evicted_blocks
        tally.evicted_blocks += evicted - self._evicted
        self._evicted = evicted

    def _put(self, hashes: bytes, tally: Tally) -> bool:
        """Whether the cache takes these blocks."""
        if (grant := self._kept.reserve(hashes)) is None:
            return False
        tally.stored_blocks += len(grant.parts[0].index)
        self._kept.cache.seal_all(grant)
        return True


class ClairvoyantPool:
    """Keeps what is used soonest (Belady's rule, block by block), and does not store what would have to go at once.

    This is the most that any policy can hit. Of blocks that are used next by the same prompt the deepest goes first,
    and the head of a prompt is used no later than what is behind it: none is ever kept behind a missing one, where it
    would be useless. A use before it is counted is none: the block is stored then anyway.
    """

    def __init__(self, uses: Uses, blocks: int) -> None:
        self._next = _next_uses(uses)
        self._at = 0
        self._blocks = blocks
        self._held: Bools = np.zeros(uses.num_blocks, np.bool_)
        self._rank: Ints = np.zeros(uses.num_blocks, np.int64)
        """By block: its next use, and its depth."""
        self._all: Ints = np.zeros(0, np.int64)
        """The blocks that are held."""

    def prompt(self, use: Use, tally: Tally) -> int:
        numbers = use.runs.numbers()
        missed = np.flatnonzero(~self._held[numbers])
        self._take(numbers, use.depth, tally)
        return int(missed[0]) if len(missed) else len(numbers)

    def answer(self, use: Use, tally: Tally) -> None:
        self._take(use.runs.numbers(), use.depth, tally)

    def _take(self, numbers: Ints, depth: int, tally: Tally) -> None:
        values, counts = self._next[self._at]
        self._at += 1
        depths = np.arange(depth, depth + len(numbers))
        self._rank[numbers] = (np.repeat(values, counts) << DEPTH_BITS) + depths
        new = numbers[~self._held[numbers]]
        new = new[first_of_each(new)]
        self._held[new] = True
        self._all = np.concatenate((self._all, new))
        tally.stored_blocks += len(new)
        too_many = len(self._all) - self._blocks
        if too_many > 0:
            order = np.argpartition(-self._rank[self._all], too_many - 1)
            gone, self._all = self._all[order[:too_many]], self._all[order[too_many:]]
            self._held[gone] = False
            refused = int(np.count_nonzero(~self._held[new]))
            tally.stored_blocks -= refused
            tally.refused_blocks += refused
            tally.evicted_blocks += too_many - refused


def _next_uses(uses: Uses) -> list[tuple[Ints, Ints]]:
    """For each use the numbers of those that look its blocks up next, as values and how often each is repeated."""
    found = []
    next_use: Ints = np.full(uses.num_blocks, NEVER, np.int64)
    for number in range(len(uses.uses) - 1, -1, -1):
        use = uses.uses[number]
        blocks = use.runs.numbers()
        coming = next_use[blocks]
        starts = np.flatnonzero(np.diff(coming, prepend=-1))
        found.append((coming[starts], np.diff(starts, append=len(coming))))
        if use.tokens:
            next_use[blocks] = number if use.at >= uses.warm else NEVER
    found.reverse()
    return found


@dataclass(frozen=True)
class Log:
    """Of requests, as `read_log` reads it."""

    path: Path


Source = Sessions | Log | Mix | Path
"""Sessions or a log, or the generated trace or the file of Mooncake that `load` takes."""


@dataclass(frozen=True)
class Task:
    """One policy over one pool."""

    source: Source
    policy: str
    """`CLAIRVOYANT` among them."""
    pool_tokens: int
    prefill: Prefill
    store_tokens: int = 0
    """Of one store; 0: a prompt is stored as a whole."""


@lru_cache(maxsize=1)
def load_uses(source: Source) -> Uses:
    """What is replayed.

    Raises:
        BadFile: a file is not what it should be.
    """
    if isinstance(source, Sessions):
        return schedule(source)
    if isinstance(source, Log):
        return read_log(source.path)
    return uses_of(load(source), WARM_SHARE if isinstance(source, Mix) else 0.0)


def run_policy(task: Task) -> dict[str, Any]:
    """What a policy hits and saves; `Tally` has the names. For a process of its own."""
    return replay(load_uses(task.source), task)


def replay(uses: Uses, task: Task) -> dict[str, Any]:
    blocks = task.pool_tokens // uses.block_tokens
    pool = (
        ClairvoyantPool(uses, blocks)
        if task.policy == CLAIRVOYANT
        else CachePool(task.policy, blocks, uses.block_tokens, task.store_tokens)
    )
    before, tally = Tally(task.prefill), Tally(task.prefill)
    began = reported = time.monotonic()
    for number, use in enumerate(uses.uses):
        counts = tally if use.at >= uses.warm else before
        if use.tokens:
            hits = pool.prompt(use, counts)
            counts.prompt(use.tokens, min(hits * uses.block_tokens, use.tokens))
        else:
            pool.answer(use, counts)
        if (now := time.monotonic()) >= reported + REPORT_SECONDS:
            reported = now
            share = number / len(uses.uses)
            print(f"{now - began:.0f} s: {task.policy}, {share:.0%} replayed", file=sys.stderr, flush=True)
    return tally.row()
