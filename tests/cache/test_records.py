"""What a cache takes over from the records of an earlier run, also if they are damaged or make no sense."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsidecar.cache import records
from kvsidecar.cache.arrays import FEW, Words
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.block_index import BlockIndex
from kvsidecar.cache.records import COMMIT, DIGEST, HASH, MAX_SHARDS, RECORD_WORDS, SIZE, SLOT, TABLE, USED, Records
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.cache.space_blocks import Space
from kvsidecar.types import Namespace
from tests.cache.cuts import NUM_SPACES, CutMemory, OrderAlone, recorded_cache, words_for
from tests.cache.integrity import check_integrity
from tests.cache.support import (
    PAGE,
    begin,
    eviction_order,
    find,
    instructions_of,
    key,
    keys,
    lease,
    names_readable,
    namespace,
    open_space,
    slot_of,
    table_of,
)
from tests.marks import examples

PAGES, SLAB = 26, 8
"""Of the pool: the last slab is short."""


class Life:
    """The runs of one pool: its records, and which shard of which block its slots were last filled with."""

    def __init__(self, pages: int = PAGES, slab: int = SLAB) -> None:
        self.pages, self.slab = pages, slab
        self.words: Words = np.zeros(words_for(pages, slab), np.uint64)
        self.filled: dict[int, tuple[str, int | str, int]] = {}
        self.cache = self.run()

    def run(self) -> BlockCache:
        """The next run."""
        self.cache = recorded_cache(self.words, self.pages, self.slab)
        check_integrity(self.cache)
        return self.cache

    def space(self, name: str = "model") -> Space:
        space = self.cache.find_space(namespace(name), 0)
        assert space is not None
        return space

    def store(self, space: Space, *names: int | str) -> None:
        for shard in range(space.num_shards):
            grant = begin(self.cache, space, keys(*names), shard)
            (part,) = grant.parts
            for index, slot in zip(part.index.tolist(), part.slots.tolist(), strict=True):
                self.filled[slot] = (space.namespace.model, names[index], shard)
            self.cache.seal_all(grant)

    def check(self, names: range = range(100), run: BlockCache | None = None) -> int:
        """Every block that is found has the bytes that were stored. Returns how many are found.

        Args:
            run: another one than that of `cache`.
        """
        found, cache = 0, run or self.cache
        for space in cache.spaces:
            for name in names:
                if find(space, key(name)) is None:
                    continue
                found += 1
                for shard in range(space.num_shards):
                    assert self.filled[slot_of(space, key(name), shard)] == (space.namespace.model, name, shard)
        assert found == cache.stats().blocks
        return found

    @property
    def table(self) -> Words:
        """The records, [n, words]."""
        of_all = len(self.words) - self.slots_per_pool * RECORD_WORDS
        return self.words[of_all:].reshape(-1, RECORD_WORDS)

    @property
    def slots_per_pool(self) -> int:
        return self.pages

    def sealed(self) -> list[int]:
        return (self.table[:, COMMIT] & np.uint64(1)).nonzero()[0].tolist()

    def sign(self, place: int) -> None:
        """Make the digest of a record right."""
        row = self.table[place : place + 1]
        row[:, DIGEST] = records._digest(row[:, :DIGEST], COMMIT)


def test_blocks_their_order_and_their_geometry_outlive_the_run() -> None:
    life = Life()
    one, two = open_space(life.cache), open_space(life.cache, "two", shards=(1, 2))
    life.store(one, *range(10))
    life.store(two, 1, 2)
    life.store(one, 20, 21)
    life.cache.release(lease(life.cache, one, 0, 1))
    before = {name: eviction_order(life.space(name)) for name in ("model", "two")}
    stats = life.cache.stats()
    life.run()
    assert life.cache.adopted.kept_blocks == 14
    assert life.cache.adopted.kept_bytes == (12 + 2 * 3) * PAGE
    assert not life.cache.adopted.dropped
    assert {name: eviction_order(life.space(name)) for name in ("model", "two")} == before
    assert replace(life.cache.stats(), evicted_blocks=0, evicted_bytes=0) == stats
    assert life.space("two").shard_bytes == [PAGE, 2 * PAGE]
    assert life.check() == 14
    assert open_space(life.cache, "two", shards=(1, 2)) is life.space("two")


def test_the_next_run_evicts_what_was_used_first() -> None:
    life = Life(8, 4)
    life.store(open_space(life.cache), *range(8))
    for name in (0, 3, 1):  # 2 is the oldest then
        life.cache.release(lease(life.cache, life.space(), name))
    life.run()
    life.store(open_space(life.cache), 10, 11, 12, 13)
    assert names_readable(life.cache, life.space(), *range(20)) == [0, 1, 2, 3, 10, 11, 12, 13]
    life.run()
    life.store(open_space(life.cache), 14, 15)
    assert names_readable(life.cache, life.space(), *range(20)) == [1, 3, 10, 11, 12, 13, 14, 15]


def test_slots_that_were_being_filled_are_free_and_incomplete_blocks_are_dropped() -> None:
    life = Life()
    space = open_space(life.cache, shards=(1, 1))
    life.store(space, 1)
    life.cache.seal_all(begin(life.cache, space, keys(2), 0))
    begin(life.cache, space, keys(3), 0)
    life.run()
    assert life.cache.adopted.kept_blocks == life.check() == 1
    assert life.cache.adopted.dropped == {"incomplete": 1}
    assert life.cache.stats().free_bytes == (PAGES - 2) * PAGE
    life.run()
    assert not life.cache.adopted.dropped, "what was dropped once is still there"


@pytest.mark.parametrize("blocks", [1, FEW + 1])
def test_blocks_whose_slots_another_store_was_filling_are_gone(blocks: int) -> None:
    life = Life(blocks, blocks)
    space = open_space(life.cache)
    life.store(space, *range(blocks))
    begin(life.cache, space, keys(*range(100, 100 + blocks)))
    life.run()
    assert life.cache.adopted.kept_blocks == life.check(range(200)) == 0


@pytest.mark.parametrize("blocks", [1, FEW + 1])
def test_a_kill_at_any_word_of_a_store_leaves_no_block_with_other_bytes(blocks: int) -> None:
    life, cuts = Life(blocks, blocks), 0

    def cut() -> None:
        nonlocal cuts
        cuts += 1
        life.check(range(200), recorded_cache(np.array(life.words, subok=False), blocks, blocks, OrderAlone))

    life.words = CutMemory.create(words_for(blocks, blocks), cut)
    space = open_space(life.run())
    life.store(space, *range(blocks))
    before = cuts
    life.store(space, *range(100, 100 + blocks))
    assert cuts > before
    assert life.check(range(200)) == blocks


@pytest.mark.parametrize("lose", ["mark_corrupt", "forget"])
def test_a_block_whose_bytes_are_wrong_is_gone_though_its_load_has_not_ended(lose: str) -> None:
    life = Life()
    space = open_space(life.cache)
    life.store(space, 1, 2)
    load = life.cache.begin_load([(space, 0, keys(1))], None, 0.0)
    getattr(life.cache, lose)(load, 0, 0)
    life.run()
    assert names_readable(life.cache, life.space(), 1, 2) == [2]


def test_what_was_cleared_stays_cleared_though_the_sweep_never_came() -> None:
    life = Life()
    for name in ("one", "two"):
        life.store(open_space(life.cache, name), *range(10))
    life.cache.clear(namespace("one"), sweep=0)
    life.store(open_space(life.cache, "one"), 50)
    life.run()
    assert names_readable(life.cache, life.space("one"), *range(51)) == [50]
    assert len(names_readable(life.cache, life.space("two"), *range(51))) == 10
    assert life.cache.adopted.dropped == {"no_space": 10}
    life.cache.clear(sweep=0)
    life.run()
    assert life.cache.stats().free_bytes == PAGES * PAGE
    assert life.cache.spaces == []


def test_no_record_of_an_earlier_table_is_left_when_its_number_is_used_again() -> None:
    life = Life()
    for name in ("one", "two"):
        life.store(open_space(life.cache, name), 1, 2, 3)
        life.cache.clear(sweep=0)
    life.run()
    assert not life.sealed()
    life.store(open_space(life.cache, "three"), 4)
    assert life.space("three").blocks.number == 1
    life.run()
    assert life.check() == 1


def test_what_is_sealed_after_a_restart_is_newer_than_what_was_kept() -> None:
    life = Life()
    for name in range(5):
        life.store(open_space(life.cache), name)
    newest = life.table[:, COMMIT].max()
    life.run()
    life.store(open_space(life.cache), 10)
    assert life.table[:, COMMIT].max() > newest


def test_the_order_of_uses_is_right_after_two_restarts() -> None:
    life = Life()
    life.store(open_space(life.cache), 0, 1, 2)
    for _ in range(20):
        life.cache.release(lease(life.cache, life.space(), 0))
    life.run()
    life.cache.release(lease(life.cache, life.space(), 2))
    life.run()
    assert eviction_order(life.space()) == keys(1, 0, 2)


def test_a_record_beyond_the_last_slot_of_its_slab_is_not_read() -> None:
    life = Life()
    life.store(open_space(life.cache, shards=(3,)), 1, 2)
    inside, beyond = life.sealed()[0], life.sealed()[0] + 2
    life.table[beyond] = life.table[inside]
    life.table[beyond, SLOT] += 6 * PAGE
    life.sign(beyond)
    life.run()
    assert life.check() == 2


def test_a_hash_that_is_longer_than_those_of_its_namespace_is_dropped() -> None:
    life = Life()
    space = life.cache.open_space(replace(namespace(), hash_bytes=20), 0, 1, 0, PAGE)
    life.cache.seal_all(begin(life.cache, space, [b"%020d" % n for n in range(3)]))
    for place, word in zip(life.sealed(), (HASH + 2, HASH + 3, HASH + 1), strict=True):
        life.table[place, word] |= np.uint64(1 << 63)
        life.sign(place)
    life.run()
    assert life.cache.adopted.dropped == {"misplaced": 2}
    assert life.cache.adopted.kept_blocks == 1


@pytest.mark.parametrize("newer_first", [False, True])
@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_of_two_records_of_one_block_the_newer_one_counts(newer_first: bool, at_once: int) -> None:
    life = Life()
    space = open_space(life.cache)
    life.store(space, 0)
    life.store(space, 1)
    older = slot_of(space, key(1), 0) // PAGE
    content = life.table[older].copy()
    if newer_first:
        life.cache.clear_blocks(space, keys(0))
    life.cache.clear(sweep=0)
    life.store(open_space(life.cache), 1)
    newer = slot_of(life.space(), key(1), 0) // PAGE
    assert (newer < older) == newer_first
    life.table[0, COMMIT] *= newer_first  # the other block has gone
    content[TABLE] = life.table[newer, TABLE]  # as if it had not been cleared
    life.table[older] = content
    life.sign(older)
    life.cache = recorded_cache(life.words, life.pages, life.slab, at_once=at_once)
    check_integrity(life.cache)
    assert life.cache.adopted.dropped == {"duplicate": 1}
    assert life.sealed() == [newer]
    assert slot_of(life.space(), key(1), 0) == newer * PAGE


@pytest.mark.parametrize("hash_bytes", [16, 20, 32, 33, 64])
@pytest.mark.parametrize("blocks", [1, FEW, FEW + 1])
def test_hashes_of_every_width_are_kept(hash_bytes: int, blocks: int) -> None:
    life = Life()
    names = replace(namespace(), hash_bytes=hash_bytes)
    hashes = [random.Random(n).randbytes(hash_bytes) for n in range(blocks)]
    space = life.cache.open_space(names, 3, 1, 0, PAGE)
    life.cache.seal_all(begin(life.cache, space, hashes))
    slots = [slot_of(space, each, 0) for each in hashes]
    life.run()
    again = life.cache.find_space(names, 3)
    assert again is not None
    assert [slot_of(again, each, 0) for each in hashes] == slots


@pytest.mark.parametrize("draw_known", [False, True])
def test_blocks_with_chosen_hashes_are_kept_with_no_more_steps_than_others(
    draw_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They differ in the top bits of their words alone. And by whom the draw of the index is known: they all share a
    tag, which costs a bounded number of steps each."""
    count = 2000
    steps: list[int] = []
    for chosen in (False, True):
        life, rng = Life(2 * count, count), random.Random(1)
        words = [[rng.getrandbits(12) << 52 if chosen else rng.getrandbits(64) for _ in range(4)] for _ in range(count)]
        life.cache.seal_all(begin(life.cache, open_space(life.cache), [struct.pack("<4Q", *each) for each in words]))
        if chosen and draw_known:
            monkeypatch.setattr(BlockIndex, "_tags_of", lambda _, words: np.full(len(words), 1 << 31, np.uint32))
        again = partial(recorded_cache, life.words, life.pages, life.slab, at_once=count)
        steps.append(instructions_of(again))
        assert life.run().adopted.kept_blocks == count
    others, those = steps
    assert those < (others + 1000 * count if draw_known else 1.2 * others)


def test_beside_its_tables_a_take_over_has_a_slice_of_the_records_and_a_few_bytes_a_block() -> None:
    """It had all records several times: 1.6 GB for two million blocks. What the tables have is mapped, or grows in
    place."""
    count, at_once = 1 << 16, 1 << 10
    life = Life(count, count)
    space = open_space(life.cache)
    life.cache.seal_all(begin(life.cache, space, [random.Random(n).randbytes(32) for n in range(count)]))
    recorded_cache(life.words, life.pages, life.slab, at_once=at_once)  # what is made once
    tracemalloc.start()
    try:
        again = recorded_cache(life.words, life.pages, life.slab, at_once=at_once)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert again.adopted.kept_blocks == count
    assert peak - kept < 1000 * at_once + 30 * count + 40 * len(table_of(again).slots.grid)


def test_how_much_is_read_is_told() -> None:
    told: list[tuple[int, int]] = []

    class Told(Records):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.on_progress = lambda read, total: told.append((read, total))

    life = Life(100, 10)
    life.store(open_space(life.cache), *range(95))
    recorded_cache(life.words, life.pages, life.slab, Told, at_once=30)
    assert told == [(30, 100), (60, 100), (90, 100)]


def test_a_space_that_does_not_fit_is_used_and_forgotten() -> None:
    life = Life()
    long = Namespace("\x1f" * 1000, "bfloat16", "NHD", 16, 1, 1, "sha256")
    for each in (long, namespace("other")):
        life.cache.seal_all(begin(life.cache, life.cache.open_space(each, 0, 1, 0, PAGE), keys(1, 2)))
    kept = table_of(life.cache).records
    assert kept is not None
    assert kept.spaces_not_kept == 1
    for name in "abcd":  # one more than there are entries
        life.store(open_space(life.cache, name), 1)
    assert life.cache.stats().spaces_not_kept == kept.spaces_not_kept == 2
    life.run()
    assert [space.namespace.model for space in life.cache.spaces] == ["other", "a", "b", "c"][::-1]
    assert life.cache.adopted.dropped == {"no_space": 3}


def test_entries_of_spaces_that_are_gone_are_used_again() -> None:
    life = Life()
    for name in range(20):
        space = open_space(life.cache, str(name))
        life.store(space, 1)
        life.cache.clear(space.namespace)
        life.cache.close_space(space)
    kept = table_of(life.cache).records
    assert kept is not None
    assert kept.spaces_not_kept == 0


def test_a_checksum_is_of_one_seal() -> None:
    life = Life()
    kept = table_of(life.cache).records
    assert kept is not None
    for names in ([1], list(range(20))):
        space = open_space(life.cache)
        grant = begin(life.cache, space, keys(*names))
        life.cache.seal_all(grant)
        places = table_of(life.cache).slots.places(grant.parts[0].slots)
        assert kept.checksums(places)[1].tolist() == [False] * len(places)
        sums = np.arange(len(places), dtype=np.uint64) + np.uint64(1 << 63)
        kept.set_checksums(places, sums)
        read, known = kept.checksums(places)
        assert known.all()
        assert (read == sums).all()
        life.cache.clear()


@settings(max_examples=examples(40), deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 2 * FEW), st.booleans()), min_size=1, max_size=8))
def test_a_loop_over_a_few_writes_the_same_records(steps: list[tuple[int, int, bool]]) -> None:
    written = []
    for few in (0, FEW):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(records, "FEW", few)
            life = Life()
            for start, count, second in steps:
                space = open_space(life.cache, "two", shards=(1, 1)) if second else open_space(life.cache)
                life.store(space, *range(start, start + min(count, 10)))
            written.append(life.words)
    assert (written[0] == written[1]).all()


# -- damage ----------------------------------------------------------------------------------------------------------


def a_life() -> Life:
    life = Life()
    life.store(open_space(life.cache), *range(12))
    life.store(open_space(life.cache, "two", shards=(1, 2)), *range(3))
    return life


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_whatever_bits_flip_no_block_is_found_with_other_bytes(data: st.DataObject) -> None:
    life = a_life()
    used = life.words.nonzero()[0].tolist()
    anywhere = st.sampled_from(used) | st.integers(0, len(life.words) - 1)
    for word, bit in data.draw(st.lists(st.tuples(anywhere, st.integers(0, 63)), min_size=1, max_size=20)):
        life.words[word] ^= np.uint64(1 << bit)
    for _ in range(2):
        life.run()
        life.check()
        life.store(open_space(life.cache, "three", shards=(1,)), *range(50, 60))
        life.check()


ODD = st.sampled_from([0, 1, 2, 3, 5, 7, PAGE, 2 * PAGE, 1 << 31, 1 << 32, 2 << 32 | 1, 1 << 62, (1 << 64) - 1])


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_records_with_a_right_digest_that_make_no_sense_are_dropped(data: st.DataObject) -> None:
    life = a_life()
    sealed = life.sealed()
    fields = st.sampled_from([COMMIT, TABLE, SLOT, SIZE, HASH, HASH + 5, USED])
    changes = st.tuples(st.integers(0, len(life.table) - 1) | st.sampled_from(sealed), fields, ODD | st.none())
    for place, field, value in data.draw(st.lists(changes, min_size=1, max_size=12)):
        life.table[place, field] = life.table[sealed[0], field] if value is None else value
        life.sign(place)
    life.run()
    life.store(open_space(life.cache, "three"), *range(50, 60))
    life.run()


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.update(number=0),
        lambda entry: entry.update(number=1 << 31),
        lambda entry: entry.update(facts=b"[]"),
        lambda entry: entry.update(facts=b"{"),
        lambda entry: entry.update(facts=b"\xff"),
        lambda entry: entry.update(facts=entry["facts"].replace(b'"tp_size": 1', b'"tp_size": "1"')),
        lambda entry: entry.update(facts=entry["facts"].replace(b'"model": ', b'"modal": ')),
        lambda entry: entry.update(facts=entry["facts"].replace(b'"hash_bytes": 32', b'"hash_bytes": 320000')),
        lambda entry: entry.update(facts=entry["facts"].replace(b"[4096]", b"[]")),
        lambda entry: entry.update(facts=entry["facts"].replace(b"[4096]", b"[null]")),
        lambda entry: entry.update(facts=entry["facts"].replace(b"[4096]", b"[-4096]")),
        lambda entry: entry.update(facts=entry["facts"].replace(b"[4096]", b"[1" + b"0" * 30 + b"]")),
        lambda entry: entry.update(facts=entry["facts"].replace(b"[4096]", b"[409600]")),
        lambda entry: entry.update(facts=entry["facts"].replace(b"[4096]", b"[8192]")),
    ],
)
def test_a_space_entry_that_makes_no_sense_is_dropped(change: Callable[[dict[str, object]], None]) -> None:
    life = Life()
    life.store(open_space(life.cache), 1, 2)
    kept = table_of(life.cache).records
    assert kept is not None
    (at,) = kept._entries.values()
    _, number, length = kept._spaces[at, : records.ENTRY_HEAD].tolist()
    facts: dict[str, object] = {"number": number, "facts": kept._spaces[at, records.ENTRY_HEAD :].tobytes()[:length]}
    before = dict(facts)
    change(facts)
    assert facts != before
    number, text = facts["number"], facts["facts"]
    assert isinstance(number, int)
    assert isinstance(text, bytes)
    commit = kept._space_commits.item(at)
    crc = records.entry_crc(commit, number, text)
    kept._spaces[at, : records.ENTRY_HEAD] = (crc, number, len(text))
    words = np.frombuffer(text.ljust(-(-len(text) // 8) * 8, b"\0"), np.uint64)
    kept._spaces[at, records.ENTRY_HEAD : records.ENTRY_HEAD + len(words)] = words
    life.run()
    assert life.cache.spaces == []
    assert sum(life.cache.adopted.dropped.values()) == 2
    assert not life.sealed()


def test_no_room_is_made_for_more_shards_than_a_block_may_have() -> None:
    """A pool that an earlier version kept may say so."""
    many = [PAGE] * MAX_SHARDS
    assert (records._is_space(namespace(), 0, many), records._is_space(namespace(), 0, [*many, PAGE])) == (True, False)


def test_a_bit_that_flips_and_flips_back_does_not_bring_a_record_back() -> None:
    life = Life()
    life.store(open_space(life.cache), 1, 2)
    place = life.sealed()[0]
    for _ in range(2):
        life.table[place, COMMIT] ^= np.uint64(1)
        life.run()
        assert life.cache.adopted.dropped == {"damaged": 1}
        assert life.check() == 1


def test_a_slab_whose_size_class_is_damaged_loses_its_blocks_and_no_others() -> None:
    life = Life()
    life.store(open_space(life.cache), *range(12))
    kept = table_of(life.cache).records
    assert kept is not None
    words = kept._slabs[:, :8].copy()
    kept._slabs[2, 3] = 12345
    life.run()
    assert life.cache.adopted.dropped == {"damaged": 8}
    assert life.check() == 4
    kept._slabs[:, :8] = words
    life.run()
    assert life.check() == 4, "records that were lost have come back"
    life.store(open_space(life.cache, "two", shards=(2,)), 50, 51, 52, 53)
    life.run()
    assert life.check() == 8


def test_other_memory_than_that_of_this_pool_is_no_table() -> None:
    life = a_life()
    with pytest.raises(AssertionError, match="another pool"):
        BlockCache(
            SlotAllocator(30 * PAGE, SLAB * PAGE), records=Records(life.words, PAGES * PAGE, SLAB * PAGE, NUM_SPACES)
        )


def test_of_a_slab_that_was_cut_anew_in_part_nothing_is_read() -> None:
    kept = Records(np.zeros(words_for(PAGES, SLAB), np.uint64), PAGES * PAGE, SLAB * PAGE, NUM_SPACES)
    kept.cut(0, 8, PAGE)
    kept.cut(8, 16, PAGE)
    kept.cut(6, 9, 3 * PAGE)
    assert kept._slabs.any(axis=0).nonzero()[0].tolist() == [6, 7, 8]
    slabs, lost = kept.find_slabs()
    assert ([column.tolist() for column in slabs], lost) == ([[6], [9], [3 * PAGE]], 0)


@pytest.mark.parametrize("seed", range(20))
def test_slabs_are_read_in_slices_as_all_at_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(records, "UNITS_READ", rng.choice((1, 3, 7, 1000)))
    kept = Records(np.zeros(words_for(60, 60), np.uint64), 60 * PAGE, 60 * PAGE, NUM_SPACES)
    for _ in range(rng.randrange(40)):
        start = rng.randrange(60)
        kept.cut(start, min(60, start + rng.randrange(1, 9)), PAGE * rng.randrange(1, 3))
    for _ in range(rng.choice((0, 0, 1, 4))):
        kept._slabs[rng.randrange(3), rng.randrange(60)] ^= np.uint64(1 << rng.randrange(64))
    said = [tuple(unit) for unit in kept._slabs.T.tolist()]
    sound, covered = [], set()
    for unit, words in enumerate(said):
        head, length, size = (word & 0xFFFFFFFF for word in words)
        whole = all(word >> 32 == ~word & 0xFFFFFFFF for word in words)
        if whole and head == unit and length and size and said[unit : unit + length] == [words] * length:
            sound.append((head, head + length, size * PAGE))
            covered.update(range(head, head + length))
    found, damaged = kept._read_slabs()
    assert list(zip(*(column.tolist() for column in found), strict=True)) == sound
    assert damaged == [unit for unit, words in enumerate(said) if any(words) and unit not in covered]


def test_to_read_very_many_slabs_takes_few_bytes_for_each_unit() -> None:
    """It took 108, and 120 for each slab: 113 MB and as much again for a million units."""
    pages = 1 << 17
    kept = Records(np.zeros(words_for(pages, pages), np.uint64), pages * PAGE, pages * PAGE, NUM_SPACES)
    units = len(kept.grid)
    for start in range(0, units, 4):
        kept.cut(start, start + 4, PAGE)
    places: list[int] = []
    kept.take_room = lambda first, count: places.append(first) if len(places) < 10 else None
    tracemalloc.start()
    try:
        kept.have_room_for_kept()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(places) == 10
    assert peak < 50 * units
