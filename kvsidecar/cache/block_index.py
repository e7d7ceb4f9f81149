"""Maps block hashes to rows, many at once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvsidecar.cache.arrays import FEW, Bools, Ints, Words, all_true, any_true, extended, zeros

LANE_BITS = 4
LANES = 1 << LANE_BITS
"""Entries per bucket: the tags of one bucket fill one cache line."""
BLOCKS_PER_BUCKET = 6
"""Average. With linear hashing a bucket holds up to a third more before it is split; one in thousands overflows."""

Tags = npt.NDArray[np.uint32]


@dataclass(slots=True)
class Keys:
    """Block hashes in the form that an index searches for."""

    words: Words
    tags: Tags
    """32 bits of each hash; the low bits select the bucket. Never 0."""

    def __len__(self) -> int:
        return len(self.tags)

    def take(self, which: Ints | Bools | slice) -> Keys:
        return Keys(self.words[which], self.tags[which])


class BlockIndex:
    """A hash table that finds all hashes of a request in a few array operations.

    A dict takes 65 bytes for the hash, 32 for the row and 33 for the entry. It has up to five cache misses per hash,
    one after the other, and a resize takes 5 s with ten million entries. Here a block takes its hash and about 20
    bytes, the cache misses of many hashes overlap, and the table grows by a few buckets per call (linear hashing:
    W. Litwin, VLDB 1980). Bucket ``i`` of ``2**level`` is split in two by one more bit of its hashes. Buckets are
    split in order; when all are split, the level rises.

    Clients choose the block hashes, so the bucket is chosen by a hash of them that is drawn at random (`_tags_of`).
    And what finds no lane is in a dict: even for somebody who knows the draw, and chooses hashes of which all share one
    bucket, what a call costs depends on the number of its keys, not on that of the blocks that are there.

    Args:
        hash_bytes: width of a block hash.
        capacity: maximum number of rows, until `reserve`.
        seed: of 64 bits, for the multipliers of the hash function. A secret: knowing it, a client could choose hashes
            that share one bucket.
    """

    def __init__(self, hash_bytes: int, capacity: int, seed: int) -> None:
        self._hash_bytes = hash_bytes
        self.num_words = words = -(-hash_bytes // 8)
        """Words of a block hash."""
        self._words: Words = zeros((capacity, words), np.uint64)
        """The hash of each row."""
        buckets = _buckets_for(capacity)
        self._tags: Tags = zeros((buckets, LANES), np.uint32)
        """0 in a free lane."""
        self._rows = zeros((buckets * LANES,), np.int32)
        self._num_buckets = 1
        self._level = 0
        """``2**level <= num_buckets < 2**(level + 1)``; the first ``num_buckets - 2**level`` buckets are split."""
        self._overflow: dict[int, dict[bytes, int]] = {}
        """Bucket -> rows for which it had no free lane, by their hashes. Buckets that were one may share a dict."""
        self._overflows = zeros((buckets,), np.bool_)
        """Whether `_overflow` has the bucket."""
        self._len = 0
        self._any_word = np.ones(words, np.bool_)
        drawn: Words = np.frombuffer(hashlib.shake_128(seed.to_bytes(8)).digest(8 * (2 * words + 1)), np.uint64).copy()
        self._addend, self._multipliers = drawn[0], drawn[1:]
        """Multipliers: one for each half of a word of a hash, in the order in which the halves lie in memory."""

    def __len__(self) -> int:
        return self._len

    def keys(self, hashes: Sequence[bytes] | bytes) -> Keys:
        """Convert block hashes to the form that the other methods take.

        Args:
            hashes: each of this index's width; or all of them concatenated, as they arrive over the wire.
        """
        packed = hashes if isinstance(hashes, bytes) else b"".join(hashes)
        if self._hash_bytes % 8 == 0:
            words: Words = np.frombuffer(packed, np.uint64).reshape(-1, self._hash_bytes // 8)
        else:
            narrow = np.frombuffer(packed, np.uint8).reshape(-1, self._hash_bytes)
            words = np.pad(narrow, ((0, 0), (0, -self._hash_bytes % 8))).view(np.uint64)
        return self.keys_from(words)

    def keys_from(self, words: Words) -> Keys:
        """Keys of block hashes that are already padded."""
        return Keys(words, self._tags_of(words))

    def words_of(self, rows: Ints) -> Words:
        """The block hashes of these rows."""
        words: Words = self._words.take(rows, axis=0)
        return words

    def hashes_of(self, rows: Ints) -> bytes:
        """The same, joined."""
        return self.words_of(rows).view(np.uint8)[:, : self._hash_bytes].tobytes()

    def all_hashes(self) -> bytes:
        """Those of all rows that can be found, joined, in no order."""
        filed = self._tags[: self._num_buckets].ravel() != 0
        rows = self._rows[: filed.size][filed].astype(np.int64)
        return self.hashes_of(np.concatenate((rows, np.array(self.overflowed(), np.int64))))

    def overflowed(self) -> list[int]:
        """The rows that have no lane."""
        return [row for rows in {id(rows): rows for rows in self._overflow.values()}.values() for row in rows.values()]

    def keys_of(self, rows: Ints) -> Keys:
        return self.keys_from(self.words_of(rows))

    def find(self, keys: Keys) -> Ints:
        """The row of each hash, or -1."""
        words, tags = keys.words, keys.tags
        if len(words) <= FEW:
            return np.array([self._find_one(words[i], tag) for i, tag in enumerate(tags.tolist())], np.int64)
        buckets = self._buckets(tags)
        which, lanes = self._matches(tags, buckets)
        rows = self._rows[lanes].astype(np.int64)
        of_rows = self._words.take(rows, axis=0)
        if len(rows) == len(words) and of_rows.tobytes() == words.tobytes():
            return rows  # all are found, each once
        found = np.full(len(words), -1, np.int64)
        other = (of_rows != words[which]) @ self._any_word
        if any_true(other):
            which, rows = which[~other], rows[~other]
        found[which] = rows
        if self._overflow:
            for i in (self._overflows[buckets] & (found < 0)).nonzero()[0].tolist():
                found[i] = self._overflow[buckets.item(i)].get(words[i].tobytes(), -1)
        return found

    def add(self, keys: Keys, rows: Ints) -> None:
        """Add distinct hashes and rows, neither of which are in the index."""
        self._words[rows] = keys.words
        self._len += len(rows)
        while self._len > BLOCKS_PER_BUCKET * self._num_buckets:
            self._split(-(-self._len // BLOCKS_PER_BUCKET) - self._num_buckets)
        self._place(keys.tags, rows)

    def remove(self, rows: Ints) -> None:
        self._len -= len(rows)
        tags = self.keys_of(rows).tags
        if len(rows) <= FEW:
            for tag, row in zip(tags.tolist(), rows.tolist(), strict=True):
                self._remove_one(tag, row)
            return
        which, lanes = self._matches(tags, self._buckets(tags))
        mine = self._rows[lanes] == rows[which]
        self._tags.reshape(-1)[lanes[mine]] = 0
        if np.count_nonzero(mine) < len(rows):
            in_overflow = np.ones(len(rows), np.bool_)
            in_overflow[which[mine]] = False
            for tag, row in zip(tags[in_overflow].tolist(), rows[in_overflow].tolist(), strict=True):
                self._remove_one(tag, row)

    def _tags_of(self, words: Words) -> Tags:
        """The high 32 bits of ``(m0 + sum(m[i] * x[i])) mod 2**64``, where the ``x[i]`` are the halves of the words, of
        32 bits each, and m0 and the ``m[i]`` are drawn at random from all numbers of 64 bits. This is the multilinear
        hash of Lemire and Kaser, "Strongly universal string hashing is fast", The Computer Journal 57 (2014), theorem
        3.1 with K = 64 and L = 32: strongly universal. For any two different hashes, chosen by whom you like who does
        not know the draw, each pair of values is equally likely.

        Proof: let x and y differ in half k, by d, and let 2**c be the largest power of two that divides d: c < 32. With
        the other multipliers given, m[k] * d is uniform among the multiples of 2**c, so the bits c to 63 of
        ``h(y) - h(x)`` are uniform, the high 32 among them, whatever the bits below are. And m0, which the difference
        does not depend on, makes h(x) uniform: so the high halves of h(x) and h(y) are uniform and independent.

        Whole words instead of halves have no such proof: c can be 63 then, and hashes that differ in the top bits of
        words alone share a few tags, whatever the multipliers.

        The highest bit is set, so that no tag is 0: 31 bits of each tag keep that property. The bucket is selected by
        the lowest of them. So two chosen hashes have the same tag in one of 2**31 draws, and fall into the same of
        2**n buckets in one of 2**n, as random ones do. The multipliers are not random but drawn from a seed, by
        SHAKE128.
        """
        spread = words.view(np.uint32) @ self._multipliers
        spread += self._addend
        return spread.view(np.uint32)[1::2] | np.uint32(1 << 31)

    def _bucket(self, tag: int) -> int:
        bucket = tag & (2 << self._level) - 1
        return bucket if bucket < self._num_buckets else bucket - (1 << self._level)

    def _buckets(self, tags: Tags) -> Ints:
        buckets = (tags & np.uint32((2 << self._level) - 1)).astype(np.int64)
        return buckets - ((buckets >= self._num_buckets) << self._level)

    def _matches(self, tags: Tags, buckets: Ints) -> tuple[Ints, Ints]:
        """Per match the position of the tag and the number of the lane, counted over all buckets. A tag may be in
        several lanes."""
        found = (self._tags.take(buckets, axis=0) == tags[:, None]).ravel().nonzero()[0]
        which = found >> LANE_BITS
        return which, buckets[which] << LANE_BITS | found & LANES - 1

    def _find_one(self, words: Words, tag: int) -> int:
        bucket = self._bucket(tag)
        tags = self._tags[bucket].tolist()
        if tag in tags:
            in_lanes: list[int] = [self._rows.item(bucket << LANE_BITS | i) for i in range(LANES) if tags[i] == tag]
            for row in in_lanes:
                if self._words[row].tobytes() == words.tobytes():
                    return row
        overflow = self._overflow.get(bucket)
        return -1 if overflow is None else overflow.get(words.tobytes(), -1)

    def _remove_one(self, tag: int, row: int) -> None:
        bucket = self._bucket(tag)
        tags, rows = self._tags[bucket].tolist(), self._rows[bucket << LANE_BITS : (bucket + 1) << LANE_BITS].tolist()
        for lane in range(LANES):
            if rows[lane] == row and tags[lane] == tag:
                self._tags[bucket, lane] = 0
                return
        del self._overflow[bucket][self._words[row].tobytes()]
        if not self._overflow[bucket]:
            del self._overflow[bucket]
            self._overflows[bucket] = False

    def _place_one(self, tag: int, row: int) -> None:
        bucket = self._bucket(tag)
        tags = self._tags[bucket].tolist()
        if 0 in tags:
            lane = tags.index(0)
            self._tags[bucket, lane] = tag
            self._rows[bucket << LANE_BITS | lane] = row
        else:
            self._overflow.setdefault(bucket, {})[self._words[row].tobytes()] = row
            self._overflows[bucket] = True

    def _place(self, tags: Tags, rows: Ints) -> None:
        if len(rows) <= FEW:
            for tag, row in zip(tags.tolist(), rows.tolist(), strict=True):
                self._place_one(tag, row)
            return
        buckets = self._buckets(tags)
        order = buckets.argsort(kind="stable")
        buckets, tags, rows = buckets[order], tags[order], rows[order]
        # Counted from 1 in each bucket: the rows for it, and its free lanes.
        nth = np.arange(1, len(rows) + 1) - np.searchsorted(buckets, buckets)
        free = (self._tags.take(buckets, axis=0) == 0).cumsum(axis=1, dtype=np.int8)
        lanes = (free == nth[:, None]).argmax(axis=1)
        fits = free[:, -1] >= nth
        lanes += buckets << LANE_BITS
        self._tags.reshape(-1)[lanes[fits]] = tags[fits]
        self._rows[lanes[fits]] = rows[fits]
        if not all_true(fits):
            for tag, row in zip(tags[~fits].tolist(), rows[~fits].tolist(), strict=True):
                self._place_one(tag, row)

    def _split(self, count: int) -> None:
        """Split the next buckets: at most ``count``, and only up to the end of the level."""
        half = 1 << self._level
        first = self._num_buckets - half
        count = min(count, half - first)
        old = slice(first, first + count)
        new = slice(self._num_buckets, self._num_buckets + count)
        goes = (self._tags[old] >> np.uint32(self._level) & np.uint32(1)).astype(np.bool_)
        self._tags[new] = np.where(goes, self._tags[old], 0)
        lanes = self._rows.reshape(-1, LANES)
        lanes[new] = lanes[old]
        self._tags[old] = np.where(goes, 0, self._tags[old])
        self._num_buckets += count
        if count == half - first:
            self._level += 1
        if self._overflow:
            displaced: list[int] = []
            for bucket in (self._overflows[old].nonzero()[0] + first).tolist():
                overflow = self._overflow[bucket]
                if len(overflow) > LANES:  # somebody knows the draw: to place all of them again would take long
                    self._overflow[bucket + half] = overflow
                    self._overflows[bucket + half] = True
                    continue
                displaced += overflow.values()
                overflow.clear()
                del self._overflow[bucket]
                self._overflows[bucket] = False
            if displaced:
                rows = np.array(displaced, np.int64)
                self._place(self.keys_of(rows).tags, rows)

    def reserve(self, capacity: int) -> None:
        """Make room for more rows. Copies everything."""
        self._words = extended(self._words, capacity, axis=0)
        buckets = _buckets_for(capacity)
        self._tags = extended(self._tags, buckets, axis=0)
        self._rows = extended(self._rows, buckets * LANES)
        self._overflows = extended(self._overflows, buckets)


def _buckets_for(capacity: int) -> int:
    return capacity // BLOCKS_PER_BUCKET + 2
