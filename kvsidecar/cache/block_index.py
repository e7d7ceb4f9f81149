"""Maps block hashes to rows, many at once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvsidecar.cache import kernels
from kvsidecar.cache.array_kernels import LANES, Table, Tags, buckets_of
from kvsidecar.cache.arrays import Bools, Ints, Words, extended, zeros

BLOCKS_PER_BUCKET = 6
"""Average. With linear hashing a bucket holds up to a third more before it is split; one in thousands overflows."""


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
        drawn: Words = np.frombuffer(hashlib.shake_128(seed.to_bytes(8)).digest(8 * (2 * words + 1)), np.uint64).copy()
        self._addend, self._multipliers = int(drawn[0]), drawn[1:]
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
        """Keys of block hashes that are already padded, in a contiguous array."""
        return Keys(words, self._tags_of(words))

    def words_of(self, rows: Ints) -> Words:
        """The block hashes of these rows."""
        words: Words = self._words.take(rows, axis=0)
        return words

    def hashes_of(self, rows: Ints) -> bytes:
        """The block hashes of these rows, joined."""
        return self.words_of(rows).view(np.uint8)[:, : self._hash_bytes].tobytes()

    def all_hashes(self) -> bytes:
        """The hashes of all rows that can be found, joined, in no order."""
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
        found = np.empty(len(keys), np.int64)
        count = kernels.find_rows(*self._table, self._words, keys.words, keys.tags, found)
        if self._overflow and count < len(keys):
            of_each = buckets_of(keys.tags, self._level, self._num_buckets)
            for i in (self._overflows[of_each] & (found < 0)).nonzero()[0].tolist():
                found[i] = self._overflow[of_each.item(i)].get(keys.words[i].tobytes(), -1)
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
        tags, over = self.keys_of(rows).tags, np.empty(len(rows), np.int64)
        count = kernels.unplace_rows(*self._table, tags, rows, over)
        for i in over[:count].tolist():
            self._remove_overflow(self._bucket(tags.item(i)), rows.item(i))

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
        tags = np.empty(len(words), np.uint32)
        kernels.tag_hashes(words, self._multipliers, self._addend, tags)
        return tags

    @property
    def _table(self) -> Table:
        return self._tags, self._rows, self._level, self._num_buckets

    def _bucket(self, tag: int) -> int:
        bucket = tag & (2 << self._level) - 1
        return bucket if bucket < self._num_buckets else bucket - (1 << self._level)

    def _remove_overflow(self, bucket: int, row: int) -> None:
        del self._overflow[bucket][self._words[row].tobytes()]
        if not self._overflow[bucket]:
            del self._overflow[bucket]
            self._overflows[bucket] = False

    def _place(self, tags: Tags, rows: Ints) -> None:
        over = np.empty(len(rows), np.int64)
        count = kernels.place_rows(*self._table, tags, rows, over)
        for i in over[:count].tolist():
            bucket, row = self._bucket(tags.item(i)), rows.item(i)
            self._overflow.setdefault(bucket, {})[self._words[row].tobytes()] = row
            self._overflows[bucket] = True

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
