"""The daemon is cut off after every word that it writes to its records, and the next one must find only whole blocks.

The lives are those of `tests.cache.test_cache_machine`, whose pages have tokens that say who wrote them last. Here the
cache is recorded. After each word that changes, and after each page that a store writes, a second cache takes over a
copy of the records, without looking at their digests: the order of the writes alone must do. Each block that it finds
must hold the tokens of its shards; and it must find all blocks that were readable before and after this step.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from kvsidecar.cache.arrays import Ints, Words
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.block_table import BlockTable
from kvsidecar.cache.records import Records
from kvsidecar.cache.space_blocks import SpaceBlocks
from tests.cache.cache_machine import NAMES, POOLS, SPACES, CacheMachine, Key, Token
from tests.cache.cuts import CutMemory, OrderAlone, recorded_cache, words_for
from tests.cache.integrity import check_integrity
from tests.cache.support import key, namespace, open_space
from tests.marks import examples, long

pytestmark = pytest.mark.timeout(600)

cuts_made = 0


class RecordedMachine(CacheMachine):
    records_are: type[Records] = Records

    @initialize(shape=st.sampled_from(POOLS), rebuilt=st.booleans(), seed=st.integers(0, 9))
    def start(  # type: ignore[override]
        self, shape: tuple[int, int, tuple[int, ...], tuple[int, ...]], *, rebuilt: bool, seed: int
    ) -> None:
        super().start(shape, [0, 0, 0], rebuilt=rebuilt)
        self.pages, self.slab, self.told = shape[0], shape[1], []
        self.before: set[Key] = set()
        self.found: list[set[Key]] = []
        self.words = CutMemory.create(words_for(self.pages, self.slab), self.cut, seed)
        self.restart()

    def restart(self) -> None:
        self.cache = recorded_cache(self.words, self.pages, self.slab, self.records_are)
        self.spaces = [open_space(self.cache, name, shards=self.shards[i]) for i, name in enumerate(SPACES)]

    @precondition(lambda self: self.serial % 3 == 2)
    @rule()
    def kill(self) -> None:
        """The next run goes on with what it finds."""
        self.sealed = {block: shards for block, shards in self.sealed.items() if self.is_readable(block)}
        self.open, self.loads, self.leases = [], [], {}
        self.dead_leases, self.released_leases, self.corrupt = [], [], None
        self.restart()
        assert set(self.sealed) == self.before
        assert self.cache.adopted.kept_blocks == len(self.before)
        assert not set(self.cache.adopted.dropped) & {"damaged", "misplaced", "duplicate"}

    def write(self, slot: int, pages: int, token: Token) -> None:
        for page in range(slot // 4096, slot // 4096 + pages):
            self.memory[page] = token
            self.cut()

    def cut(self) -> None:
        global cuts_made
        cuts_made += 1
        self.found.append(set(self.blocks_of(self.next_run())))

    def next_run(self) -> BlockCache:
        return recorded_cache(np.array(self.words, subok=False), self.pages, self.slab, OrderAlone)

    def blocks_of(self, cache: BlockCache) -> dict[Key, int]:
        """Last use of all blocks that a lookup finds; each has the bytes that were stored."""
        blocks = {}
        for number, name in enumerate(SPACES):
            space = cache.find_space(namespace(name), 0)
            if space is None:
                continue
            index = space.blocks.index
            rows = index.find(index.keys([key(each) for each in NAMES])).tolist()
            for block, row in zip(NAMES, rows, strict=True):
                if row < 0 or space.blocks.missing[row]:
                    continue
                blocks[number, block] = int(space.blocks.last_used[row])
                for shard, slot in enumerate(space.blocks.slots[:, row].tolist()):
                    pages = self.memory[slot // 4096 : slot // 4096 + self.shards[number][shard]]
                    assert pages[0] is not None
                    assert pages[0][:2] == ((number, block), shard), f"{block} is found in a slot that has {pages[0]}"
                    assert pages == pages[:1] * len(pages), f"{block} is found in a slot that has {pages}"
        return blocks

    @invariant()
    def every_cut_leaves_whole_blocks_and_loses_no_other(self) -> None:
        if not hasattr(self, "words"):
            return
        after = set(self.readable())
        for found in self.found:
            assert self.before & after <= found, f"a kill would lose {self.before & after - found}"
        self.found.clear()
        self.before = after

    @invariant()
    def the_next_run_finds_exactly_the_readable_blocks(self) -> None:
        if not hasattr(self, "words"):
            return
        cache = self.next_run()
        check_integrity(cache)
        last_used = self.blocks_of(cache)
        assert set(last_used) == set(self.readable())
        for number, space in enumerate(self.spaces):
            blocks, index = space.blocks, space.blocks.index
            rows = index.find(index.keys([key(name) for name in NAMES])).tolist()
            here = [
                (int(blocks.last_used[row]), last_used[number, name])
                for name, row in zip(NAMES, rows, strict=True)
                if row >= 0 and blocks.evictable[row] and (number, name) in last_used
            ]
            assert all(b < d for a, b in here for c, d in here if a < c), f"the order of uses is another: {here}"


RecordedMachine.TestCase.settings = settings(
    max_examples=examples(100), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def run(machine: type[RecordedMachine], *, finds_a_bug: bool, max_examples: int = 400) -> None:
    quick = settings(
        RecordedMachine.TestCase.settings,
        max_examples=max_examples,
        phases=[Phase.generate],
        derandomize=True,
        report_multiple_bugs=False,
        database=None,
    )
    with pytest.raises(AssertionError) if finds_a_bug else nullcontext():
        run_state_machine_as_test(machine, settings=quick)  # type: ignore[no-untyped-call]


TestRecords = pytest.mark.no_cover(RecordedMachine.TestCase)


@long
def test_thousands_of_cuts_were_made() -> None:
    before = cuts_made
    run(RecordedMachine, max_examples=40, finds_a_bug=False)
    assert cuts_made - before > 2000


# -- bugs that must be found -----------------------------------------------------------------------------------------


class CommitFirst(Records):
    """The state is written before the record."""

    def seal(
        self, number: int, shard: int, size: int, slots: Ints, words: Words, places: Ints, tick: int, *more: Any
    ) -> None:
        self._commits[places] = self._last_commit + 2
        super().seal(number, shard, size, slots, words, places, tick, *more)


class HashLast(Records):
    """The hash is written after the state."""

    def seal(
        self, number: int, shard: int, size: int, slots: Ints, words: Words, places: Ints, tick: int, *more: Any
    ) -> None:
        hashes = self._records[places, 4:8].copy()
        super().seal(number, shard, size, slots, words, places, tick, *more)
        written = self._records[places, 4:8].copy()
        np.asarray(self._records)[places, 4:8] = hashes
        cast(CutMemory, self._records).on_write()
        self._records[places, 4:8] = written


class UnsealLate(Records):
    """A slot is handed out again before its record is unsealed."""

    def unseal(self, places: Ints) -> None:
        self.late = [*getattr(self, "late", ()), *places]

    def seal(
        self, number: int, shard: int, size: int, slots: Ints, words: Words, places: Ints, tick: int, *more: Any
    ) -> None:
        self._commits[getattr(self, "late", [])] = 0
        self.late = []
        super().seal(number, shard, size, slots, words, places, tick, *more)


class ClearLater(Records):
    """A clear forgets its blocks only as the sweep comes to them."""

    def close_space(self, number: int) -> None:
        self._entries.pop(number, None)


class CountAgain(Records):
    """Numbers of tables begin again at 1 in each run."""

    @property
    def last_number(self) -> int:
        return 0


@long
@pytest.mark.parametrize("bug", [CommitFirst, HashLast, UnsealLate, ClearLater, CountAgain])
def test_a_planted_bug_is_found(bug: type[Records]) -> None:
    class WithBug(RecordedMachine):
        records_are = bug

    run(WithBug, finds_a_bug=True)


def test_a_corrupt_slot_that_is_forgotten_only_after_its_last_reader_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forget = BlockTable.mark_corrupt

    def forget_later(table: BlockTable, blocks: SpaceBlocks, row: int, slot: int) -> None:
        records, table.records = table.records, None
        forget(table, blocks, row, slot)
        table.records = records

    monkeypatch.setattr(BlockTable, "mark_corrupt", forget_later)
    run(RecordedMachine, finds_a_bug=True)
