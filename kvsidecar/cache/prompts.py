"""Knowledge about prompts, whether or not the pool has their blocks: how often each comes back, how much of it LRU
would have, and whether a part of it was declined. For the eviction policy `kvsidecar.cache.eviction_rhythm`.

A store does not name the blocks before its own, but the lookup before it named them all. And a session that lost its
blocks, or whose blocks were declined, must not come back as an unknown one.
"""

from __future__ import annotations

from math import inf

import numpy as np
import numpy.typing as npt

from kvsidecar.cache.array_kernels import Tags
from kvsidecar.cache.arrays import NO_INTS, Bools, Bytes, Ints, all_true, any_true, zeros
from kvsidecar.cache.block_index import Keys
from kvsidecar.cache.eviction_rhythm import ANNOUNCED, FIRST_GAP, OVER, Rhythm, announced_gap, moved
from kvsidecar.cache.grants import StorePart
from kvsidecar.cache.space_blocks import SpaceBlocks

ENTRIES = 1 << 20
"""Entries of twelve bytes each: the blocks of a hundred long prompts. A prompt that lost most of its entries to others
is found by the deepest one left."""
PROMPTS = 1 << 16
"""Records of prompts, of 50 bytes each."""
PASSED = 64
"""Most prompts that one lookup removes from LRU's pool: a prompt as long as the pool would remove all. The following
lookups remove the others; each needs room for itself alone."""
LIVES = 300.0
"""Seconds after its last use for which a prompt counts in decisions about blocks that it shares."""
ENDED, ASKED, STORED = range(3)
"""States of a prompt: it was touched at its end; then looked up; then some of it was stored, or declined."""
_NO_PLACES: tuple[Tags, Ints, Bools] = (np.zeros(0, np.uint32), NO_INTS, np.zeros(0, np.bool_))
_ENTRY, _RECORD, _NUMBER = ENTRIES - 1, PROMPTS - 1, (1 << 32) - 1
"""Masks of the place of a block, of the record of a prompt, and of its number."""

Numbers = npt.NDArray[np.uint32]


class Prompts:
    """Prompts by their blocks, in a direct-mapped table: a new entry replaces the one at its place. An entry that is
    lost, or that belongs to another block with the same 32 bits of its hash, gives a block another gap, and nothing
    else.

    A prompt with all the blocks that were looked up for another one continues it, and takes over its number, which
    leads to what is known about it. A prompt with only some of them is another one with the same beginning, such as
    the instructions that all requests of an application share: their frequent use means nothing for it. Nor does an
    announcement for one prompt mean anything for when the other will use them.
    """

    def __init__(self, rhythm: Rhythm, pool_bytes: int) -> None:
        self._rhythm = rhythm
        self._pool_bytes = pool_bytes
        self._lru_bytes = 0
        """Bytes of all prompts that LRU would have; shared beginnings count once."""
        self._turn = self._oldest = 0
        """Numbers of the last lookup, and of the oldest one whose prompt LRU would have any blocks of."""
        entries: Numbers = zeros((ENTRIES, 3), np.uint32)  # what is read together lies together
        entries.fill(0)  # its pages are made now: in the first lookup it took 28 ms
        self._tags: Tags = entries[:, 0]
        self._prompts: Numbers = entries[:, 1]
        """Each entry's number of its prompt."""
        self._others: Numbers = entries[:, 2]
        """Each entry's number of another prompt that had the block before; 0: none had."""
        self._any_announced = False
        """Any pause was ever announced: until then announcements cost nothing."""
        self._count = 0
        """The number of the last prompt; the first is 1."""
        self._numbers: Numbers = zeros((PROMPTS,), np.uint32)
        """Each record's prompt: a later prompt takes the record of one that has not come for long."""
        self._gaps: Bytes = zeros((PROMPTS,), np.uint8)
        self._used: npt.NDArray[np.float64] = zeros((PROMPTS,), np.float64)
        """When it was last used."""
        self._ends: Tags = zeros((PROMPTS,), np.uint32)
        """Its last block that was looked up."""
        self._states: Bytes = zeros((PROMPTS,), np.uint8)
        """`ENDED`, `ASKED` or `STORED`."""
        self._order: Numbers = zeros((PROMPTS,), np.uint32)
        """The record of the prompt of each recent lookup."""
        self._turns: Ints = zeros((PROMPTS,), np.int64)
        """The last lookup of the prompt."""
        self._in_lru: Ints = zeros((PROMPTS,), np.int64)
        """Its bytes that LRU would have."""
        self._sizes: Ints = zeros((PROMPTS,), np.int64)
        """Number of its blocks in its last lookup."""
        self._declined: Tags = zeros((PROMPTS,), np.uint32)
        """The first block that was declined since it was last looked up; 0: none was."""

    def look_up(self, blocks: SpaceBlocks, keys: Keys, rows: Ints, hits: Bools, now: float) -> None:
        """Note a lookup, whose hits count as used.

        Args:
            keys: of all blocks that were looked up, in prefix order.
            rows: rows of these blocks; only those of hits count.
        """
        if not len(keys):
            return
        salt = blocks.salt
        first_miss = there = len(hits)
        record, (tags, at, known) = -1, _NO_PLACES
        if not all_true(hits):
            first_miss = int(hits.argmin())
            there = there - int(hits[::-1].argmax()) if any_true(hits) else 0  # more, if there are holes
            tags, at = self._places(blocks, keys, first_miss)
            known = self._tags[at] == tags
            record = self._deepest(tags, at, known)
        if record < 0 and first_miss:
            record = self._record_of(keys.tags.item(first_miss - 1) ^ salt)
        added = len(keys)
        if record < 0 or not any_true(keys.tags == np.uint32(self._ends.item(record) ^ salt)):
            if record >= 0:
                head = first_miss + (len(known) if all_true(known) else int(known.argmin()))
                if self._count_hits(blocks, record, first_miss, head):
                    added -= head  # another prompt has it in any case
            record = self._new()
            if first_miss:
                tags, at = self._places(blocks, keys)
                known = self._tags[at] == tags
        else:
            if self._states.item(record) != ASKED:  # else the same request asks again
                self._count_hits(blocks, record, first_miss, min(len(keys), self._sizes.item(record)))
                self._gaps[record] = moved(self._gaps.item(record), now - self._used.item(record))
            if there:
                self._gaps[record] = blocks.gaps.item(rows.item(there - 1))
        self._used[record], self._states[record], self._declined[record] = now, ASKED, 0
        self._ends[record] = keys.tags.item(-1) ^ salt
        self._sizes[record] = len(keys)
        self._use_in_lru(record, added * blocks.space.block_bytes)
        if len(tags):
            self._enter(tags, at, known, record)

    def _count_hits(self, blocks: SpaceBlocks, record: int, hits: int, known: int) -> bool:
        """Count a lookup whose first ``known`` blocks are known from the prompt of this record. Returns whether LRU
        would have hit all of them."""
        lru_hits = known
        if self._turns.item(record) <= self._oldest:  # LRU would have evicted its tail, or all of it
            lru_hits = min(known, self._in_lru.item(record) // blocks.space.block_bytes)
        if known:
            pools = known * blocks.space.block_bytes / self._pool_bytes
            self._rhythm.count(min(hits, known), lru_hits, known, pools)
        return lru_hits == known

    def _use_in_lru(self, record: int, nbytes: int) -> None:
        """Make this prompt the last used one in LRU's pool, with this many bytes of its own."""
        self._turn += 1
        self._order[self._turn & _RECORD], self._turns[record] = record, self._turn
        self._lru_bytes += nbytes - self._in_lru.item(record)
        self._in_lru[record] = nbytes
        for _ in range(PASSED):
            if self._lru_bytes <= self._pool_bytes and self._turn - self._oldest < PROMPTS:
                return
            oldest = self._order.item(self._oldest & PROMPTS - 1)
            if self._turns.item(oldest) == self._oldest:  # else it was looked up again
                there, over = self._in_lru.item(oldest), self._lru_bytes - self._pool_bytes
                if there > over > 0:
                    self._in_lru[oldest] = there - over
                    self._lru_bytes -= over
                    return
                self._lru_bytes -= there
                self._in_lru[oldest] = 0
            self._oldest += 1

    def touch(self, blocks: SpaceBlocks, keys: Keys, rows: Ints, now: float, pause: float = 0.0) -> None:
        """Count all blocks of a prompt that has ended as used.

        Args:
            rows: rows of these blocks; -1: not there.
            pause: announced seconds until its next use; infinity: there will be none; 0: unknown. For blocks that it
                shares with recently used prompts it counts only if that is sooner than usual.
        """
        if not len(keys):
            return
        tags, at = self._places(blocks, keys)
        known = self._tags[at] == tags
        record = self._deepest(tags, at, known)
        if record < 0:
            record = self._new()
            self._ends[record] = tags[-1]
        elif self._states[record] == ENDED and any_true(tags == self._ends[record]):
            # The engine had all of it itself. Without its end, it is the head of a touch in parts, the last one first.
            self._gaps[record] = moved(self._gaps.item(record), now - self._used.item(record))
        self._used[record], self._states[record] = now, ENDED
        if not all_true(known):  # what a lookup named is there already
            self._enter(tags[~known], at[~known], _NO_PLACES[2], record)
        self.end_announcements(blocks, keys, rows, rows >= 0)
        if pause:
            self._any_announced = True
            gap, there = announced_gap(pause), rows >= 0
            rows, at = rows[there], at[there]
            sooner = blocks.gaps[rows] > gap - ANNOUNCED if gap < OVER else False
            shared = self._lives(self._prompts[at], record, now) | self._lives(self._others[at], record, now)
            blocks.gaps[rows[~shared | sooner]] = gap
            if gap == OVER:
                self._used[record] = -inf

    def end_announcements(self, blocks: SpaceBlocks, keys: Keys, rows: Ints, used: Bools) -> None:
        """End the announcements for the used ones of these blocks, which have the gap of their prompt again.

        Args:
            rows: rows of these blocks; only those of used ones count.
        """
        if not self._any_announced:
            return
        ended = used & (blocks.gaps[rows] >= ANNOUNCED)
        if any_true(ended):
            records = self._records(*self._places(blocks, keys.take(ended)))
            blocks.gaps[rows[ended]] = np.where(records >= 0, self._gaps[records], np.uint8(FIRST_GAP))

    def store(self, part: StorePart, now: float) -> bool:
        """Set the gaps of the blocks that a store creates. Returns whether all lie behind declined blocks: the hole in
        front makes them useless. None does if such a block is offered again.

        A block we know nothing about (an answer, say) inherits the gap of the block before it in the store, or else of
        the first one. If the first and the last of these blocks belong to one prompt, or to none, all count as such.
        """
        blocks, rows, count = part.blocks, part.chain_rows, len(part.created)
        if not count:
            return False
        all_new = count == len(rows)
        if all_new:
            tags = part.chain.tags
            first = last = self._record_of(tags.item(0) ^ blocks.salt)
            if count > 1:
                last = self._record_of(tags.item(-1) ^ blocks.salt)
            if first == last < 0:
                return False  # they have `FIRST_GAP`
            if first == last and not self._declined.item(first):  # nearly always a store is of one prompt
                gap = self._gaps.item(first)
                if gap != FIRST_GAP:
                    blocks.gaps[rows] = gap
                self._used[first], self._states[first] = now, STORED
                return False
        tags, at = self._places(blocks, part.chain)
        records = self._records(tags, at)
        gaps = np.where(records >= 0, self._gaps[records], np.int16(-1)).astype(np.int16)
        new = np.ones(len(rows), np.bool_) if all_new else np.isin(rows, part.created)
        there = blocks.gaps[rows[~new]]
        gaps[~new] = np.where(there < ANNOUNCED, there, gaps[~new])
        before = np.maximum.accumulate(np.where(gaps >= 0, np.arange(len(gaps)), -1))
        known = gaps[gaps >= 0]
        gaps = np.where(before >= 0, gaps[before], known[0] if len(known) else FIRST_GAP)
        blocks.gaps[rows[new]] = gaps[new]
        known_new = new & (records >= 0)
        records = records[known_new]
        self._used[records], self._states[records] = now, STORED
        declined = self._declined[records]
        if not any_true(declined > 0):
            return False
        again = records[declined == tags[known_new]]
        self._declined[again] = 0
        return not len(again) and len(records) == count and all_true(declined > 0)

    def decline(self, part: StorePart) -> None:
        """Note that the blocks of this store are declined: later blocks of their prompts will be, too."""
        new = np.isin(part.chain_rows, part.created)
        tags, at = self._places(part.blocks, part.chain.take(new))
        records = self._records(tags, at)
        self._declined[records[records >= 0][::-1]] = tags[records >= 0][::-1]  # the first one of each stays

    def _records(self, tags: Tags, at: Ints) -> Ints:
        """The record of each block's prompt; -1: it is not known."""
        numbers = self._prompts[at]
        records = (numbers & np.uint32(_RECORD)).astype(np.int64)
        known = (self._tags[at] == tags) & (self._numbers[records] == numbers)
        return np.where(known, records, -1)

    def _lives(self, numbers: Numbers, record: int, now: float) -> Bools:
        """Flags the numbers of other prompts that were used recently."""
        records = numbers & np.uint32(_RECORD)
        lives: Bools = (self._numbers[records] == numbers) & (now - self._used[records] < LIVES) & (records != record)
        return lives & (numbers > 0)

    def _record_of(self, tag: int) -> int:
        """The record of one block's prompt; -1: it is not known."""
        at = tag & _ENTRY
        if self._tags.item(at) != tag:
            return -1
        number = self._prompts.item(at)
        record = number & _RECORD
        return record if self._numbers.item(record) == number else -1

    def _deepest(self, tags: Tags, at: Ints, known: Bools) -> int:
        """The record of the prompt that the last known one of these blocks belongs to; -1: none is known."""
        if not any_true(known):
            return -1
        last = len(known) - 1 - int(known[::-1].argmax())
        if (record := self._record_of(tags.item(last))) >= 0:
            return record
        records = self._records(tags, at)
        there = records[records >= 0]
        return int(there[-1]) if len(there) else -1

    def _enter(self, tags: Tags, at: Ints, known: Bools, record: int) -> None:
        """Assign these blocks to this prompt.

        Args:
            known: which of them are in the table.
        """
        number = self._numbers[record]
        others: Numbers | int = 0
        if any_true(known):
            before = self._prompts[at]
            others = np.where(known, np.where(before != number, before, self._others[at]), np.uint32(0))
        self._others[at] = others
        self._tags[at] = tags
        self._prompts[at] = number

    def _new(self) -> int:
        self._count = self._count % _NUMBER + 1
        record = self._count & _RECORD
        self._numbers[record] = self._count
        self._gaps[record], self._declined[record] = FIRST_GAP, 0
        self._lru_bytes -= self._in_lru.item(record)
        self._in_lru[record] = self._turns[record] = self._sizes[record] = 0
        return record

    @staticmethod
    def _places(blocks: SpaceBlocks, keys: Keys, first: int = 0) -> tuple[Tags, Ints]:
        """The tags of these blocks from the ``first`` on, and their places in the table."""
        tags: Tags = keys.tags[first:] ^ np.uint32(blocks.salt)
        return tags, (tags & np.uint32(_ENTRY)).astype(np.int64)
