from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from kvsidecar.integrations.stored_filter import StoredFilter, tags_of
from kvsidecar.integrations.vllm.groups import Group, GroupKind
from kvsidecar.integrations.vllm.selection import (
    Candidates,
    Selection,
    block_range,
    choose,
    default_watermark,
    walk,
)
from tests.integrations.engine import TinyPool, chain, full, group


def keys_of(of: Group, hashes: Sequence[bytes]) -> list[bytes]:
    return [each + of.index.to_bytes(4, "big") for each in hashes]


def know(stored_filter: StoredFilter, of: Group, hashes: Sequence[bytes]) -> None:
    stored_filter.add(tags_of(of.index, b"".join(hashes), len(hashes)))


def candidates(hashes: Sequence[bytes], table: Sequence[Any] = ()) -> Candidates:
    found = Candidates()
    found.add(None, 0, hashes, table)
    return found


def chosen(
    pool: TinyPool, stored_filter: StoredFilter, of: Group, of_step: Candidates, unwritten: Collection[int] = ()
) -> tuple[list[bytes], list[Any], list[int]]:
    """Hashes and blocks, of which the packed form names both, and places."""
    found = choose(pool, stored_filter, of, of_step, unwritten)
    if found is None:
        return [], [], []
    assert found.packed.group == of.index
    assert found.packed.ids() == [block.block_id for block in found.blocks]
    return found.packed.split(), found.blocks, list(found.places)


def test_what_the_gpu_has_and_is_not_known_is_chosen() -> None:
    pool, stored_filter, hashes = TinyPool(8), StoredFilter(), chain(range(16))
    blocks = pool.take(3)
    for block, key in zip(blocks, keys_of(full(2), hashes), strict=False):
        pool.cache(block, key)
    know(stored_filter, full(2), hashes[:1])
    assert chosen(pool, stored_filter, full(2), candidates(hashes)) == (hashes[1:3], blocks[1:], [1, 2])
    assert chosen(pool, stored_filter, full(1), candidates(hashes)) == ([], [], [])
    assert chosen(pool, stored_filter, full(2), candidates(hashes), [blocks[1].block_id]) == (
        hashes[2:3],
        blocks[2:],
        [2],
    )
    know(stored_filter, full(2), hashes)
    assert chosen(pool, stored_filter, full(2), candidates(hashes)) == ([], [], [])


@pytest.mark.parametrize(
    "table",
    [[0, 1, 2], [0, 1], [], [2, 1, 0], [0, 3, 2], [0, 4, 2]],
    ids=["right", "short", "none", "shuffled", "a block that is not cached", "the same hash in another group"],
)
def test_a_table_says_where_to_look_and_the_gpus_cache_what_is_there(table: list[int]) -> None:
    pool, stored_filter, hashes = TinyPool(8), StoredFilter(), chain(range(12))
    blocks = pool.take(5)
    for block, key in zip(blocks, [*keys_of(full(1), hashes), None, *keys_of(full(0), hashes[1:2])], strict=True):
        if key is not None:
            pool.cache(block, key)
    found = chosen(pool, stored_filter, full(1), candidates(hashes, [blocks[i] for i in table]))
    assert found == (hashes, blocks[:3], [0, 1, 2])


def test_what_the_walk_has_found_is_not_asked_for_again() -> None:
    pool, stored_filter, hashes = TinyPool(8), StoredFilter(), chain(range(12))
    blocks = pool.take(3)
    for block, key in zip(blocks, keys_of(full(), hashes), strict=True):
        pool.cache(block, key)
    know(stored_filter, full(), hashes[1:2])
    assert chosen(pool, stored_filter, full(), candidates(hashes, blocks))[2] == [0, 2]
    assert chosen(pool, stored_filter, full(), Candidates(hashes, blocks))[2] == [0, 1, 2]


def test_a_block_of_the_table_is_taken_rather_than_another_one_with_its_content() -> None:
    pool, hashes = TinyPool(8), chain(range(4))
    blocks = pool.take(2)
    for block in blocks:
        pool.cache(block, keys_of(full(), hashes)[0])
    assert chosen(pool, StoredFilter(), full(), candidates(hashes, blocks[1:])) == (hashes, blocks[1:], [0])


def test_what_two_requests_of_a_step_have_in_common_is_chosen_once() -> None:
    pool, stored_filter = TinyPool(16), StoredFilter()
    one, other = chain([1] * 8 + [2] * 4), chain([1] * 8 + [3] * 8)
    tables, of_step = [pool.take(len(one)), pool.take(len(other))], Candidates()
    for hashes, table in zip((one, other), tables, strict=True):
        for block, key in zip(table, keys_of(full(), hashes), strict=True):
            pool.cache(block, key)
        of_step.add(None, 0, hashes, table)
    assert chosen(pool, stored_filter, full(), of_step) == (one + other[2:], tables[0] + tables[1][2:], [0, 1, 2, 5, 6])
    know(stored_filter, full(), one[:1])
    assert chosen(pool, stored_filter, full(), of_step) == (
        one[1:] + other[2:],
        tables[0][1:] + tables[1][2:],
        [1, 2, 5, 6],
    )


def test_what_was_selected_last_is_evicted_first() -> None:
    pool, selection, request = TinyPool(8), Selection(), chain(range(16))
    blocks = pool.take(4)
    for block, key in zip(blocks, keys_of(full(), request), strict=True):
        pool.cache(block, key)
    for part in (slice(0, 2), slice(2, 4)):
        found = choose(pool, StoredFilter(), full(), candidates(request[part], blocks[part]), ())
        assert found is not None
        selection.add(found, ())
    assert list(selection) == blocks
    assert selection.in_order_of_eviction() == blocks[::-1]


def test_a_draft_head_stores_the_block_behind_the_aligned_end_too() -> None:
    assert block_range(group(0, GroupKind.FULL, 4, alignment=8), 0, 8, 12) == range(2)
    assert block_range(group(0, GroupKind.FULL, 4, alignment=8, eagle=True), 0, 8, 12) == range(3)
    assert block_range(group(0, GroupKind.FULL, 4, alignment=8, eagle=True), 8, 16, 16) == range(2, 4)


def test_the_walk_takes_blocks_of_offloaded_groups_each_content_once_and_no_part_of_a_block() -> None:
    pool, groups, hashes = TinyPool(12), {0: full(0), 1: full(1)}, chain(range(40))
    blocks = pool.take(7)
    first, second, third = keys_of(groups[0], hashes[:3])
    for block, key in zip(
        blocks,
        [first, first, *keys_of(full(5), hashes[:1]), *keys_of(groups[1], hashes[:1]), second, third],
        strict=False,
    ):
        pool.cache(block, key)
    blocks[4].block_hash_num_tokens = 6  # type: ignore[attr-defined]  # cached by the first half of it
    pool.free_blocks(blocks)
    stored_filter = StoredFilter()
    know(stored_filter, groups[0], [hashes[2]])
    found = walk(pool, stored_filter, groups, 12)
    assert [(index, each) for index, each, _ in found] == [(0, hashes[0]), (1, hashes[0])]
    assert [block.block_hash for _, _, block in found] == [first, keys_of(groups[1], hashes[:1])[0]]
    # Those that are not cached, or were never used, come first.
    assert walk(pool, stored_filter, groups, pool.num_free - 6) == []


def test_the_watermark_is_twice_what_a_step_can_need() -> None:
    groups = [full(0, 16), group(1, GroupKind.SLIDING_WINDOW, 16, window=100), group(2, GroupKind.STATE, 16)]
    assert default_watermark(groups, 8192) == 2 * (512 + 8 + 2)
