"""The disk tier against a model, with room for a few shards: what is found, read, evicted, removed and kept."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvsidecar.tiers.backend import ReadEnd, WriteEnd
from kvsidecar.tiers.disk.backend import DiskBackend
from kvsidecar.tiers.disk.directory import EXTENTS
from tests.marks import examples
from tests.tiers.support import PAGE, key, read, space, there, write

SPACES = [space(), space(shard=1), space("two", nbytes=2 * PAGE - 1)]
PAGES = [1, 1, 2]
NAMES = range(8)
Shard = tuple[int, int]
"""Space and name."""

NAME_LISTS = st.lists(st.sampled_from(NAMES), unique=True, min_size=1, max_size=8)
WHICH = st.integers(0, len(SPACES) - 1)


class TierMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.model: set[Shard] = set()
        """What is there."""
        self.damaged: set[Shard] = set()
        """Part of it: other bytes are on the disk."""
        self.evicted = 0

    @initialize(pages=st.sampled_from([(4, 2), (6, 3), (8, 8), (9, 4)]))
    def start(self, pages: tuple[int, int]) -> None:
        self.capacity, self.slab = pages
        self.open()

    def open(self) -> None:
        path = Path(self.place.name) / "tier"
        self.tier = DiskBackend(path, self.capacity * PAGE, slab_bytes=self.slab * PAGE, lock_seconds=0)

    def found(self) -> set[Shard]:
        return {(at, name) for at, of in enumerate(SPACES) for name in there(self.tier, of, NAMES)}

    @rule(at=WHICH, names=NAME_LISTS)
    def store(self, at: int, names: list[int]) -> None:
        ends = dict(zip(names, write(self.tier, SPACES[at], names), strict=True))
        now = self.found()
        for name, end in ends.items():
            if end is WriteEnd.PRESENT:
                assert (at, name) in self.model & now
            elif end is WriteEnd.DONE:
                assert (at, name) not in self.model
                assert (at, name) in now
        written = {(at, name) for name, end in ends.items() if end is WriteEnd.DONE}
        assert now <= self.model | written
        gone = self.model - now
        self.evicted += len(gone)
        assert written or not gone, "evicted for nothing"
        if sum(PAGES[at] for _ in names) <= self.slab // PAGES[at] * PAGES[at]:
            assert WriteEnd.FULL not in ends.values(), "one slab has room for all"
        self.model = now
        self.damaged &= now

    @rule(at=WHICH, names=NAME_LISTS)
    def load(self, at: int, names: list[int]) -> None:
        for name, end in read(self.tier, SPACES[at], names).items():
            shard = at, name
            if shard in self.damaged:
                assert end is ReadEnd.CORRUPT
                self.damaged.remove(shard)
                self.model.remove(shard)
            else:
                assert end is (ReadEnd.DONE if shard in self.model else ReadEnd.MISS)

    @rule(at=WHICH | st.none())
    def forget(self, at: int | None) -> None:
        namespace = None if at is None else SPACES[at].namespace
        gone = {shard for shard in self.model if namespace in (None, SPACES[shard[0]].namespace)}
        assert self.tier.forget(namespace) == len(gone)
        self.model -= gone
        self.damaged -= gone

    @rule(at=st.integers(0, 8))
    def flip(self, at: int) -> None:
        """A bit of one page, whatever it holds."""
        where = at % self.capacity * PAGE + 11
        hit = {
            shard
            for shard in self.model
            if self.offset(*shard) <= where < self.offset(*shard) + SPACES[shard[0]].shard_bytes
        }
        if hit & self.damaged:
            return  # it might mend it
        self.damaged |= hit
        with (Path(self.place.name) / "tier" / EXTENTS).open("r+b", buffering=0) as file:
            file.seek(where)
            (was,) = file.read(1)
            file.seek(where)
            file.write(bytes([was ^ 4]))

    def offset(self, at: int, name: int) -> int:
        """Where the shard lies in the file."""
        _, grant = self.tier._reference(SPACES[at], [key(name)])
        assert grant is not None
        self.tier._cache.end_load(grant)
        return int(grant.slots[0][0])

    @rule()
    def reopen(self) -> None:
        self.tier.close()
        self.open()
        assert self.tier.stats().kept_blocks == len(self.model)
        assert self.tier.stats().dropped_blocks == {}
        self.evicted = 0

    @invariant()
    def counts_fit(self) -> None:
        if not hasattr(self, "tier"):
            return
        assert self.found() == self.model
        stats = self.tier.stats()
        assert stats.blocks == len(self.model)
        assert stats.used_bytes == sum(PAGES[at] * PAGE for at, _ in self.model)
        assert stats.evicted_blocks == self.evicted

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
        self.place.cleanup()


TestTier = TierMachine.TestCase
TestTier.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
