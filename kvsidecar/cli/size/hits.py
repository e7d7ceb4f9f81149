"""Simulates the hits of a trace of requests in a pool of a given size: the daemon's own cache decides, block by block.

A prompt is looked up, its hits are used, and the rest is stored in steps as an engine computes it. As in an engine, the
hits of a prompt are the blocks before the first miss. They include what the engine's own cache on the GPU would have
hit. `benchmarks.fleet` also simulates the times of copies, the tiers' admission and several nodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from kvsidecar.cache.arrays import Ints
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import StoreGrant
from kvsidecar.cache.slots import SLOT_ALIGN, SlotAllocator
from kvsidecar.cli.size.agentic import SessionReplay, schedule
from kvsidecar.cli.size.json_lines import parse_line, read_lines, read_text
from kvsidecar.cli.size.log import read_log
from kvsidecar.cli.size.progress import ReplayProgress
from kvsidecar.cli.size.uses import Use, Uses, runs_of
from kvsidecar.errors import Refusal
from kvsidecar.types import Eviction, LookupMode, Namespace

MOONCAKE_TOKENS: Final = 512
"""Tokens of a block in Mooncake's traces."""
STEP_TOKENS: Final = 8192
"""Tokens that an engine computes, and stores, at once."""
LEASE_SECONDS: Final = 60.0
HASH_BYTES: Final = 16
SLAB_BLOCKS: Final = 8192
HOURS: Final = 1.5
"""Duration of replayed sessions; the first half hour is not counted."""


def read(path: Path, sessions: int, progress: ReplayProgress | None = None) -> Uses:
    """The requests of a file in whichever format it is: Mooncake's, recorded sessions (`agentic`), or a log (`log`).

    Args:
        sessions: how many recorded ones run at once. Other formats have the times of their requests.

    Raises:
        BadFile: it has none of these formats; the text names the line.
    """
    first = _first_object(path)
    if "requests" in first and "block" in first:
        return schedule(SessionReplay(path, sessions, HOURS))
    if "hash_ids" in first and "input_length" in first:
        return _read_mooncake(path, progress)
    return read_log(path, progress)


def _first_object(path: Path) -> dict[str, object]:
    """The object with which a file begins; empty if it begins with something else."""
    first = next(read_text(path))
    return parse_line(path, first).values if first.text.startswith("{") else {}


def _read_mooncake(path: Path, progress: ReplayProgress | None) -> Uses:
    """A trace in Mooncake's format: on each line an object with timestamp (ms), input_length, and hash_ids, one for
    each 512 tokens.

    Raises:
        BadFile: it is something else.
    """
    found, known = [], dict[int, int]()
    for number, line in enumerate(read_lines(path), 1):
        if progress is not None:
            progress.read(path.name, number)
        tokens = line.count("input_length")
        hashes = line.counts("hash_ids")[: tokens // MOONCAKE_TOKENS]
        numbers = np.array([known.setdefault(each, len(known)) for each in hashes], np.int64)
        found.append(Use(line.number("timestamp") / 1000, tokens, runs_of(numbers)))
    found.sort(key=lambda use: use.at)
    return Uses(path.name, MOONCAKE_TOKENS, len(known), 0.0, found)


class SimulatedPool:
    """The daemon's cache, without bytes."""

    def __init__(self, blocks: int, block_tokens: int, eviction: Eviction) -> None:
        slots = SlotAllocator(blocks * SLOT_ALIGN, min(blocks, SLAB_BLOCKS) * SLOT_ALIGN)
        self.cache = BlockCache(slots, eviction=eviction)
        namespace = Namespace("size", "bf16", "layout", block_tokens, 1, 1, "number", HASH_BYTES)
        self._space = self.cache.open_space(namespace, 0, 1, 0, SLOT_ALIGN)
        self.most_bytes = blocks * HASH_BYTES
        """Bytes of the hashes of all blocks that it can hold."""
        self.step_bytes = -(-STEP_TOKENS // block_tokens) * HASH_BYTES
        """Bytes of the hashes of the blocks that an engine computes at once."""

    def prompt(self, use: Use) -> int:
        """Look a prompt up, and store what is missed. Returns the number of hits."""
        hashes = packed(use.runs.numbers())
        hits = self.look_up(use.at, hashes)
        self.store(hashes, hits * HASH_BYTES)
        self.touch(hashes, 0.0)
        return hits

    def look_up(self, at: float, hashes: bytes) -> int:
        """Look up the blocks of a prompt, and load the hits. Returns their number."""
        cache = self.cache
        cache.expire(at)
        lease, (found,) = cache.lookup_and_lease([(self._space, hashes)], LookupMode.PREFIX, at, LEASE_SECONDS, None)
        hits = found.count(True)
        if lease is not None:
            loaded = cache.begin_load([(self._space, 0, hashes[: hits * HASH_BYTES])], lease.id, at)
            assert not isinstance(loaded, Refusal), "what is leased cannot be loaded"
            cache.release(lease.id)
            cache.end_load(loaded)
        return hits

    def answer(self, use: Use) -> None:
        self.cache.expire(use.at)
        hashes = packed(use.runs.numbers())
        self.store(hashes, 0)
        self.touch(packed(use.prompt.numbers()) + hashes, use.pause)

    def store(self, hashes: bytes, start: int) -> None:
        """Store what follows the first ``start`` bytes of the hashes, as an engine computes it."""
        end = min(len(hashes), self.most_bytes)  # the head of a prompt that is larger than the pool
        for at in range(start, end, self.step_bytes):
            self.put(hashes[at : min(end, at + self.step_bytes)])

    def put(self, hashes: bytes) -> StoreGrant | None:
        """Store these blocks at once; None: the cache refuses them."""
        grant = self.cache.begin_store([(self._space, 0, hashes)])
        if isinstance(grant, Refusal):
            return None
        self.cache.seal_all(grant)
        return grant

    def touch(self, hashes: bytes, pause: float) -> None:
        self.cache.touch([(self._space, hashes)], pause)


def hit_rate(
    uses: Uses, tokens: int, eviction: Eviction = Eviction.LRU, progress: ReplayProgress | None = None
) -> float:
    """Share of the prompts' tokens that a pool of this many tokens hits, empty at first."""
    pool = SimulatedPool(max(1, tokens // uses.block_tokens), uses.block_tokens, eviction)
    asked = hits = 0
    for number, use in enumerate(uses.uses):
        if progress is not None:
            progress.replayed(f"a pool of {tokens:,} tokens, {eviction}", number, len(uses.uses))
        if not use.tokens:
            pool.answer(use)
            continue
        found = pool.prompt(use) * uses.block_tokens
        if use.at >= uses.warm:
            asked += use.tokens
            hits += min(found, use.tokens)
    return hits / asked if asked else 0.0


def most_hits(uses: Uses) -> float:
    """The hit rate with room for everything."""
    seen = np.zeros(uses.num_blocks, np.bool_)
    asked = hits = 0
    for use in uses.uses:
        numbers = use.runs.numbers()
        if use.tokens and use.at >= uses.warm:
            missed = np.flatnonzero(~seen[numbers])
            asked += use.tokens
            hits += min(use.tokens, (int(missed[0]) if len(missed) else len(numbers)) * uses.block_tokens)
        seen[numbers] = True
    return hits / asked if asked else 0.0


def packed(numbers: Ints) -> bytes:
    """Hashes of blocks with these numbers, joined."""
    words = np.zeros((len(numbers), 2), np.uint64)
    words[:, 0] = numbers
    words[:, 1] = words[:, 0] * np.uint64(0x9E3779B97F4A7C15)
    return words.tobytes()
