"""An engine's own cache in front of the daemon's pool, and when the connector stores what it has.

The engine keeps the blocks of its last requests, evicts the least recently used, and of a request the deepest first, as
vLLM's prefix cache does. ``eager`` stores what a request has and the pool lacks; ``lazy`` stores what of this was hit
in the engine, and what the engine evicts (docs/vllm.md, "Eager or lazy?"). Not modelled: requests that hold their
blocks, and an idle engine, which stores all that it has.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Protocol

import numpy as np

from kvsidecar.cache.arrays import Ints
from kvsidecar.cli.size.hits import packed
from kvsidecar.cli.size.uses import Use

EAGER: Final = "eager"
LAZY: Final = "lazy"
MODES: Final = (EAGER, LAZY)


class Pool(Protocol):
    """What is behind the engine."""

    def look_up(self, at: float, hashes: bytes) -> int: ...
    def store(self, hashes: bytes, start: int) -> None: ...
    def touch(self, hashes: bytes, pause: float) -> None: ...


class Engine:
    """Hits are those of the engine and of the pool behind it.

    Args:
        blocks: that it has room for.
        mode: one of `MODES`.
    """

    def __init__(self, pool: Pool, blocks: int, mode: str) -> None:
        self._pool, self._num_blocks, self._lazy = pool, blocks, mode == LAZY
        self._blocks: OrderedDict[int, bool] = OrderedDict()
        """Those that it has, the next to go first, and whether each was stored."""

    def prompt(self, use: Use) -> int:
        numbers = use.runs.numbers()
        listed = numbers.tolist()
        local = next((at for at, number in enumerate(listed) if number not in self._blocks), len(listed))
        found = self._pool.look_up(use.at, packed(numbers))
        hits = max(local, found)
        if self._lazy:
            self._store_some(listed[found:local])
        self._keep(listed[local:found], stored=True)
        self._computed(numbers[hits:] if self._lazy else numbers[found:])
        self._use(listed)
        self._pool.touch(packed(numbers), 0.0)
        return hits

    def answer(self, use: Use) -> None:
        numbers, prompt = use.runs.numbers(), use.prompt.numbers()
        self._computed(numbers)
        both = np.concatenate((prompt, numbers))
        self._use(both.tolist())
        self._pool.touch(packed(both), use.pause)

    def _computed(self, numbers: Ints) -> None:
        if not self._lazy:
            self._pool.store(packed(numbers), 0)
        self._keep(numbers.tolist(), stored=not self._lazy)

    def _keep(self, numbers: list[int], *, stored: bool) -> None:
        """The engine has these blocks from now on, and whether they were stored."""
        self._blocks.update(dict.fromkeys(numbers, stored))

    def _use(self, numbers: list[int]) -> None:
        """A request has used these blocks: they go last, the deepest of them first; others go for them."""
        for number in reversed(numbers):
            self._blocks.setdefault(number, False)
            self._blocks.move_to_end(number)
        gone = [self._blocks.popitem(last=False) for _ in range(len(self._blocks) - self._num_blocks)]
        if self._lazy:
            self._store_some([number for number, stored in reversed(gone) if not stored])

    def _store_some(self, numbers: list[int]) -> None:
        """Store these blocks, a head before what is behind it."""
        if numbers:
            self._pool.store(packed(np.array(numbers, np.int64)), 0)
            for number in numbers:
                if number in self._blocks:
                    self._blocks[number] = True
