"""Whether it would pay to read from a disk what a session is expected to ask for soon.

    python -m benchmarks.fleet.prefetch --agentic FILE --sessions 16 --pool-tokens 0.5M

The pool of `benchmarks.fleet`, and behind it a disk with all that was ever stored. Of each prompt, the part that the
pool lacks is read from the disk when the prompt comes. Prefetching, it is read before: ``predicted``, when a share of
the session's usual gap has passed (as `kvsidecar.cache.eviction_rhythm` has it, which also decides what goes for it or
whether it is declined); ``foreseen``, so many seconds before the next prompt, as only the trace knows. Printed are the
shares of the prompts' tokens that the pool has when they are asked for, that are read then, and that were read before;
and how busy a disk is with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.fleet.__main__ import tokens
from benchmarks.fleet.cases import MODELS
from benchmarks.fleet.policies import CachePool, Prefill, Tally
from benchmarks.fleet.trace import BLOCK_TOKENS
from kvsidecar.cache.arrays import Bools, Ints
from kvsidecar.cache.eviction_rhythm import FIRST_GAP, STEPS, moved
from kvsidecar.cli.size.agentic import SessionReplay, schedule
from kvsidecar.cli.size.hits import HASH_BYTES, STEP_TOKENS, packed
from kvsidecar.cli.size.uses import Use, Uses
from kvsidecar.types import Eviction

DISK_BYTES = 6.5e9
"""That it reads in a second."""
WAYS = (("none", 0.0), ("predicted", 0.5), ("predicted", 1.0), ("foreseen", 5.0))


class Read(NamedTuple):
    """What is to be prefetched."""

    at: float
    number: int
    """Of the answer after which it is: a later one of the session replaces it."""
    session: int
    blocks: Ints


class Replay:
    """One way of prefetching. A session is named by the first block of its prompts."""

    def __init__(self, uses: Uses, pool_tokens: int, way: str, ahead: float) -> None:
        self._uses, self._way, self._ahead = uses, way, ahead
        self._pool = CachePool(Eviction.RHYTHM, pool_tokens // uses.block_tokens, uses.block_tokens, STEP_TOKENS)
        self._pool.tally = self._tally = Tally(Prefill(1.0, 1.0))
        self._on_disk: Bools = np.zeros(uses.num_blocks, np.bool_)
        self._gaps: dict[int, int] = {}
        self._ended: dict[int, float] = {}
        self._reads: list[Read] = []
        self._last: dict[int, int] = {}
        """By session: the answer after which something is to be prefetched."""
        self._next = _next_prompts(uses) if way == "foreseen" else []
        self.asked = self.hit = self.read = self.prefetched = 0
        """Tokens, once the pool is warm."""

    def run(self) -> Replay:
        for number, use in enumerate(self._uses.uses):
            while self._reads and self._reads[0].at <= use.at:
                self._prefetch(heappop(self._reads))
            if use.tokens:
                self._prompt(use)
            else:
                self._answer(number, use)
        return self

    def _prompt(self, use: Use) -> None:
        blocks = use.runs.numbers()
        if not len(blocks):
            return
        session = blocks.item(0)
        self._last.pop(session, None)
        if session in self._ended:
            gap = use.at - self._ended[session]
            self._gaps[session] = moved(self._gaps.get(session, FIRST_GAP), gap)
        hits = self._pool.prompt(use)
        lacking = np.flatnonzero(~self._on_disk[blocks])
        there = lacking.item(0) if len(lacking) else len(blocks)
        if use.at >= self._uses.warm:
            self.asked += use.tokens
            self.hit += min(hits * self._uses.block_tokens, use.tokens)
            self.read += max(0, there - hits) * self._uses.block_tokens
        self._on_disk[blocks] = True

    def _answer(self, number: int, use: Use) -> None:
        self._pool.answer(use)
        blocks = np.concatenate((use.prompt.numbers(), use.runs.numbers()))
        self._on_disk[blocks] = True
        if not len(blocks):
            return
        session = blocks.item(0)
        self._ended[session] = use.at
        at = inf
        if self._way == "predicted":
            at = use.at + self._ahead * 2 ** (self._gaps.get(session, FIRST_GAP) / STEPS)
        elif self._way == "foreseen":
            at = max(use.at, self._next[number] - self._ahead)
        if at < inf:
            self._last[session] = number
            heappush(self._reads, Read(at, number, session, blocks))

    def _prefetch(self, read: Read) -> None:
        if self._last.get(read.session) != read.number:
            return
        self._pool.cache.expire(read.at)
        hashes, before = packed(read.blocks), self._tally.stored_blocks
        self._pool.store(hashes, self._pool.held(hashes) * HASH_BYTES)
        if read.at >= self._uses.warm:
            self.prefetched += (self._tally.stored_blocks - before) * self._uses.block_tokens


def _next_prompts(uses: Uses) -> Sequence[float]:
    """For each use, when its session asks next."""
    found, coming = [inf] * len(uses.uses), dict[int, float]()
    for number in range(len(uses.uses) - 1, -1, -1):
        use = uses.uses[number]
        if len(starts := (use.runs if use.tokens else use.prompt).starts):
            found[number] = coming.get(starts.item(0), inf)
            if use.tokens:
                coming[starts.item(0)] = use.at
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agentic", type=Path, required=True, help="a file of recorded sessions")
    parser.add_argument("--sessions", type=int, required=True, help="how many run at once")
    parser.add_argument("--pool-tokens", type=tokens, required=True)
    parser.add_argument("--hours", type=float, default=SessionReplay.hours)
    parser.add_argument("--model", choices=MODELS, default="70b", help="bytes of a block")
    options = parser.parse_args()
    uses = schedule(SessionReplay(options.agentic, options.sessions, options.hours))
    token_bytes = MODELS[options.model].block_bytes / BLOCK_TOKENS
    seconds = uses.uses[-1].at - uses.warm
    for way, ahead in WAYS:
        found = Replay(uses, options.pool_tokens, way, ahead).run()
        busy = (found.read + found.prefetched) * token_bytes / DISK_BYTES / seconds
        print(
            f"{way:9} {ahead:3.1f}: {found.hit / found.asked:.3f} in the pool, {found.read / found.asked:.3f} read, "
            f"{found.prefetched / found.asked:.3f} read before; a disk of {DISK_BYTES / 1e9:g} GB/s is busy {busy:.0%}"
        )


if __name__ == "__main__":
    main()
