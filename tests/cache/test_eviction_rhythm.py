"""The eviction policy ``rhythm``."""

from __future__ import annotations

import bisect
import random
from collections.abc import Iterator
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsidecar.cache.arrays import Ints
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.eviction_rhythm import (
    ANNOUNCED,
    ANNOUNCED_CLASSES,
    CLASSES,
    FIRST_GAP,
    LATE_POOLS,
    MOST_GAP,
    STEPS,
    TRY_AGAIN,
    Rhythm,
    announced_gap,
    class_of,
    in_order,
)
from kvsidecar.cache.shares import ShareLimits
from kvsidecar.cache.space_blocks import Space
from kvsidecar.cache.use_times import UseTimes
from kvsidecar.errors import Refusal
from kvsidecar.types import Eviction, LookupMode, Priority
from tests.cache.integrity import check_integrity
from tests.cache.support import (
    find,
    instructions_of,
    key,
    keys,
    limits,
    names_readable,
    new_cache,
    one_space,
    open_space,
    store,
    table_of,
)
from tests.marks import examples, long


def rhythmic(pool: int, slab: int | None = None) -> BlockCache:
    """The order is never that of LRU, whatever LRU would hit."""
    cache = new_cache(pool, slab, eviction=Eviction.RHYTHM)
    rhythm = table_of(cache).rhythm
    assert rhythm is not None
    rhythm.count(0, 0, 1, LATE_POOLS)
    rhythm.count = lambda *_: None  # type: ignore[method-assign]
    return cache


def rhythmic_space(pool: int) -> tuple[BlockCache, Space]:
    cache = rhythmic(pool)
    return cache, open_space(cache)


def use(cache: BlockCache, space: Space, now: float, *names: int | str) -> int:
    """What a request does: it looks up and leases what is there. Returns how many of the first are."""
    cache.expire(now)
    lease, (hits,) = cache.lookup_and_lease([(space, keys(*names))], LookupMode.PREFIX, now, 60.0, "o")
    if lease is not None:
        cache.release(lease.id)
    return sum(hits)


def store_at(cache: BlockCache, space: Space, now: float, *names: int | str) -> None:
    cache.expire(now)
    store(cache, space, *names)


def gap_of(space: Space, name: int | str) -> float:
    """Seconds."""
    (block,) = keys(name)
    row = find(space, block)
    assert row is not None
    return float(2.0 ** (space.blocks.gaps[row] / STEPS))


def cache_gaps(space: Space, *names: int | str) -> list[int]:
    """As they are kept."""
    gaps: list[int] = space.blocks.gaps[space.blocks.index.find(space.blocks.index.keys(keys(*names)))].tolist()
    return gaps


# -- the gaps of blocks ----------------------------------------------------------------------------------------------


def test_a_gap_moves_towards_the_time_between_uses_by_an_octave_at_most() -> None:
    cache, space = rhythmic_space(8)
    store_at(cache, space, 0.0, "a")
    assert gap_of(space, "a") == pytest.approx(10, rel=0.1)
    seen = []
    for turn in range(1, 9):
        use(cache, space, 240.0 * turn, "a")
        seen.append(gap_of(space, "a"))
    assert seen[:5] == pytest.approx([20, 40, 80, 160, 240], rel=0.1)
    assert seen[-1] == pytest.approx(240, rel=0.1)
    use(cache, space, 240.0 * 8 + 4, "a")
    assert gap_of(space, "a") == pytest.approx(120, rel=0.1), "one short pause"


def test_uses_within_a_second_are_one() -> None:
    cache, space = rhythmic_space(8)
    store_at(cache, space, 100.0, "a")
    use(cache, space, 400.0, "a")
    before = gap_of(space, "a")
    for step in range(1, 5):
        use(cache, space, 400.0 + step / 5, "a")
    assert gap_of(space, "a") == before


def test_gaps_have_bounds() -> None:
    cache, space = rhythmic_space(8)
    store_at(cache, space, 0.0, "a")
    now = 0.0
    for _ in range(40):
        now += 1e7
        use(cache, space, now, "a")
    (row,) = space.blocks.index.find(space.blocks.index.keys(keys("a")))
    assert space.blocks.gaps[row] == MOST_GAP
    assert class_of(np.array([MOST_GAP], np.uint8)).item() == CLASSES - 1
    for _ in range(200):
        now += 1.5
        use(cache, space, now, "a")
    assert gap_of(space, "a") == pytest.approx(1, abs=1.5)
    check_integrity(cache)


def test_without_a_clock_nothing_takes_the_place_of_what_is_there() -> None:
    cache, space = rhythmic_space(2)
    store(cache, space, "a", "b")
    assert not admitted(cache, space, "c")
    assert names_readable(cache, space, *"abc") == ["a", "b"]


# -- the order -------------------------------------------------------------------------------------------------------


def two_rhythms(cache: BlockCache, space: Space) -> float:
    """``fast`` is used every 10 seconds and ``slow`` every 160. Returns the time of the last use, of ``slow``."""
    store_at(cache, space, 0.0, "fast")
    store_at(cache, space, 0.0, "slow")
    for now in range(10, 1610, 10):
        use(cache, space, float(now), "fast")
        if now % 160 == 0:
            use(cache, space, float(now), "slow")
    return 1600.0


def test_what_returns_sooner_stays() -> None:
    cache, space = rhythmic_space(2)
    now = two_rhythms(cache, space)
    store_at(cache, space, now + 5, "new")
    assert names_readable(cache, space, "fast", "slow", "new") == ["fast", "new"]


def test_what_does_not_return_as_usual_goes() -> None:
    cache, space = rhythmic_space(2)
    now = two_rhythms(cache, space)
    use(cache, space, now + 160, "slow")
    store_at(cache, space, now + 300, "new")  # 300 seconds without "fast", 140 without "slow"
    assert names_readable(cache, space, "fast", "slow", "new") == ["slow", "new"]


def test_a_chain_loses_its_tail_first_though_its_head_has_another_rhythm() -> None:
    cache, space = rhythmic_space(3)
    store_at(cache, space, 0.0, "head", "middle", "tail")
    for now in range(5, 200, 5):
        use(cache, space, float(now), "head")
    use(cache, space, 200.0, "head", "middle", "tail")
    for now, left in ((2000, ["head", "middle"]), (2001, ["head"])):
        store_at(cache, space, float(now), now)
        assert names_readable(cache, space, "head", "middle", "tail") == left


def test_a_lower_priority_goes_first_whatever_the_rhythm() -> None:
    cache, space = rhythmic_space(2)
    now = two_rhythms(cache, space)
    cache.clear_blocks(space, keys("fast"))
    grant = cache.begin_store([(space, 0, keys("fast"))], priority=Priority.LOW)
    assert not isinstance(grant, Refusal)
    cache.seal_all(grant)
    store_at(cache, space, now + 5, "new")
    assert names_readable(cache, space, "fast", "slow", "new") == ["slow", "new"]
    check_integrity(cache)


def test_the_groups_of_a_request_lose_their_blocks_in_turns() -> None:
    cache = rhythmic(6)
    one, two = open_space(cache, group=0), open_space(cache, group=1)
    cache.expire(0.0)
    grant = cache.begin_store([(one, 0, keys(*"abc")), (two, 0, keys(*"abc"))])
    assert not isinstance(grant, Refusal)
    cache.seal_all(grant)
    other = open_space(cache, "other")
    for now, left in ((100.0, ["a", "b"]), (200.0, ["a"]), (300.0, [])):
        store_at(cache, other, now, f"{left}0", f"{left}1")
        assert names_readable(cache, one, *"abc") == names_readable(cache, two, *"abc") == left


def test_the_rhythm_counts_across_namespaces() -> None:
    cache = rhythmic(2)
    one, two = open_space(cache, "one"), open_space(cache, "two")
    store_at(cache, one, 0.0, "slow")
    store_at(cache, two, 0.0, "fast")
    for now in range(10, 970, 10):
        use(cache, two, float(now), "fast")
        if now % 160 == 0:
            use(cache, one, float(now), "slow")
    third = open_space(cache, "three")
    use(cache, one, 970.0, "slow")  # the youngest
    store_at(cache, third, 972.0, "new")
    assert names_readable(cache, two, "fast") == ["fast"]
    assert not names_readable(cache, one, "slow")
    check_integrity(cache)


def test_a_share_keeps_its_guarantee_and_gives_by_rhythm() -> None:
    cache = rhythmic(4)
    cache.set_shares(limits(a=(3, None), b=(0, None)))
    a, b = open_space(cache, "a"), open_space(cache, "b")
    now = two_rhythms(cache, a)
    store_at(cache, b, now, "x")
    store_at(cache, b, now, "y")
    store_at(cache, b, now + 40, "z")  # a has its guarantee
    assert names_readable(cache, a, "fast", "slow") == ["fast", "slow"]
    store_at(cache, a, now + 41, "new")  # b has borrowed
    assert names_readable(cache, a, "fast", "slow", "new") == ["fast", "slow", "new"]
    check_integrity(cache)


def test_what_nobody_uses_expires_though_others_go_before_it() -> None:
    cache, space = rhythmic_space(4)
    store_at(cache, space, 0.0, "slow")
    day = 86400.0
    for number in range(1, 15):
        use(cache, space, number * day, "slow")
    cache.set_shares([ShareLimits("a", lambda _: True, idle_ttl=300.0)])
    store_at(cache, space, 14 * day + 1, "once")
    for second in range(2, 400):
        cache.expire(14 * day + second)
        if second == 200:
            use(cache, space, 14 * day + 200, "slow")
    assert next(space.blocks.candidates())[0] == find(space, keys("slow")[0]), "it has the longest gap"
    while cache.sweep():
        pass
    assert names_readable(cache, space, "slow", "once") == ["slow"]
    assert cache.stats().expired_blocks == 1


def test_a_shrunk_table_keeps_the_gaps() -> None:
    cache, space = rhythmic_space(4000)
    now = two_rhythms(cache, space)
    store_at(cache, space, now, *range(3000))
    cache.clear_blocks(space, keys(*range(3000)))
    before = [gap_of(space, name) for name in ("fast", "slow")]
    rebuilds = space.blocks.rebuilds
    while cache.sweep():
        pass
    assert space.blocks.rebuilds > rebuilds
    assert [gap_of(space, name) for name in ("fast", "slow")] == before
    check_integrity(cache)


@settings(max_examples=examples(200), deadline=None)
@given(
    blocks=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12)), max_size=60),
    horizons=st.lists(st.integers(-1, 13), min_size=5, max_size=5),
    piece=st.integers(1, 5),
    earlier=st.lists(st.integers(0, 3), min_size=5, max_size=5),
)
def test_the_classes_are_merged_by_rank_then_use_then_longest_gap(
    blocks: list[tuple[int, int]], horizons: list[int], piece: int, earlier: list[int]
) -> None:
    horizons.sort(reverse=True)  # the longer the gap, the earlier
    last_used = np.array([used for _, used in blocks], np.int64)

    def stream(rows: list[int]) -> Iterator[Ints]:
        for at in range(0, len(rows), piece):
            yield np.array(rows[at : at + piece], np.int64)

    def of_class(number: int) -> list[int]:
        return sorted((row for row, (each, _) in enumerate(blocks) if each == number), key=lambda row: blocks[row][1])

    def bound(number: int) -> int:
        return min([used for each, used in blocks if each == number], default=9) - earlier[number]

    found = in_order([(stream(of_class(each)), horizons[each], each, bound(each)) for each in range(5)], last_used)
    order = [row for rows in found for row in rows.tolist()]
    rank = [(min(used, horizons[each]), used, -each, row) for row, (each, used) in enumerate(blocks)]
    assert order == sorted(range(len(blocks)), key=lambda row: rank[row])


# -- what new blocks inherit -----------------------------------------------------------------------------------------


def test_new_blocks_inherit_the_gap_of_the_deepest_hit() -> None:
    cache, space = rhythmic_space(16)
    store_at(cache, space, 0.0, "a", "b")
    for now in range(4, 60, 4):
        use(cache, space, float(now), "a", "b", "c", "d")
    known = gap_of(space, "b")
    assert known == pytest.approx(4, rel=0.2)
    store(cache, space, "c")
    store(cache, space, "d", "e")  # "e" is of the answer: no lookup named it
    store(cache, space, "x")
    assert [gap_of(space, name) for name in "cde"] == [known] * 3
    assert gap_of(space, "x") == pytest.approx(10, rel=0.1)
    store(cache, space, "b", "y")  # what it follows is there already
    assert gap_of(space, "y") == known
    check_integrity(cache)


def test_all_blocks_of_a_prompt_inherit_the_same_wherever_it_has_holes() -> None:
    cache, space = rhythmic_space(16)
    store_at(cache, space, 0.0, "a", "c")
    for now in range(4, 60, 4):
        use(cache, space, float(now), "a")
    cache.expire(60.0)
    granted, _ = cache.lookup_and_lease([(space, keys(*"zabcd"))], LookupMode.BITMAP, 60.0, 5.0, "o")
    assert granted is not None
    store(cache, space, "z", "b", "d")
    assert gap_of(space, "a") < 5 < gap_of(space, "c")
    assert [gap_of(space, name) for name in "zbd"] == [gap_of(space, "c")] * 3


def test_a_session_that_lost_its_blocks_comes_back_with_its_rhythm() -> None:
    cache, space = rhythmic_space(16)
    store_at(cache, space, 0.0, "a", "b")
    for now in range(160, 1610, 160):
        use(cache, space, float(now), "a", "b")
    cache.clear_blocks(space, keys("a", "b"))
    use(cache, space, 1760.0, "a", "b", "c")
    store(cache, space, "a", "b")
    store(cache, space, "c")
    assert [gap_of(space, name) for name in "abc"] == pytest.approx([160] * 3, rel=0.1)


def test_a_session_of_which_nothing_was_ever_stored_has_a_rhythm() -> None:
    """From the end of a request to the next one: how long it takes itself does not count."""
    cache, space = rhythmic_space(16)
    for now in range(0, 1610, 160):
        use(cache, space, float(now), "a", "b")
        cache.expire(now + 40.0)
        cache.touch([(space, keys("a", "b", "its answer"))])
    store(cache, space, "its answer", "what follows")
    assert gap_of(space, "what follows") == pytest.approx(120, rel=0.1)


def test_a_session_that_the_engine_itself_had_has_a_rhythm() -> None:
    """It is not looked up, but touched when it has ended."""
    cache, space = rhythmic_space(16)
    for now in range(0, 1610, 160):
        cache.expire(float(now))
        cache.touch([(space, keys("a", "b"))])
    store(cache, space, "b", "c")
    assert gap_of(space, "c") == pytest.approx(160, rel=0.1)


def test_a_touch_in_parts_is_one_use() -> None:
    """The last part comes first: what is touched later is evicted later."""
    cache, space = rhythmic_space(16)
    cache.touch([(space, keys(*"abcd"))])
    for now in range(160, 1610, 160):
        for second, part in enumerate(("cd", "ab")):
            cache.expire(now + 2.0 * second)
            cache.touch([(space, keys(*part))])
    store(cache, space, "d", "e")
    assert gap_of(space, "e") == pytest.approx(160, rel=0.1)


def test_a_prompt_inherits_nothing_from_one_with_the_same_beginning() -> None:
    """Instructions that many prompts share are used often: that says nothing about any of these."""
    cache, space = rhythmic_space(64)
    store_at(cache, space, 0.0, "instructions")
    for now in range(2, 40, 2):
        use(cache, space, float(now), "instructions", f"question {now}")
        store(cache, space, f"question {now}")
    assert gap_of(space, "instructions") < 4
    assert gap_of(space, "question 38") == pytest.approx(10, rel=0.1)


def test_a_request_that_waits_and_is_looked_up_again_has_no_other_rhythm() -> None:
    cache, space = rhythmic_space(16)
    for now in range(0, 1610, 160):
        use(cache, space, float(now), "a", "b")
        cache.touch([(space, keys("a", "b"))])
    for second in range(0, 40, 2):
        use(cache, space, 1760.0 + second, "a", "b")
    store(cache, space, "a")
    assert gap_of(space, "a") == pytest.approx(160, rel=0.1)


# -- announced pauses ------------------------------------------------------------------------------------------------


def tell(cache: BlockCache, space: Space, now: float, pause: float, *names: int | str) -> None:
    cache.expire(now)
    cache.touch([(space, keys(*names))], pause)


def ended(cache: BlockCache, space: Space, pauses: dict[str, float]) -> None:
    """Prompts of one block each, used one after the other until second 100, with what is said of them then."""
    for name in pauses:
        store_at(cache, space, 0.0, name)
    for name, pause in pauses.items():
        use(cache, space, 100.0, name)
        tell(cache, space, 100.0, pause, name)


def test_what_will_not_be_used_again_goes_first_though_it_was_used_last() -> None:
    cache, space = rhythmic_space(3)
    ended(cache, space, {"a": 0.0, "b": 3000.0, "over": inf})
    store_at(cache, space, 101.0, "new")
    assert names_readable(cache, space, "a", "b", "over", "new") == ["a", "b", "new"]


def test_what_pauses_for_long_goes_before_what_returns_soon() -> None:
    cache, space = rhythmic_space(4)
    ended(cache, space, {"tool": 5.0, "person": 300.0, "usual": 0.0, "tool 2": 5.0})
    store_at(cache, space, 500.0, "new")
    assert names_readable(cache, space, "tool", "person", "usual", "tool 2") == ["person", "usual", "tool 2"]
    cache, space = rhythmic_space(3)
    ended(cache, space, {"tool": 5.0, "person": 300.0, "tool 2": 5.0})
    store_at(cache, space, 125.0, "new")
    assert names_readable(cache, space, "tool", "person", "tool 2", "new") == ["tool", "tool 2", "new"]


def test_what_is_told_holds_until_the_next_use() -> None:
    cache, space = rhythmic_space(8)
    store_at(cache, space, 0.0, "a", "b")
    for turn in range(1, 9):
        use(cache, space, 40.0 * turn, "a", "b")
    tell(cache, space, 320.0, inf, "a", "b")
    assert cache_gaps(space, "a", "b") == [announced_gap(inf)] * 2
    use(cache, space, 360.0, "a", "b")
    assert gap_of(space, "a") == gap_of(space, "b") == pytest.approx(40, rel=0.1)
    tell(cache, space, 361.0, 5.0, "a", "b")
    assert cache_gaps(space, "a", "b") == [announced_gap(5.0)] * 2
    tell(cache, space, 361.5, 0.0, "a", "b")
    assert gap_of(space, "a") == gap_of(space, "b") == pytest.approx(40, rel=0.1), "nobody says"
    check_integrity(cache)


def test_what_is_loaded_without_a_lookup_was_told_nothing() -> None:
    cache, space = rhythmic_space(8)
    store_at(cache, space, 0.0, "a")
    tell(cache, space, 5.0, inf, "a")
    cache.expire(9.0)
    grant = cache.begin_load([(space, 0, keys("a"))], None, 9.0)
    assert not isinstance(grant, Refusal)
    cache.end_load(grant)
    assert cache_gaps(space, "a")[0] < ANNOUNCED


def two_prompts(*times: float) -> tuple[BlockCache, Space]:
    """Prompts "p" and "q" with common instructions, used at these times."""
    cache, space = rhythmic_space(8)
    for now, prompt in zip(times, "pq", strict=True):
        use(cache, space, now, "instructions", prompt)
        store_at(cache, space, now, "instructions", prompt)
    return cache, space


def test_blocks_that_other_prompts_have_too_do_not_go_with_one() -> None:
    cache, space = two_prompts(0.0, 0.0)
    use(cache, space, 10.0, "instructions", "p")
    tell(cache, space, 10.0, inf, "instructions", "p")
    assert cache_gaps(space, "p") == [announced_gap(inf)]
    assert max(cache_gaps(space, "instructions", "q")) < ANNOUNCED
    use(cache, space, 12.0, "instructions", "q")
    tell(cache, space, 12.0, 2.0, "instructions", "q")
    assert cache_gaps(space, "instructions", "q") == [announced_gap(2.0)] * 2, "sooner than usual"


def test_what_ended_prompts_shared_goes_with_the_last_of_them() -> None:
    cache, space = two_prompts(0.0, 0.0)
    tell(cache, space, 10.0, inf, "instructions", "q")
    assert cache_gaps(space, "instructions", "q") == [FIRST_GAP, announced_gap(inf)]
    tell(cache, space, 11.0, inf, "instructions", "p")
    assert cache_gaps(space, "instructions", "p") == [announced_gap(inf)] * 2


def test_a_prompt_that_did_not_come_for_long_has_no_say_in_what_it_shared() -> None:
    cache, space = two_prompts(0.0, 300.0)
    tell(cache, space, 301.0, inf, "instructions", "q")
    assert cache_gaps(space, "instructions", "q") == [announced_gap(inf)] * 2


def test_what_is_stored_behind_what_was_told_inherits_the_gap_of_its_prompt() -> None:
    cache, space = rhythmic_space(8)
    use(cache, space, 0.0, "a")
    store_at(cache, space, 0.0, "a")
    tell(cache, space, 1.0, inf, "a")
    store_at(cache, space, 2.0, "a", "b")
    assert cache_gaps(space, "b") == [FIRST_GAP]


@pytest.mark.parametrize("seconds", [1e-9, 1.0, 7.0, 1e4, 1e300, inf])
def test_whatever_is_told_has_a_class_behind_those_of_gaps(seconds: float) -> None:
    classes = class_of(np.array([announced_gap(seconds), MOST_GAP], np.uint8)).tolist()
    assert CLASSES == classes[1] + 1 <= classes[0] < CLASSES + ANNOUNCED_CLASSES == len(Rhythm(UseTimes()).horizons)
    assert (classes[0] == CLASSES + ANNOUNCED_CLASSES - 1) == (seconds == inf)


def test_with_lru_only_what_is_over_does_not_count_as_used() -> None:
    cache, space = one_space(3)
    store_at(cache, space, 0.0, "over")
    store_at(cache, space, 1.0, "waits")
    store_at(cache, space, 2.0, "other")
    tell(cache, space, 3.0, 300.0, "waits")
    tell(cache, space, 4.0, inf, "over")
    for name, left in (("new", ["waits", "other"]), ("newer", ["waits"])):
        store_at(cache, space, 5.0, name)
        assert names_readable(cache, space, "over", "waits", "other") == left


# -- admission -------------------------------------------------------------------------------------------------------


def test_a_lookup_of_a_prompt_as_long_as_the_pool_takes_as_many_steps_whatever_was_looked_up_before() -> None:
    def steps(prompts: int) -> int:
        cache, space = rhythmic_space(4096)
        for number in range(prompts):
            cache.lookup_and_lease([(space, [key(number)])], LookupMode.PREFIX, 0.0, 1.0, "o")
        whole = keys(*range(-4096, 0))
        return instructions_of(lambda: cache.lookup_and_lease([(space, whole)], LookupMode.PREFIX, 0.0, 1.0, "o"))

    assert steps(4000) < 1.2 * steps(400)


def busy(cache: BlockCache, space: Space, count: int) -> float:
    """So many blocks that are used every four seconds. Returns the time of their last use."""
    names = [f"busy {number}" for number in range(count)]
    for name in names:
        store_at(cache, space, 0.0, name)
    for now in range(4, 100, 4):
        for name in names:  # a share may not lease all of them at once
            use(cache, space, float(now), name)
    return 96.0


def admitted(cache: BlockCache, space: Space, *names: int | str, **terms: Any) -> bool:
    grant = cache.begin_store([(space, 0, keys(*names))], **terms)
    if not isinstance(grant, Refusal):
        cache.seal_all(grant)
        return True
    assert grant is Refusal.NOT_ADMITTED
    return False


def test_a_store_is_refused_that_would_evict_what_is_used_sooner() -> None:
    cache, space = rhythmic_space(4)
    now = busy(cache, space, 4)
    before = cache.stats()
    cache.expire(now + 1)
    assert not admitted(cache, space, "new")
    assert cache.stats() == before
    assert names_readable(cache, space, *[f"busy {n}" for n in range(4)], "new") == [f"busy {n}" for n in range(4)]
    check_integrity(cache)
    cache.expire(now + 60)  # they have not come back for longer than a new block is expected to take
    assert admitted(cache, space, "new")
    assert names_readable(cache, space, "busy 0", "new") == ["new"]


def test_what_belongs_to_a_quick_session_is_admitted() -> None:
    cache, space = rhythmic_space(5)
    now = busy(cache, space, 4)
    store(cache, space, "old")
    use(cache, space, now + 1, "busy 0", "more")
    assert admitted(cache, space, "more")
    assert not names_readable(cache, space, "old")


def test_there_is_no_refusal_while_there_is_room() -> None:
    cache, space = rhythmic_space(4)
    now = busy(cache, space, 3)
    cache.expire(now)
    assert admitted(cache, space, "x")
    assert not admitted(cache, space, "y"), "x may come back as soon as this"
    cache.expire(now + 40)
    assert admitted(cache, space, "y")


def declining(cache: BlockCache, space: Space) -> float:
    """A session is declined a part of its prompt, "a" to "d". Returns when."""
    now = busy(cache, space, 4) + 1
    use(cache, space, now, *"abcd")
    assert not admitted(cache, space, "b")
    return now


def test_behind_a_part_that_was_declined_nothing_is_stored() -> None:
    cache, space = rhythmic_space(4)
    declining(cache, space)
    cache.clear_blocks(space, keys("busy 0", "busy 1"))
    before = cache.stats()
    assert not admitted(cache, space, "c", "d"), "though there is room"
    assert cache.stats() == before
    check_integrity(cache)
    assert admitted(cache, space, "c", wanted=True)


@pytest.mark.parametrize("again", ["looked up again", "offered again"])
def test_a_prompt_that_was_declined_has_another_chance(again: str) -> None:
    cache, space = rhythmic_space(4)
    now = declining(cache, space)
    cache.clear_blocks(space, keys("busy 0", "busy 1"))
    if again == "looked up again":
        use(cache, space, now + 1, *"abcd")
    else:
        assert admitted(cache, space, "b")
    assert admitted(cache, space, "c")


def test_a_prompt_in_one_store_with_one_that_was_declined_is_stored() -> None:
    """An engine joins what a step has computed of all its requests."""
    cache, space = rhythmic_space(4)
    now = declining(cache, space)
    use(cache, space, now, "other")
    cache.clear_blocks(space, keys(*[f"busy {number}" for number in range(4)]))
    assert admitted(cache, space, "other", "c")
    assert admitted(cache, space, "of an answer", "d")


def test_of_prompts_that_were_declined_together_one_may_be_stored_alone() -> None:
    cache, space = rhythmic_space(3)
    ended(cache, space, {"a": 0.0, "b": 0.0, "over": inf})
    for name in ("p", "q"):
        use(cache, space, 101.0, name)
    assert not admitted(cache, space, "p", "q")
    assert admitted(cache, space, "q")
    assert not admitted(cache, space, "p")
    assert names_readable(cache, space, "a", "b", "over", "p", "q") == ["a", "b", "q"]


def test_of_two_sessions_with_one_rhythm_none_takes_the_place_of_the_other() -> None:
    """Nor a session's tail that of its head: those that know how soon they return wait until others have not."""
    cache, space = rhythmic_space(4)
    now = busy(cache, space, 4)
    use(cache, space, now + 1, "busy 0", "its tail")
    assert not admitted(cache, space, "its tail")
    cache.expire(now + 20)
    assert admitted(cache, space, "its tail")


def test_what_a_load_waits_for_is_admitted() -> None:
    cache, space = rhythmic_space(4)
    cache.expire(busy(cache, space, 4) + 1)
    assert not admitted(cache, space, "new")
    assert admitted(cache, space, "new", wanted=True)


def test_the_other_shard_of_a_block_is_admitted() -> None:
    cache = rhythmic(6)
    space, other = open_space(cache, shards=(1, 1)), open_space(cache, "other")
    store(cache, space, "half", shard=0)
    now = busy(cache, other, 5)
    cache.expire(now + 1)
    grant = cache.begin_store([(space, 1, keys("half"))])
    assert not isinstance(grant, Refusal)


def test_a_higher_priority_is_admitted_before_a_lower_one() -> None:
    cache, space = rhythmic_space(4)
    cache.expire(busy(cache, space, 4) + 1)
    assert not admitted(cache, space, "low", priority=Priority.LOW)
    assert admitted(cache, space, "high", priority=Priority.HIGH)


def test_a_share_within_its_guarantee_is_not_refused() -> None:
    cache = rhythmic(4)
    cache.set_shares(limits(a=(1, None), b=(1, None)))
    a, b = open_space(cache, "a"), open_space(cache, "b")
    cache.expire(busy(cache, b, 4) + 1)
    assert admitted(cache, a, "new")
    assert not admitted(cache, a, "more"), "beyond the guarantee"


def test_a_full_pool_is_still_a_full_pool() -> None:
    cache, space = rhythmic_space(4)
    now = busy(cache, space, 4)
    cache.expire(now + 1)
    cache.lookup_and_lease([(space, keys(*[f"busy {n}" for n in range(4)]))], LookupMode.PREFIX, now + 1, 50.0, "o")
    assert cache.begin_store([(space, 0, keys("new"))]) is Refusal.POOL_FULL


# -- what it is for --------------------------------------------------------------------------------------------------


def hits_of(eviction: Eviction, seed: int) -> float:
    """Share of blocks that hit: quick sessions among slow ones, whose blocks are the most and thrash LRU."""
    rng, cache = random.Random(seed), new_cache(48, eviction=eviction)
    space = open_space(cache)
    period = [20.0 if session % 4 == 0 else 160.0 for session in range(32)]
    due = sorted((rng.uniform(0, period[session]), session) for session in range(32))
    hits = asked = 0
    while due:
        now, session = due.pop(0)
        names = [f"{session}.{block}" for block in range(5)]
        found = use(cache, space, now, *names)
        if now > 600:
            hits, asked = hits + found, asked + len(names)
        grant = cache.begin_store([(space, 0, keys(*names))])
        if not isinstance(grant, Refusal):
            cache.seal_all(grant)
        if (after := now + period[session] * rng.uniform(0.8, 1.25)) < 2400:
            bisect.insort(due, (after, session))
    check_integrity(cache)
    return hits / asked


@long
@pytest.mark.parametrize("seed", range(3))
def test_two_rhythms_in_a_small_pool_hit_more_than_with_lru(seed: int) -> None:
    assert hits_of(Eviction.RHYTHM, seed) > hits_of(Eviction.LRU, seed) + 0.1


# -- when the order is that of LRU -----------------------------------------------------------------------------------


def undecided(pool: int) -> tuple[BlockCache, Space, Rhythm]:
    cache, space = one_space(pool, eviction=Eviction.RHYTHM)
    assert space.blocks.rhythm is not None
    return cache, space, space.blocks.rhythm


def thrash(cache: BlockCache, space: Space, pool: int, lookups: int) -> None:
    """Two prompts that are as long as the pool come in turns. Nothing is stored."""
    for number in range(lookups):
        names = [f"long {number % 2}.{block}" for block in range(pool)]
        use(cache, space, -100.0 + number, *names)
        cache.touch([(space, keys(*names))])


def test_at_first_all_is_stored_and_the_least_recently_used_go() -> None:
    cache, space, _ = undecided(8)
    now = busy(cache, space, 8)
    for number in range(12):
        store_at(cache, space, now + number, number)
    assert names_readable(cache, space, *range(12)) == list(range(4, 12))
    use(cache, space, now + 12, 4)
    assert admitted(cache, space, "new")
    assert names_readable(cache, space, 4, 5, "new") == [4, "new"]
    check_integrity(cache)


def test_it_takes_few_long_prompts_to_see_that_lru_thrashes() -> None:
    cache, space, rhythm = undecided(8)
    thrash(cache, space, 8, lookups=2)
    assert not rhythm.on, "none has come back"
    thrash(cache, space, 8, lookups=1)
    assert rhythm.on
    for number in range(8):
        store_at(cache, space, 0.0, number)
    assert not admitted(cache, space, "new"), "it is expected no sooner"


@pytest.mark.parametrize(("often", "seldom", "on"), [(9, 1, False), (7, 3, True)])
def test_the_order_is_that_of_lru_where_the_pool_nearly_suffices(often: int, seldom: int, on: bool) -> None:
    """Of ten prompts some are always the same, and the others come in turns, too seldom for LRU."""
    cache, space, rhythm = undecided(10)
    decided = []
    for turn in range(80):
        names = [f"often {number}" for number in range(often)]
        names += [f"seldom {(turn * seldom + number) % (seldom + 5)}" for number in range(seldom)]
        for name in names:
            use(cache, space, 10.0 * turn, name)
            admitted(cache, space, name)
            cache.touch([(space, keys(name))])
        decided.append(rhythm.on)
    assert any(decided) == on


def test_when_the_pool_suffices_again_the_order_is_that_of_lru() -> None:
    cache, space, rhythm = undecided(8)
    thrash(cache, space, 8, lookups=8)
    assert rhythm.on
    for turn in range(160):
        store_at(cache, space, 10.0 * turn, turn % 4)
        use(cache, space, 10.0 * turn, turn % 4)
        cache.touch([(space, keys(turn % 4))])
    assert not rhythm.on
    for number in range(12):
        store_at(cache, space, 2000.0, f"new {number}")
    assert len(names_readable(cache, space, *[f"new {number}" for number in range(12)])) == 8


def test_the_rhythm_counts_across_namespaces_from_the_switch_on() -> None:
    cache, fast, rhythm = undecided(3)
    slow = open_space(cache, "slow")
    store_at(cache, slow, 0.0, "slow")
    store_at(cache, fast, 0.0, 1)
    for now in range(10, 1610, 10):
        use(cache, fast, float(now), 1)
        if now % 160 == 0:
            use(cache, slow, float(now), "slow")
    store_at(cache, fast, 1600.0, 2)
    use(cache, slow, 1601.0, "slow")
    store_at(cache, fast, 1602.0, 3)
    assert names_readable(cache, slow, "slow") == ["slow"], "it was used later"
    rhythm.count(0, 0, 1, LATE_POOLS)
    assert rhythm.on
    store_at(cache, fast, 1603.0, 4)
    assert names_readable(cache, slow, "slow") == []
    check_integrity(cache)


def test_where_lru_would_have_hit_clearly_more_it_is_the_order_for_a_while() -> None:
    rhythm = Rhythm(UseTimes())
    rhythm.count(0, 0, 100, LATE_POOLS)
    assert rhythm.on
    for _ in range(100):
        rhythm.count(50, 55, 100, 1.0)
        assert rhythm.on, "not clearly"
    pools = 0.0
    while rhythm.on:
        rhythm.count(30, 55, 100, 0.5)
        pools += 0.5
    assert 0.5 < pools < LATE_POOLS
    for _ in range(round(TRY_AGAIN) - 1):
        rhythm.count(0, 0, 100, 1.0)
        assert not rhythm.on
    rhythm.count(0, 0, 100, 1.0)
    assert rhythm.on


def test_in_the_order_of_lru_what_is_over_goes_first() -> None:
    cache, space, _ = undecided(3)
    for name in "ab":
        store_at(cache, space, 0.0, name)
    tell(cache, space, 1.0, inf, "b")
    for name in "cd":
        store_at(cache, space, 2.0, name)
    assert names_readable(cache, space, *"abcd") == ["a", "c", "d"]


def test_prompts_that_never_return_say_nothing() -> None:
    cache, space, rhythm = undecided(2)
    for number in range(1000):
        use(cache, space, 1.0 * number, f"stranger {number}")
    assert not rhythm.on


@long
@pytest.mark.parametrize("seed", range(3))
def test_what_lru_would_have_hit_is_what_it_hits(seed: int) -> None:
    """Of sessions that grow, some much oftener asked than others, in a pool that holds a part of them."""
    rng, pool = random.Random(seed), 200
    (cache, space, rhythm), lru = undecided(pool), new_cache(pool)
    lru_space, counted = open_space(lru), [0, 0]

    def count(hit: int, lru_hit: int, known: int, pools: float) -> None:
        counted[0], counted[1] = counted[0] + lru_hit, counted[1] + known

    rhythm.count = count  # type: ignore[method-assign]
    turns, hits = [0] * 30, 0
    for step in range(2000):
        session = min(rng.randrange(30) for _ in range(3))
        turns[session] += 1
        begun, turn = divmod(turns[session], 15)  # after 15 turns another one begins in its place
        names = [f"{session}.{begun}.{block}" for block in range(5 + turn)]
        use(cache, space, 1.0 * step, *names)
        cache.touch([(space, keys(*names))])
        hits += use(lru, lru_space, 1.0 * step, *names)
        store(lru, lru_space, *names)
        lru.touch([(lru_space, keys(*names))])
    assert 0.2 < counted[0] / counted[1] < 0.9
    assert counted[0] == pytest.approx(hits, rel=0.06)
