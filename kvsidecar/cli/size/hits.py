"""What a trace of requests hits in a pool of a given size: the daemon's own cache decides, block by block.

A prompt is looked up, its hits are used, and all of it is stored. Hits are those of an engine: of a prompt, the blocks
before the first miss. What the engine's own cache on the GPU would have hit is among them. `benchmarks.fleet` also
simulates the times of copies, the tiers' admission and several nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.slots import SLOT_ALIGN, SlotAllocator
from kvsidecar.cli.size.json_lines import read_lines
from kvsidecar.errors import Refusal
from kvsidecar.types import LookupMode, Namespace

BLOCK_TOKENS: Final = 512
HASH_BYTES: Final = 16
SLAB_BLOCKS: Final = 8192


@dataclass(frozen=True, slots=True)
class Prompt:
    at: float
    """Seconds."""
    tokens: int
    hashes: bytes
    """Of its full blocks of `BLOCK_TOKENS`, joined."""


def read(path: Path) -> list[Prompt]:
    """A trace as Mooncake publishes it: on each line an object with timestamp (ms), input_length, and hash_ids, one
    for each 512 tokens.

    Raises:
        BadFile: it is something else.
    """
    found = []
    for line in read_lines(path):
        tokens = line.count("input_length")
        numbers = line.counts("hash_ids")[: tokens // BLOCK_TOKENS]
        words = np.zeros((len(numbers), 2), np.uint64)
        words[:, 0] = numbers
        words[:, 1] = words[:, 0] * np.uint64(0x9E3779B97F4A7C15)
        found.append(Prompt(line.number("timestamp") / 1000, tokens, words.tobytes()))
    found.sort(key=lambda prompt: prompt.at)
    return found


def hit_rate(prompts: Sequence[Prompt], blocks: int) -> float:
    """Share of the prompts' tokens that a pool of so many blocks hits, from empty."""
    cache = BlockCache(SlotAllocator(max(1, blocks) * SLOT_ALIGN, max(1, min(blocks, SLAB_BLOCKS)) * SLOT_ALIGN))
    namespace = Namespace("size", "bf16", "layout", BLOCK_TOKENS, 1, 1, "number", HASH_BYTES)
    space = cache.open_space(namespace, 0, 1, 0, SLOT_ALIGN)
    tokens = hits = 0
    for prompt in prompts:
        found = cache.lookup(space, prompt.hashes, LookupMode.PREFIX).count(True)
        hits += found * BLOCK_TOKENS
        tokens += prompt.tokens
        split = found * HASH_BYTES
        if found:
            loaded = cache.begin_load([(space, 0, prompt.hashes[:split])], None, prompt.at)
            assert not isinstance(loaded, Refusal), "what was just found cannot be loaded"
            cache.end_load(loaded)
        new = prompt.hashes[split : max(1, blocks) * HASH_BYTES]  # the head of a prompt that is larger than the pool
        stored = cache.begin_store([(space, 0, new)]) if new else Refusal.NOT_FOUND
        if not isinstance(stored, Refusal):
            cache.seal_all(stored)
    return hits / tokens if tokens else 0.0
