from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given

from kvsidecar.integrations.vllm.groups import Group, GroupKind
from kvsidecar.integrations.vllm.hits import limit, longest_hit, lookup_range, needed
from tests.integrations.engine import cases, full


def brute_force(groups: Sequence[Group], found: Mapping[int, Sequence[bool]], local: int, most: int) -> int:
    """For every length, from the longest: does each group have each token's block that attention reads behind it?"""
    for hit in range(most, 0, -1):
        if hit % groups[0].alignment == 0 and all(can_go_on(each, found[each.index], local, hit) for each in groups):
            return hit
    return 0


def can_go_on(each: Group, flags: Sequence[bool], local: int, hit: int) -> bool:
    tokens = local + hit
    if each.kind is GroupKind.FULL:
        read = set(range(tokens))
    elif each.kind is GroupKind.SLIDING_WINDOW:
        read = set(range(max(0, tokens - each.window + 1), tokens))
    elif each.kind is GroupKind.CHUNKED_LOCAL:
        read = {token for token in range(tokens) if token // each.window == tokens // each.window}
    else:
        read = {tokens - 1}
    blocks = {token // each.block_tokens for token in read}
    if each.eagle:
        blocks.add(tokens // each.block_tokens)
    first = local // each.block_tokens
    return all(block < first or (block - first < len(flags) and flags[block - first]) for block in blocks)


@given(cases())
def test_the_hit_is_the_longest_that_brute_force_finds(
    case: tuple[list[Group], dict[int, list[bool]], int, int],
) -> None:
    groups, found, local, most = case
    assert longest_hit(groups, found, local, most) == brute_force(groups, found, local, most)


@given(cases())
def test_what_a_hit_needs_is_enough_for_it_and_no_block_is_too_much(
    case: tuple[list[Group], dict[int, list[bool]], int, int],
) -> None:
    groups, found, local, most = case
    hit = longest_hit(groups, {index: [True] * len(each) for index, each in found.items()}, local, most)
    flags = {index: each[: len(found[index])] for index, each in needed(groups, hit, local, most).items()}
    if not hit:
        assert not any(any(each) for each in flags.values())
        return
    assert all(can_go_on(each, flags[each.index], local, hit) for each in groups)
    for each in groups:
        for i in [i for i, flag in enumerate(flags[each.index]) if flag]:
            without = [flag and at != i for at, flag in enumerate(flags[each.index])]
            assert not can_go_on(each, without, local, hit)


def test_the_last_token_is_always_computed() -> None:
    assert limit([full()], 8, 0) == 4
    assert limit([full()], 9, 0) == 8
    assert limit([full()], 4, 4) == 0


def test_a_draft_head_asks_for_one_more_block_and_drops_it() -> None:
    eagle = full(eagle=True)
    assert lookup_range(eagle, 0, 8) == range(3)
    assert longest_hit([eagle], {0: [True, True, True]}, 0, 8) == 8
    assert longest_hit([eagle], {0: [True, True]}, 0, 8) == 4
