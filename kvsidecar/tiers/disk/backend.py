"""The backend of the disk tier: what is where is decided by a cache of its own; its decisions outlive the process.

One lock is held for decisions, never while the disk is read or written. A shard is a block of one shard in a space of
its own: shards of a block come and go one by one.

Nothing is ever synchronised to the disk. After a power failure a record may name an extent that was not written, or was
used again: each record has a checksum of the extent's bytes, which every read verifies. The checksum is combined with
the space, because after two power failures a record may also be one of another space that had the same number.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

import numpy as np

from kvsidecar.cache.arrays import Ints
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.change_log import Outlet
from kvsidecar.cache.grants import LoadGrant, StoreGrant
from kvsidecar.cache.shares import Share, ShareLimits
from kvsidecar.cache.slots import SLOT_ALIGN, SlotAllocator, size_class
from kvsidecar.cache.space_blocks import Space
from kvsidecar.errors import Refusal, TierFailed
from kvsidecar.pool.record_table import TableFacts
from kvsidecar.support import log
from kvsidecar.support.patterns import covers
from kvsidecar.support.units import MiB, format_size
from kvsidecar.tiers.backend import (
    Backend,
    BackendStats,
    ReadEnd,
    ShardSpace,
    ShareUse,
    TierShare,
    WriteEnd,
    namespace_digest,
)
from kvsidecar.tiers.disk.directory import EXTENTS, KIND, DiskDirectory
from kvsidecar.tiers.disk.extents import PAGE, ExtentFile, Unreadable
from kvsidecar.tiers.disk.kept_budget import KeptBudget
from kvsidecar.tiers.disk.names import KeptNames
from kvsidecar.tiers.shard_bytes import checksum_of
from kvsidecar.types import LookupMode, Namespace

SLAB_BYTES: Final = 64 * MiB
"""Slabs are cut into extents of one size. No shard may be larger."""
MAX_SPACES: Final = 1000
"""The most spaces that are kept at a time: the least recently used one is forgotten first. The index has some more."""

LISTED_ROWS: Final = 512
"""Rows of a table that one piece of `DiskBackend.pieces` covers: 32 KiB of the longest hashes."""

_log = log.get("disk tier")


def facts_of(capacity_bytes: int, slab_bytes: int = SLAB_BYTES) -> TableFacts:
    """What the files of a tier of this capacity depend on."""
    return TableFacts(capacity_bytes, min(slab_bytes, capacity_bytes), KIND, "")


class DiskBackend(Backend):
    """Keeps shards in a directory on a local disk.

    Args:
        path: the directory; made if only its last part is missing.
        capacity_bytes: size of all extents; rounded down to whole pages. They are allocated here, once.
        slab_bytes: see `SLAB_BYTES`. What was kept with another size is forgotten.
        lock_seconds: longest wait for another process that uses the directory.
        write_bytes_per_day: the budget that `stats` reports; callers must keep to it. None: there is none.

    Raises:
        TierFailed: the directory cannot be used, or has no room; the text is one sentence.
    """

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        *,
        slab_bytes: int = SLAB_BYTES,
        lock_seconds: float = 5.0,
        write_bytes_per_day: int | None = None,
    ) -> None:
        capacity = capacity_bytes // SLOT_ALIGN * SLOT_ALIGN
        if capacity <= 0:
            raise TierFailed(f"the disk tier's capacity is {capacity_bytes} bytes; it must be at least {SLOT_ALIGN}")
        facts = facts_of(capacity, slab_bytes)
        self._lock = threading.Lock()
        """Guards all that follows, except the file of extents."""
        self._directory = DiskDirectory(path, lock_seconds)
        self._budget: KeptBudget | None = None
        try:
            if write_bytes_per_day is not None:
                self._budget = KeptBudget(self._directory.fd, path, write_bytes_per_day)
            self._files, is_new = self._directory.open(facts)
            self._cache = self._adopt(facts, is_new)
        except BaseException:
            if self._budget is not None:
                self._budget.close()
            self._directory.close()
            raise
        self._extents = ExtentFile(self._files.extents_fd, str(path / EXTENTS), direct=self._files.direct)
        self._recorded = np.zeros(len(self._slots.grid), np.int64)
        """Number of each unit's records, from its first one on, that are known to have disk space."""
        self._quota_blocks = 0
        """Shards that were not read or written for the sake of other shares' guarantees."""
        self._forgotten_blocks = 0
        """Shards forgotten with the spaces that were too many."""
        self._shares: list[ShareLimits] = []
        self._names = KeptNames(self._directory.fd, path, 2 * MAX_SPACES)
        self._namespaces = self._names.open(self._digests())
        """Namespaces by their digests, which are all that the index contains."""
        self._probe = threading.Lock()
        report = self._cache.adopted
        _log.info(
            "disk tier opened",
            directory=str(path),
            capacity=format_size(capacity),
            kept_blocks=report.kept_blocks,
            dropped=dict(report.dropped),
            direct=self._files.direct,
        )

    def _adopt(self, facts: TableFacts, is_new: bool) -> BlockCache:
        """Make the cache, with the shards that the files have kept."""
        try:
            cache = self._make_cache(facts)
        except Exception as error:
            self._files.close()
            if is_new:
                raise
            # An index that cannot be read in a way that nobody has thought of would end every start from now on.
            _log.exception("the disk tier's index cannot be read: it starts empty", reason=str(error))
            self._files = self._directory.create(facts)
            cache = self._make_cache(facts)
        self._files.table.starts = 0
        return cache

    def _make_cache(self, facts: TableFacts) -> BlockCache:
        self._slots = SlotAllocator(facts.pool_bytes, facts.slab_bytes)
        return BlockCache(self._slots, seed=secrets.randbits(64), records=self._files.table.records)

    def find(self, space: ShardSpace, hashes: Sequence[bytes]) -> list[bool]:
        with self._lock:
            known = self._cache.find_space(self._learn(space), space.group)
            return [False] * len(hashes) if known is None else self._cache.lookup(known, hashes, LookupMode.BITMAP)

    # -- read ------------------------------------------------------------------------------------------------------

    def read(self, space: ShardSpace, hashes: Sequence[bytes], memory: Sequence[memoryview]) -> list[ReadEnd]:
        ends = [ReadEnd.MISS] * len(hashes)
        with self._lock:
            which, grant = self._reference(space, hashes)
            if grant is None:
                return ends
            slots = grant.slots[0]
            checksums = self._cache.checksums(slots)
        wrong: list[int] = []
        """Indices of bad shards among the referenced ones."""
        try:
            self._extents.read(slots, [memory[i] for i in which])
            for at, i in enumerate(which):
                if checksums[at] == _checksum(space, memory[i], None):
                    ends[i] = ReadEnd.DONE
                    continue
                wrong.append(at)
                if checksums[at] is not None:  # else the process was killed before it recorded one
                    ends[i] = ReadEnd.CORRUPT
        except Unreadable as error:
            # A bad place on the medium would make each read of it fail; once written again, it is replaced.
            wrong = error.which
            raise
        finally:
            with self._lock:
                for at in wrong:
                    self._cache.forget(grant, 0, at)
                self._cache.end_load(grant)
        return ends

    def _reference(self, space: ShardSpace, hashes: Sequence[bytes]) -> tuple[list[int], LoadGrant | None]:
        """Reference those of these shards that are there, or as many of the first as the share may use. They stay until
        the grant ends."""
        known = self._cache.find_space(self._learn(space), space.group)
        if known is None:
            return [], None
        hits = self._cache.lookup(known, hashes, LookupMode.BITMAP)
        which = [i for i, hit in enumerate(hits) if hit]
        if not which:
            return [], None
        wanted = len(which)
        while which:
            grant = self._cache.begin_load([(known, 0, [hashes[i] for i in which])], None, 0.0)
            if isinstance(grant, LoadGrant):
                self._quota_blocks += wanted - len(which)
                return which, grant
            if grant is not Refusal.QUOTA:
                raise AssertionError(f"blocks just found by a lookup cannot be referenced: {grant}")
            which = which[: len(which) // 2]  # others could not have their guarantee at once
        self._quota_blocks += wanted
        return [], None

    # -- write -----------------------------------------------------------------------------------------------------

    def write(
        self, space: ShardSpace, hashes: Sequence[bytes], memory: Sequence[memoryview], checksums: Sequence[int | None]
    ) -> list[WriteEnd]:
        ends = [WriteEnd.FULL] * len(hashes)
        self._names.add(space.namespace, self._digests_now)  # before a shard of it is there
        with self._lock:
            known = self._open_space(space)
            grant, count = (None, 0) if known is None else self._reserve(known, hashes)
            if known is None or grant is None:
                return ends
        ends[:count] = [WriteEnd.PRESENT] * count
        (part,) = grant.parts
        which = part.index.tolist()
        try:
            if which:
                sums = [_checksum(space, memory[i], checksums[i]) for i in which]
                self._allocate_records(part.slots)
                if self._budget is not None:
                    self._budget.spend(len(which) * space.shard_bytes)
                self._extents.write(part.slots, [memory[i] for i in which])
                grant.checksums = part.slots, np.array(sums, np.uint64)
        except BaseException:
            self._end(known, grant, whole=False)
            raise
        self._end(known, grant, whole=True)
        for i in which:
            ends[i] = WriteEnd.DONE
        return ends

    def _open_space(self, space: ShardSpace) -> Space | None:
        """Open the space for one write. None if its shards are too large, or too many spaces are in use."""
        cache, name = self._cache, self._learn(space)
        if size_class(space.shard_bytes) > self._slots.largest_slot:
            return None
        if cache.find_space(name, space.group) is None and len(cache.spaces) >= MAX_SPACES:
            unused = self._forgettable()
            if not unused:
                return None
            oldest = min(unused, key=lambda each: int(each.blocks.last_used.max()))
            _log.warning("the disk tier has dropped a space: it has too many", limit=MAX_SPACES)
            self._forgotten_blocks += cache.clear(oldest.namespace)
        return cache.open_space(name, space.group, 1, 0, space.shard_bytes)

    def _forgettable(self) -> list[Space]:
        """Spaces that nobody writes to, and that may go: no share loses what it is guaranteed, unless it has more than
        its part of all spaces."""
        count = Counter(each.share for each in self._cache.spaces)
        most = MAX_SPACES // len(self._cache.shares)

        def may_go(payer: Share, nbytes: int) -> bool:
            kept = payer.used - nbytes >= payer.guaranteed
            return not payer.guaranteed or kept or count[payer] > most

        return [each for each in self._cache.spaces if not each.users and may_go(each.share, each.blocks.used_bytes)]

    def _reserve(self, known: Space, hashes: Sequence[bytes]) -> tuple[StoreGrant | None, int]:
        """Extents for these shards, or for as many of the first as there is room for; and how many these are."""
        count, refusal = len(hashes), None
        try:
            if known.share.most is not None and known.share.used > known.share.most:
                self._cache.sweep()  # its maximum was lowered, or its kept blocks had no share: a piece with each write
            grant = None
            while count and grant is None:
                found = self._cache.begin_store([(known, 0, hashes[:count])])
                if isinstance(found, StoreGrant):
                    grant = found
                else:
                    refusal = found
                    count //= 2
        except BaseException:
            self._cache.close_space(known)
            raise
        if refusal is Refusal.QUOTA:
            self._quota_blocks += len(hashes) - count
        if grant is None:
            self._cache.close_space(known)
        return grant, count

    def _allocate_records(self, slots: Ints) -> None:
        """Take disk space for the records of these slots' slabs."""
        grid, slabs = self._slots.grid, self._slots.slabs
        for slab in set(slabs.holding(slots).tolist()):
            # Cut until the grant ends, hence unchanged.
            head, capacity = slabs.head.item(slab), slabs.capacity.item(slab)
            if self._recorded[head] < capacity:
                try:
                    self._files.allocate_records(head * grid.records, capacity)
                except OSError as error:
                    where = f"the disk tier's index in {self._directory.path}"
                    raise TierFailed(f"there is no room for {where}: {error.strerror}") from error
                self._recorded[head] = capacity

    def _end(self, known: Space, grant: StoreGrant, *, whole: bool) -> None:
        with self._lock:
            (self._cache.seal_all if whole else self._cache.abort_all)(grant)
            self._cache.close_space(known)

    # -- the rest --------------------------------------------------------------------------------------------------

    def set_shares(self, shares: Sequence[TierShare]) -> None:
        with self._lock:
            self._shares = [
                ShareLimits(each.name, partial(self._covers, each.patterns), each.guaranteed, each.most)
                for each in shares
            ]
            self._cache.set_shares(self._shares)

    def _covers(self, patterns: tuple[str, ...], name: Namespace) -> bool:
        namespace = self._namespaces.get(name.model)
        return namespace is not None and covers(patterns, namespace)

    def _learn(self, space: ShardSpace) -> Namespace:
        """The space's name in the cache. The shards of a namespace that is new here count for its share from now on."""
        name = _name(space)
        if name.model not in self._namespaces:
            if len(self._namespaces) >= MAX_SPACES:
                there = self._digests()
                self._namespaces = {digest: each for digest, each in self._namespaces.items() if digest in there}
            self._namespaces[name.model] = space.namespace
            if self._shares and any(each.namespace.model == name.model for each in self._cache.spaces):
                self._cache.set_shares(self._shares)
        return name

    def _digests(self) -> set[str]:
        """Digests of the namespaces that have shards."""
        return {each.namespace.model for each in self._cache.spaces}

    def _digests_now(self) -> set[str]:
        with self._lock:
            return self._digests()

    def forget(self, namespace: Namespace | None) -> int:
        count = 0
        with self._lock:
            for space in self._cache.spaces:
                if namespace is None or space.namespace.model == namespace_digest(namespace):
                    count += self._cache.clear(space.namespace, sweep=0)
        more = True
        while more:  # a piece at a time: others need the lock meanwhile
            with self._lock:
                more = self._cache.sweep()
        return count

    def keys(self) -> Iterable[tuple[bytes, bytes, int]]:
        with self._lock:
            spaces = self._cache.spaces
        for space in spaces:
            with self._lock:
                hashes = space.blocks.index.all_hashes()
            yield bytes.fromhex(space.namespace.extra), hashes, space.namespace.hash_bytes

    def watch(self, space: ShardSpace, outlet: Outlet | None) -> None:
        with self._lock:
            self._cache.watch(self._learn(space), outlet)

    def pieces(self, space: ShardSpace) -> Iterator[bytes]:
        with self._lock:
            found = self._cache.readable_hashes(self._learn(space), space.group, LISTED_ROWS)
        while True:
            with self._lock:
                hashes = next(found, None)
            if hashes is None:
                return
            yield hashes

    def probe(self) -> None:
        area = memoryview(mmap.mmap(-1, 2 * PAGE))
        sent, back = area[:PAGE], area[PAGE:]
        sent[:] = os.urandom(PAGE)
        at = np.array([self._files.facts.pool_bytes])
        with self._probe:
            self._extents.write(at, [sent])
            self._extents.read(at, [back])
        if sent != back:
            raise TierFailed(f"{self._directory.path / EXTENTS} does not return what was written to it")

    def stats(self) -> BackendStats:
        with self._lock:
            now, report = self._cache.stats(), self._cache.adopted
            return BackendStats(
                capacity_bytes=now.total_bytes,
                used_bytes=now.used_bytes,
                blocks=now.readable_blocks,
                evicted_blocks=now.evicted_blocks + self._forgotten_blocks,
                kept_blocks=report.kept_blocks,
                dropped_blocks=dict(report.dropped),
                quota_blocks=self._quota_blocks,
                shares=[
                    ShareUse(each.name, each.used, each.guaranteed, each.most, each.busy, each.evicted)
                    for each in (self._cache.shares if self._shares else ())
                ],
                write_bytes_left=None if self._budget is None else self._budget.left(),
            )

    def close(self) -> None:
        self._names.close()
        if self._budget is not None:
            self._budget.close()
        self._files.close()
        self._directory.close()


@lru_cache(maxsize=4096)
def _name(space: ShardSpace) -> Namespace:
    """The namespace of a space in the cache: a space there has all shards of its blocks, here each shard is alone.
    Those of one namespace have the same model."""
    model = namespace_digest(space.namespace)
    return Namespace(model, "-", "-", 1, 1, 1, "-", space.namespace.hash_bytes, space.digest.hex())


def _checksum(space: ShardSpace, memory: memoryview, known: int | None) -> int:
    """The checksum in a shard's record: that of its bytes, combined with its space."""
    return checksum_of(memory, known) ^ int.from_bytes(space.digest[:8], "little")


def open_backend(directory: str, capacity_bytes: int, write_bytes_per_day: int | None = None) -> DiskBackend:
    """Open the backend in the tier's process."""
    return DiskBackend(Path(directory), capacity_bytes, write_bytes_per_day=write_bytes_per_day)
