"""One record per slot in memory that outlives the daemon: which block's bytes the slot holds, if they are whole.

Why every instant is a legal one. SIGKILL ends the daemon between two of its stores to memory, and a process that maps
the pages afterwards finds exactly the stores before that instant. So it is enough that they come in this order:

1. A slot that is FREE, RESERVED or QUARANTINED has the commit word 0. `unseal` comes before the slot returns to the
   allocator, hence before any byte of it can change.
2. `seal` comes when the bytes are complete. It writes the record first, its digest included, then the commit word.
3. A record is of a table of blocks, and counts only while a space entry with the number of this table is committed.
   `BlockTable.clear` closes the entry and gives the space another number: all records of the old one are void at once.
   A number is used again only by a later run, which has unsealed by then all records that it did not take over.

The commit word identifies the `seal` that wrote the record; a higher one is newer. The digest covers it: a commit word
that comes back, because a bit flipped, does not fit a record of an earlier life.

The digest is multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014): the sum of the
record's 32-bit words, each times a 64-bit constant. Any given damage goes unnoticed in one of 2**32 cases. It is one
matrix product for all records of a job, where a CRC would be a call for each. It finds accidents; it is no signature.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from kvsidecar.cache.arrays import FEW, Bools, Bytes, Ints, Words
from kvsidecar.cache.slabs import Grid
from kvsidecar.cache.slots import SLOT_ALIGN
from kvsidecar.types import HASH_BYTES_MAX, MAX_IDLE_SECONDS, Namespace

# Words of a record. 1 to 11 are its body; the digest covers these and the commit word.
COMMIT = 0
"""Odd: sealed. 0: not. Anything else is damage."""
TABLE = 1
"""Number of the table of blocks in the high 32 bits; the shard in the low `SHARD_BITS`; between them the seconds after
its last use from which on the block is a miss, or 0."""
SLOT = 2
"""Byte offset in the pool."""
SIZE = 3
"""Size class of the slot in units of `SLOT_ALIGN`; in bits 30 and 31 the priority of its block; in the high 32 bits the
second from which on the block is a miss, or 0."""
HASH = 4
"""Block hash, padded with zeros to `HASH_BYTES_MAX`."""
DIGEST = 12
CHECKSUM = 13
"""Checksum of the slot's bytes, if the next word is the commit word. Neither is part of the digest."""
CHECKED = 14
USED = 15
"""Tick of the last use, and in the low bits the order in the request. Not part of the digest."""
RECORD_WORDS = 16

ORDER_BITS = 16
SHARD_BITS = 10
MAX_SHARDS = 64
"""Shards that a block may have: every block carries a list of that length, which every operation on it walks through.
The ranks of an engine are on one node. Records have room for more, `SHARD_BITS`."""
PRIORITY_BITS = 30
SIZE_MASK = (1 << PRIORITY_BITS) - 1
SPACES = 1024
UNITS_READ = 1 << 12
"""Units, or slabs, that are read at a time: their intermediate results take 100 bytes each."""
PAGE_WORDS = 512
"""A space entry is a page: CRC of its commit word and the rest, number, length, JSON. Its commit word is elsewhere:
looking for entries does not give all of them memory."""
ENTRY_HEAD = 3
IDLE_MASK = MAX_IDLE_SECONDS
"""The seconds without a use, in a word shifted by `SHARD_BITS`."""
MAX_BYTES = 1 << 48
"""More than any shard has."""
LAST_COMMIT = 1 << 62
"""No commit word is higher, or the next one might not fit."""
MASK = (1 << 64) - 1

_MULTIPLIERS: Words = np.frombuffer(hashlib.shake_128(b"kvsidecar records").digest(8 * 2 * DIGEST), "<u8")
_FACTORS: list[int] = _MULTIPLIERS.tolist()
_DIGESTED = struct.Struct(f"<4Q{HASH_BYTES_MAX}s")
_LANES = struct.Struct(f"<{2 * DIGEST}I")
_TAIL = struct.Struct("<4Q")


@dataclass(frozen=True, slots=True)
class SpaceEntry:
    """What the table knows about a space."""

    number: int
    namespace: Namespace
    group: int
    shard_bytes: list[int | None]


TakeRoom = Callable[[int, int], None]
"""Takes a first word, counted from the start of the records' memory, and a number of words, and gives them memory.
Raises OSError if there is none. In a file without it, reading or writing them would be a SIGBUS."""


class FoundSlabs(NamedTuple):
    """The slabs that an earlier run has cut, as columns."""

    head: Ints
    """First unit."""
    end: Ints
    size: Ints
    """Size class in bytes."""


class Records:
    """Reads and writes the records. Only one process at a time may.

    A record has a number, its place: see `SlotAllocator.places`.

    Args:
        memory: `num_words` words, zeros at first; shared memory, if they are to outlive the process.
        pool_bytes, slab_bytes: see `SlotAllocator`.
        spaces: most spaces that are kept at a time. Others work, and are forgotten with the daemon.
    """

    def __init__(self, memory: Words, pool_bytes: int, slab_bytes: int, spaces: int = SPACES) -> None:
        self.grid = Grid(pool_bytes, slab_bytes)
        self.pool_bytes, self.slab_bytes = pool_bytes, slab_bytes
        units = len(self.grid)
        commits = _pages(3 * units)
        entries = commits + spaces
        records = entries + spaces * PAGE_WORDS
        self._slabs: Words = memory[: 3 * units].reshape(3, units)
        """Each unit's slab: first unit, length, and size class in units of `SLOT_ALIGN`; each with its complement, and
        zero if it was never part of one. They tell which records to read: reading the others would make the kernel
        give each page of them memory."""
        self._space_commits: Words = memory[commits:entries]
        self._spaces: Words = memory[entries:records].reshape(spaces, PAGE_WORDS)
        self._first_record = records
        self.take_room: TakeRoom | None = None
        """Called before records are written that may not have memory; None: all have."""
        self.on_progress: Callable[[int, int], object] = lambda read, total: None
        """Called repeatedly while `find_sealed` reads: with the number of places read, and of all places."""
        self._records: Words = memory[records : num_words(pool_bytes, slab_bytes, spaces)].reshape(-1, RECORD_WORDS)
        self._commits: Words = self._records[:, COMMIT]
        self._bodies: Words = self._records[:, TABLE:]
        self._used: Words = self._records[:, USED]
        self._last_commit = 1
        self._entries: dict[int, int] = {}
        """Number of a table -> its entry."""
        self._free_entries: list[int] = []
        self.spaces_not_kept = 0
        """How often a space could not be kept, because it did not fit an entry or there was none."""

    # -- spaces ----------------------------------------------------------------------------------------------------

    def open_space(self, number: int, namespace: Namespace, group: int, shard_bytes: list[int | None]) -> None:
        """Keep the records of table ``number`` from now on. Call it again when the size of another shard becomes known:
        before that no block of the space can be whole, so that nothing is lost if the daemon is killed in between."""
        self.close_space(number)
        facts = json.dumps([asdict(namespace), group, shard_bytes]).encode()
        words = -(-len(facts) // 8)
        if not self._free_entries or words > PAGE_WORDS - ENTRY_HEAD:
            self.spaces_not_kept += 1
            return
        at = self._free_entries.pop()
        entry, commit = self._spaces[at], self._next_commit()
        entry[ENTRY_HEAD : ENTRY_HEAD + words] = np.frombuffer(facts.ljust(8 * words, b"\0"), np.uint64)
        entry[:ENTRY_HEAD] = (entry_crc(commit, number, facts), number, len(facts))
        self._space_commits[at] = commit
        self._entries[number] = at

    def close_space(self, number: int) -> None:
        """Forget all records of this table at once."""
        at = self._entries.pop(number, None)
        if at is not None:
            self._space_commits[at] = 0
            self._free_entries.append(at)

    @property
    def last_number(self) -> int:
        """Highest number of a table that is kept."""
        return max(self._entries, default=0)

    # -- records ---------------------------------------------------------------------------------------------------

    def seal(
        self,
        number: int,
        shard: int,
        size: int,
        slots: Ints,
        words: Words,
        places: Ints,
        tick: int,
        expires: int = 0,
        priorities: Bytes | None = None,
        idle: int = 0,
    ) -> None:
        """Record that these slots are whole, and were used at ``tick``.

        Args:
            number: number of the table of their blocks.
            size: their size class.
            words: their block hashes, in prefix order.
            places: places of their records.
            expires: second from which on their blocks are misses; 0: never.
            priorities: priorities of their blocks; None: all are normal.
            idle: seconds without a use after which their blocks are misses, at most `MAX_IDLE_SECONDS`; 0: never.
        """
        commit = self._next_commit()
        table = number << 32 | idle << SHARD_BITS | shard
        size_word = size // SLOT_ALIGN | expires << 32
        if len(places) == 1 <= FEW:
            place = places.item()
            if priorities is not None:
                size_word |= priorities.item() << PRIORITY_BITS
            packed = _DIGESTED.pack(commit, table, slots.item(), size_word, words.tobytes())
            digest = sum(map(mul, _FACTORS, _LANES.unpack(packed))) & MASK
            self._bodies[place] = np.frombuffer(packed[8:] + _TAIL.pack(digest, 0, 0, tick << ORDER_BITS), np.uint64)
            self._commits[place] = commit
            return
        body = np.zeros((len(slots), RECORD_WORDS - 1), np.uint64)
        body[:, TABLE - 1] = table
        body[:, SLOT - 1] = slots
        body[:, SIZE - 1] = size_word
        if priorities is not None:
            body[:, SIZE - 1] |= priorities.astype(np.uint64) << np.uint64(PRIORITY_BITS)
        body[:, HASH - 1 : HASH - 1 + words.shape[1]] = words
        digests = _digest(body[:, : HASH - 1 + words.shape[1]], TABLE)
        body[:, DIGEST - 1] = digests + _digest(np.array([[commit]], np.uint64), COMMIT)
        body[:, USED - 1] = _used(tick, len(slots))[::-1]  # the deepest of a prefix goes first
        self._bodies[places] = body
        self._commits[places] = commit

    def cut(self, start: int, end: int, size: int) -> None:
        """Record that these units are one slab now. Call it before a slot of it is sealed. The slots of the slabs that
        were there before are unsealed: to be killed meanwhile loses nothing."""
        heads, lengths, _ = slabs = self._slabs
        before, after = heads.item(start), heads.item(end - 1)  # forget what is left of these slabs on either side
        if (first := _unchecked(before)) is not None and first < start:
            left = slabs[:, first:start]
            left[:, left[0] == before] = 0
        first, length = _unchecked(after), _unchecked(lengths.item(end - 1))
        if first is not None and length is not None and end < first + length:
            left = slabs[:, end : first + length]
            left[:, left[0] == after] = 0
        slabs[:, start:end] = [[_checked(start)], [_checked(end - start)], [_checked(size // SLOT_ALIGN)]]

    def have_room(self, cuts: Iterable[tuple[int, int, int]]) -> bool:
        """Get memory for the records of slabs that are going to be `cut`: first unit, end and size class of each.
        False: there is not enough for all of them."""
        try:
            for start, end, size in cuts:
                self._take_records(start, self.grid.nbytes(start, end) // size)
        except OSError:
            return False
        return True

    def _take_records(self, unit: int, count: int) -> None:
        """Get memory for this many records from the first one of a unit on. Raises OSError."""
        if self.take_room is not None and count:
            self.take_room(self._first_record + unit * self.grid.records * RECORD_WORDS, count * RECORD_WORDS)

    def unseal(self, places: Ints) -> None:
        """Forget these slots, before anything can happen to their bytes."""
        if len(places) <= FEW:
            for place in places.tolist():
                self._commits[place] = 0
        else:
            self._commits[places] = 0

    def touch(self, places: Ints, tick: int) -> None:
        """Record that these slots were used at ``tick``, in the order in which they are to go."""
        if len(places) <= FEW:
            for i, place in enumerate(places.tolist()):
                self._used[place] = tick << ORDER_BITS | i
        else:
            self._used[places] = _used(tick, len(places))

    def set_used(self, places: Ints, used: Words) -> None:
        """Write the words of the last use as they are."""
        self._used[places] = used

    def set_checksums(self, places: Ints, checksums: Words) -> None:
        """Record the checksums of sealed slots."""
        self._records[places, CHECKSUM] = checksums
        self._records[places, CHECKED] = self._commits[places]

    def checksums(self, places: Ints) -> tuple[Words, Bools]:
        """The checksums of sealed slots, and which slots have one."""
        return self._records[places, CHECKSUM], self._records[places, CHECKED] == self._commits[places]

    def _next_commit(self) -> int:
        self._last_commit += 2
        return self._last_commit

    # -- what an earlier run has left --------------------------------------------------------------------------------

    def find_spaces(self) -> list[SpaceEntry]:
        """The spaces there are. Closes every entry that is not whole, or older than another of the same number or
        space. Call it once, before any other method."""
        commits = self._space_commits.tolist()
        taken: set[tuple[Namespace, int]] = set()
        found: list[SpaceEntry] = []
        for at in sorted((at for at in range(len(commits)) if commits[at]), key=lambda at: -commits[at]):
            entry = _read_entry(commits[at], self._spaces[at])
            if entry is None or entry.number in self._entries or (entry.namespace, entry.group) in taken:
                self._space_commits[at] = 0
                continue
            self._last_commit = max(self._last_commit, commits[at])
            self._entries[entry.number] = at
            taken.add((entry.namespace, entry.group))
            found.append(entry)
        self._free_entries = sorted(set(range(len(commits))) - set(self._entries.values()), reverse=True)
        return found

    def have_room_for_kept(self) -> None:
        """Get memory for all that the methods below read. Raises OSError."""
        if self.take_room is None:
            return
        self.take_room(0, self._first_record)
        grid, (slabs, damaged) = self.grid, self._read_slabs()
        for head, end, size in _in_turn(*slabs):
            self._take_records(head, grid.nbytes(head, end) // size)
        for unit in damaged:
            self._take_records(unit, grid.records)

    def find_slabs(self) -> tuple[FoundSlabs, int]:
        """The slabs that were cut, by offset, and how many sealed records were lost because the entry of their slab is
        damaged."""
        (found, damaged), lost = self._read_slabs(), 0
        for unit in damaged:
            every = slice(unit * self.grid.records, (unit + 1) * self.grid.records)
            lost += int(np.count_nonzero(self._commits[every]))
            self._commits[every] = 0
            self._slabs[:, unit] = 0
        return found, lost

    def _read_slabs(self) -> tuple[FoundSlabs, list[int]]:
        """The slabs that were cut, and the units for which that is not known."""
        slabs, units = self._slabs, len(self.grid)
        # By unit: how often it or one before it says other things than the one before that, and whether it says any.
        changes, used = np.empty(units, np.int32), np.empty(units, np.bool_)
        heads = []
        last, changed = np.zeros((3, 1), np.uint64), 0
        for at in range(0, units, UNITS_READ):
            part = slabs[:, at : at + UNITS_READ]
            mine = slice(at, at + part.shape[1])
            differ = (part != np.concatenate((last, part[:, :-1]), axis=1)).any(axis=0)
            changes[mine] = differ.cumsum() + changed
            last, changed = part[:, -1:], int(changes[mine][-1])
            used[mine] = part.any(axis=0)
            values, complements = part & np.uint64(0xFFFFFFFF), part >> np.uint64(32)
            whole = (values == ~complements & np.uint64(0xFFFFFFFF)).all(axis=0)
            head, length, size = values
            whole &= (head == np.arange(at, mine.stop, dtype=np.uint64)) & (length > 0) & (size > 0)
            whole &= head + length <= units
            heads.append(values[:, whole].astype(np.uint32))
        found = np.concatenate(heads, axis=1)
        # A slab counts if all of its units say the same.
        found = found[:, changes[found[0]] == changes[found[0] + found[1] - 1]]
        # From here on: how many slabs begin at a unit, less those that end before it.
        changes[:] = 0
        changes[found[0]] = 1
        ends = found[0] + found[1]
        changes[ends[ends < units]] -= 1
        damaged = (used & (changes.cumsum(out=changes) == 0)).nonzero()[0].tolist()
        head, length, size = (column.astype(np.int64) for column in found)
        return FoundSlabs(head, head + length, size * SLOT_ALIGN), damaged

    def find_sealed(self, slabs: FoundSlabs, count: int) -> Iterator[tuple[Ints, Words]]:
        """The places and contents of all sealed records of these slabs, about ``count`` of them read at a time. They
        are not checked any further: see `damaged`. `on_progress` is called with the progress."""
        grid = self.grid
        ends = np.minimum(slabs.end * grid.unit, grid.pool_bytes)
        firsts, capacities = slabs.head * grid.records, (ends - slabs.head * grid.unit) // slabs.size
        places: list[Ints] = []
        left, done, total = count, 0, int(capacities.sum())
        for first, end in _in_turn(firsts, firsts + capacities):
            while first < end:
                places.append(np.arange(first, min(first + left, end)))
                left -= len(places[-1])
                first += len(places[-1])
                if not left:
                    yield self._sealed_at(places)
                    places, left, done = [], count, done + count
                    self.on_progress(done, total)
        yield self._sealed_at(places)

    def _sealed_at(self, places: list[Ints]) -> tuple[Ints, Words]:
        at = np.concatenate(places) if places else np.empty(0, np.int64)
        at = at[self._commits[at] != 0]
        return at, self._records[at]

    def damaged(self, contents: Words) -> Bools:
        """Flags the records that do not fit their digest, or whose commit word was never issued."""
        wrong: Bools = (contents[:, COMMIT] > LAST_COMMIT) | (contents[:, COMMIT] & np.uint64(1) == 0)
        wrong |= _digest(contents[:, :DIGEST], COMMIT) != contents[:, DIGEST]
        return wrong

    def commits(self, places: Ints) -> Words:
        """The commit words of these records: a higher one is newer."""
        commits: Words = self._commits[places]
        return commits

    def see_commits(self, commits: Words) -> None:
        """Note that records with these commit words are kept: what is sealed from now on is newer."""
        if len(commits):
            self._last_commit = max(self._last_commit, int(commits.max()))


def num_words(pool_bytes: int, slab_bytes: int, spaces: int = SPACES) -> int:
    """Number of words of all records of a pool, with all that belongs to them."""
    grid = Grid(pool_bytes, slab_bytes)
    return _pages(3 * len(grid)) + spaces + spaces * PAGE_WORDS + record_words(grid)


def record_words(grid: Grid) -> int:
    """Number of words of the records alone, which are the last ones. The others need memory from the start; see
    `TakeRoom`."""
    return len(grid) * grid.records * RECORD_WORDS


def _pages(words: int) -> int:
    return -(-words // PAGE_WORDS) * PAGE_WORDS


def _in_turn(*columns: Ints) -> Iterator[tuple[int, ...]]:
    """The values of each row, for very many rows."""
    for at in range(0, len(columns[0]), UNITS_READ):
        yield from zip(*(column[at : at + UNITS_READ].tolist() for column in columns), strict=True)


def _checked(value: int) -> int:
    """A number below 2**32 with its complement, so that damage is seen when it is read."""
    return value | (~value & 0xFFFFFFFF) << 32


def _unchecked(word: int) -> int | None:
    """The number in a checked word: 0 if it was never written, None if it is damaged."""
    value = word & 0xFFFFFFFF
    return 0 if word == 0 else value if word == _checked(value) else None


def _digest(words: Words, first: int) -> Words:
    """Digests of records, each over its words from the ``first`` on, [n, words]."""
    lanes = words.view(np.uint32).astype(np.uint64)
    products: Words = lanes @ _MULTIPLIERS[2 * first : 2 * first + lanes.shape[1]]
    return products


def _used(tick: int, count: int) -> Words:
    """Words of a use at ``tick``, in the order in which the blocks are to go."""
    order = np.minimum(np.arange(count, dtype=np.uint64), (1 << ORDER_BITS) - 1)
    return order + np.uint64(tick << ORDER_BITS)


def entry_crc(commit: int, number: int, facts: bytes) -> int:
    """CRC of an entry: its commit word and number, and the length and bytes of its text."""
    return zlib.crc32(struct.pack("<3Q", commit, number, len(facts)) + facts)


def _read_entry(commit: int, entry: Words) -> SpaceEntry | None:
    """The space of an entry, or None if anything about it is wrong."""
    crc, number, length = entry[:ENTRY_HEAD].tolist()
    if not 0 < number < 1 << 31 or length > 8 * (PAGE_WORDS - ENTRY_HEAD):
        return None
    facts = entry[ENTRY_HEAD:].tobytes()[:length]
    if not commit & 1 or commit > LAST_COMMIT or crc != entry_crc(commit, number, facts):
        return None
    try:
        fields, group, shard_bytes = json.loads(facts)
        namespace = Namespace(**fields)
        whole = _is_space(namespace, group, shard_bytes)
    except (ValueError, TypeError, AttributeError):
        return None  # a CRC that fits by accident, or another version of `Namespace`
    return SpaceEntry(number, namespace, group, shard_bytes) if whole else None


def _is_space(namespace: Namespace, group: Any, shard_bytes: Any) -> bool:
    texts = (namespace.model, namespace.dtype, namespace.kv_layout, namespace.hash_algorithm, namespace.extra)
    numbers = (namespace.block_size, namespace.tp_size, namespace.pp_size, namespace.hash_bytes, group)
    return (
        all(isinstance(text, str) for text in texts)
        and all(type(number) is int for number in numbers)
        and isinstance(shard_bytes, list)
        and 0 < len(shard_bytes) <= MAX_SHARDS
        and all(each is None or (type(each) is int and 0 < each <= MAX_BYTES) for each in shard_bytes)
        and any(shard_bytes)
        and namespace.problem() is None
    )
