"""Finds the blocks that a request names, and says which of them can be read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvsidecar.cache import kernels
from kvsidecar.cache.arrays import NO_INTS, Bools, Ints, all_true
from kvsidecar.cache.block_index import Keys
from kvsidecar.cache.expiry import Expiry
from kvsidecar.cache.grants import Lease
from kvsidecar.cache.space_blocks import Space, SpaceBlocks
from kvsidecar.types import LookupMode

Hashes = Sequence[bytes] | bytes
"""Block hashes, or all of them concatenated, as they arrive over the wire: splitting and joining 4096 of them takes as
long as looking them up."""
PROBE = 512
"""Number of hashes of a prefix to look up before the others: often the first one is a miss."""


class Reader:
    """Reads a table for lookups and loads.

    Attributes:
        below: only blocks whose slots all lie below this offset can be read; None: all.
    """

    def __init__(self, expiry: Expiry) -> None:
        self._expiry = expiry
        self.below: int | None = None

    def find(self, space: Space, hashes: Hashes, mode: LookupMode) -> tuple[Ints, Bools, Keys]:
        """The row of each hash, whether it is a hit in this mode, and the hashes. Counts hits and misses."""
        index = space.blocks.index
        keys = index.keys(hashes)
        if mode is LookupMode.BITMAP or len(keys) <= PROBE:
            rows = index.find(keys)
            hits = self.readable(space, rows)
            if mode is LookupMode.PREFIX and not all_true(hits):
                hits = np.logical_and.accumulate(hits)
        else:
            rows, hits = np.full(len(keys), -1, np.int64), np.zeros(len(keys), np.bool_)
            for piece in (slice(PROBE), slice(PROBE, None)):
                rows[piece] = index.find(keys.take(piece))
                hits[piece] = np.logical_and.accumulate(self.readable(space, rows[piece]))
                if not all_true(hits[piece]):
                    break
        num_hits = int(np.count_nonzero(hits))
        space.hits += num_hits
        space.misses += len(hits) - num_hits
        return rows, hits, keys

    def find_leased(self, space: Space, hashes: Hashes, lease: Lease | None) -> Ints:
        """The row of each hash, or -1: what the lease holds, where that has expired and what was stored again, too."""
        blocks = space.blocks
        keys = blocks.index.keys(hashes)
        rows = blocks.index.find(keys)
        if lease is not None and blocks.num_superseded:
            missed = (~self.readable(space, rows, leased=True)).nonzero()[0]
            if len(missed):
                held = np.concatenate([NO_INTS, *(chain.rows for chain in lease.chains if chain.blocks is blocks)])
                rows[missed] = _old_or(
                    rows[missed], blocks, keys.take(missed), np.unique(held[blocks.superseded[held]])
                )
        return rows

    def readable(self, space: Space, rows: Ints, *, leased: bool = False) -> Bools:
        """Whether these blocks are readable, have not expired, and lie below `below`; row -1 is not.

        Args:
            leased: whether those with a reference are readable though they have expired: a lease is a promise.
        """
        blocks, below = space.blocks, self.below
        readable: Bools = np.empty(len(rows), np.bool_)
        kernels.readable_rows(blocks.missing, rows, readable)
        if below is not None:
            ends = blocks.slots[:, rows] + np.array(space.slot_sizes)[:, np.newaxis]
            readable &= (ends <= below).all(axis=0)
        if blocks.expiring:
            gone = self._expiry.expired(blocks, rows)
            readable &= ~(gone & (blocks.refs[rows] == 0)) if leased else ~gone
        return readable


def _old_or(rows: Ints, blocks: SpaceBlocks, keys: Keys, old: Ints) -> Ints:
    """The row of each key: the one among the ``old`` rows if there is one, else that in ``rows``."""
    held = blocks.index.keys_of(old)
    order = held.tags.argsort()
    old, held = old[order], held.take(order)
    at = np.searchsorted(held.tags, keys.tags)
    open_ = np.arange(len(rows))
    while len(open_ := open_[at[open_] < len(old)]):  # once for nearly all: two hashes seldom have one tag
        open_ = open_[held.tags[at[open_]] == keys.tags[open_]]
        same = (held.words[at[open_]] == keys.words[open_]).all(axis=1)
        rows[open_[same]] = old[at[open_[same]]]
        open_ = open_[~same]
        at[open_] += 1
    return rows
