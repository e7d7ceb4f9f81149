from __future__ import annotations

from kvsidecar.integrations.vllm.groups import Kind
from kvsidecar.integrations.vllm.storing import Known, block_range, default_watermark, keys_of, select, walk
from tests.integrations.engine import TinyPool, chain, full, group


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(4, "big") for number in numbers]


def test_known_forgets_the_half_that_was_added_first() -> None:
    known = Known(capacity=3)
    known.add(keys(1, 2, 3))
    known.add(keys(4))
    assert known.unknown(keys(1, 4, 5)) == keys(5)
    known.add(keys(5, 6, 7, 8))

    assert known.unknown(keys(1, 2, 3, 4, 5, 8)) == keys(1, 2, 3, 4)


def test_known_says_which_of_those_that_it_forgets_it_knew() -> None:
    known = Known()
    known.add(keys(1, 2))

    assert known.discard(keys(2, 3)) == keys(2)
    assert keys(2)[0] not in known
    assert keys(1)[0] in known


def test_what_the_gpu_has_and_is_not_known_is_selected() -> None:
    pool, known, hashes = TinyPool(8), Known(), chain(range(16))
    blocks = pool.take(3)
    for block, key in zip(blocks, keys_of(full(2), hashes), strict=False):
        pool.cache(block, key)
    known.add(keys_of(full(2), hashes[:1]))

    assert select(pool, known, full(2), hashes) == (keys_of(full(2), hashes[1:3]), blocks[1:])
    assert select(pool, known, full(1), hashes) == ([], [])


def test_a_draft_head_stores_the_block_behind_the_aligned_end_too() -> None:
    assert block_range(group(0, Kind.FULL, 4, alignment=8), 0, 8, 12) == range(2)
    assert block_range(group(0, Kind.FULL, 4, alignment=8, eagle=True), 0, 8, 12) == range(3)
    assert block_range(group(0, Kind.FULL, 4, alignment=8, eagle=True), 8, 16, 16) == range(2, 4)


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
    known = Known()
    known.add([third])

    found = walk(pool, known, groups, 12)

    assert [key for key, _ in found] == [first, keys_of(groups[1], hashes[:1])[0]]
    assert {block.block_hash for _, block in found} == {key for key, _ in found}
    # Those that are not cached, or were never used, come first.
    assert walk(pool, known, groups, pool.num_free - 6) == []


def test_the_watermark_is_twice_what_a_step_can_need() -> None:
    groups = [full(0, 16), group(1, Kind.SLIDING_WINDOW, 16, window=100), group(2, Kind.STATE, 16)]

    assert default_watermark(groups, 8192) == 2 * (512 + 8 + 2)
