"""One pool, by policy of eviction: the daemon's cache decides, block by block; beside it stands one that foresees all.

A prompt is looked up, its hits are loaded, and all of it is stored, as by an engine without a cache of its own; its
answer is stored when it ends. Hits are those of an engine: of a prompt, the blocks before the first miss. Not modelled:
the time that loads and stores take, and blocks that are in use meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.fleet.cases import WARM_SHARE, load
from benchmarks.fleet.engine_cache import Engine
from benchmarks.fleet.trace import Mix, uses_of
from kvsidecar.cache.arrays import Bools, Ints, first_of_each
from kvsidecar.cache.grants import StoreGrant
from kvsidecar.cli.size.agentic import SessionReplay, schedule
from kvsidecar.cli.size.hits import HASH_BYTES, SimulatedPool
from kvsidecar.cli.size.log import read_log
from kvsidecar.cli.size.progress import ReplayProgress
from kvsidecar.cli.size.uses import Use, Uses
from kvsidecar.types import Eviction, LookupMode

POLICIES: Final[tuple[str, ...]] = tuple(map(str, Eviction))
CLAIRVOYANT: Final = "clairvoyant"
NEVER: Final = 1 << 40
DEPTH_BITS: Final = 22
"""Blocks of the longest prompt that ranks tell apart: more than the tokens of any."""


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


class CachePool(SimulatedPool):
    """The daemon's cache with one of its policies, and what it does with blocks, counted.

    Args:
        store_tokens: store what a prompt misses so many tokens at a time, and touch the whole prompt then; 0: store it
            at once, as one use.
    """

    def __init__(self, policy: str, blocks: int, block_tokens: int, store_tokens: int = 0) -> None:
        super().__init__(blocks, block_tokens, Eviction(policy))
        self._piece_bytes = -(-store_tokens // block_tokens) * HASH_BYTES
        self._evicted = 0
        self.tally: Tally
        """Of now."""

    def store(self, hashes: bytes, start: int) -> None:
        tally = self.tally
        whole = hashes[: self.most_bytes]  # the tail of a longer prompt would take the place of its head
        if self._piece_bytes:
            for at in range(start, len(hashes), self._piece_bytes):
                piece = hashes[at : at + self._piece_bytes]
                tally.refused_blocks += 0 if self.put(piece) else len(piece) // HASH_BYTES
        elif self.put(whole):
            tally.refused_blocks += (len(hashes) - len(whole)) // HASH_BYTES
        else:  # the policy declines it as a whole, but maybe not its head
            at = start
            while at < len(whole) and self.put(whole[at : at + self.step_bytes]):
                at += self.step_bytes
            tally.refused_blocks += max(0, len(hashes) - at) // HASH_BYTES
        evicted = self.cache.stats().evicted_blocks
        tally.evicted_blocks += evicted - self._evicted
        self._evicted = evicted

    def put(self, hashes: bytes) -> StoreGrant | None:
        if (grant := super().put(hashes)) is not None:
            self.tally.stored_blocks += len(grant.parts[0].index)
        return grant

    def held(self, hashes: bytes) -> int:
        """Blocks of a prompt that it has, which are not used by that."""
        return self.cache.lookup(self._space, hashes, LookupMode.PREFIX).count(True)

    def touch(self, hashes: bytes, pause: float) -> None:
        if self._piece_bytes or pause:
            super().touch(hashes, pause)


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
        self.tally: Tally
        """Of now."""

    def prompt(self, use: Use) -> int:
        numbers = use.runs.numbers()
        missed = np.flatnonzero(~self._held[numbers])
        self._take(numbers, use.depth)
        return int(missed[0]) if len(missed) else len(numbers)

    def answer(self, use: Use) -> None:
        self._take(use.runs.numbers(), use.depth)

    def _take(self, numbers: Ints, depth: int) -> None:
        tally = self.tally
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


Source = SessionReplay | Log | Mix | Path
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
    engine_tokens: int = 0
    """Of the cache of the engine in front of it; 0: it has none."""
    store_mode: str = ""
    """Of the engine."""


@lru_cache(maxsize=1)
def load_uses(source: Source) -> Uses:
    """What is replayed. Raises BadFile: a file is not what it should be."""
    if isinstance(source, SessionReplay):
        return schedule(source)
    if isinstance(source, Log):
        return read_log(source.path)
    return uses_of(load(source), WARM_SHARE if isinstance(source, Mix) else 0.0)


def run_policy(task: Task) -> dict[str, Any]:
    """What a policy hits and saves; `Tally` has the names. For a process of its own."""
    return replay(load_uses(task.source), task)


def replay(uses: Uses, task: Task) -> dict[str, Any]:
    blocks = task.pool_tokens // uses.block_tokens
    engine = task.engine_tokens // uses.block_tokens
    pool: ClairvoyantPool | CachePool
    asked: ClairvoyantPool | CachePool | Engine
    if task.policy == CLAIRVOYANT:
        pool = asked = ClairvoyantPool(uses, blocks + engine)
    else:
        pool = CachePool(task.policy, blocks, uses.block_tokens, task.store_tokens)
        asked = Engine(pool, engine, task.store_mode) if engine else pool
    before, tally, progress = Tally(task.prefill), Tally(task.prefill), ReplayProgress()
    for number, use in enumerate(uses.uses):
        pool.tally = counts = tally if use.at >= uses.warm else before
        if use.tokens:
            hits = asked.prompt(use)
            counts.prompt(use.tokens, min(hits * uses.block_tokens, use.tokens))
        else:
            asked.answer(use)
        progress.replayed(task.policy, number, len(uses.uses))
    return tally.row()
