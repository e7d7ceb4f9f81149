"""Whoever wants to know is told what becomes readable and what is lost, and nothing else."""

from __future__ import annotations

import pytest

from kvsidecar.errors import Refusal
from tests.cache.cache_machine import Told, split
from tests.cache.support import begin, keys, lease, namespace, new_cache, one_space, open_space, store


def test_a_block_is_told_with_its_last_shard_and_not_before() -> None:
    cache = new_cache(8)
    told, space = Told(cache), open_space(cache, shards=(1, 1))
    store(cache, space, "a", "b", shard=0)
    store(cache, space, "b", shard=1)
    assert told.readable == {0: set(keys("b"))}
    store(cache, space, "a", "c", shard=1)
    assert told.readable == {0: set(keys("a", "b"))}


def test_a_block_that_lacks_a_shard_was_never_told_and_is_not_taken_back() -> None:
    cache = new_cache(4)
    told, space = Told(cache), open_space(cache, shards=(1, 1))
    store(cache, space, "a", "b", shard=0)
    cache.abort_all(begin(cache, space, keys("a"), 1))
    store(cache, space, "c", "d")  # for which the halves of a and b go
    assert (told.said.count("removed"), told.readable) == (0, {0: set(keys("c", "d"))})


def test_of_blocks_that_go_together_only_the_whole_ones_are_taken_back() -> None:
    cache = new_cache(3)
    told, space = Told(cache), open_space(cache, shards=(1, 1))
    store(cache, space, "a", "half", shard=0)
    store(cache, space, "a", shard=1)
    store(cache, open_space(cache, "big", shards=(3,)), "x")
    assert told.readable == {0: set()}


@pytest.mark.parametrize("how", ["corrupt", "forgotten"])
def test_a_block_whose_bytes_are_wrong_is_taken_back_while_it_is_being_read(how: str) -> None:
    cache = new_cache(4)
    told, space = Told(cache), open_space(cache)
    store(cache, space, "a", "b")
    load = cache.begin_load([(space, 0, keys("a", "b"))], None, 0)
    assert not isinstance(load, Refusal)
    (cache.mark_corrupt if how == "corrupt" else cache.forget)(load, 0, 1)
    assert told.readable == {0: set(keys("a"))}
    cache.end_load(load)
    assert told.said == ["stored", "removed"]


def test_a_clear_is_one_word_and_what_is_stored_meanwhile_is_nobodys() -> None:
    cache = new_cache(8)
    told, space = Told(cache), open_space(cache)
    other = open_space(cache, group=1)
    store(cache, space, "a", "b")
    store(cache, other, "x")
    lease(cache, space, "a")
    grant = begin(cache, space, keys("c"))
    cache.clear(namespace())
    assert told.readable == {0: set(), 1: set()}
    cache.seal_all(grant)
    while cache.sweep():
        pass
    assert told.readable == {0: set(), 1: set()}
    assert told.said == ["stored", "stored", "cleared", "cleared"]


def test_nothing_is_told_of_other_namespaces_or_to_those_who_have_left() -> None:
    cache = new_cache(8)
    told = Told(cache)
    store(cache, open_space(cache, "another"), "a")
    assert told.said == []
    store(cache, open_space(cache), "a")
    cache.watch(namespace(), None)
    cache.clear()
    assert told.said == ["stored"]


def test_the_rows_of_a_table_name_its_readable_blocks() -> None:
    cache, space = one_space(8, shards=(1, 1))
    store(cache, space, "half", shard=0)
    store(cache, space, "a", "b", "c")
    lease(cache, space, "a")
    load = cache.begin_load([(space, 0, keys("b"))], None, 0)
    assert not isinstance(load, Refusal)
    cache.forget(load, 0, 0)
    assert split(space.blocks.readable_hashes(0, 100)) == set(keys("a", "c"))
    cache.end_load(load)
    store(cache, space, "d")
    pieces = [split(space.blocks.readable_hashes(row, row + 1)) for row in range(space.blocks.rows_used)]
    assert sorted(each for piece in pieces for each in piece) == sorted(keys("a", "c", "d"))


def test_a_row_whose_block_was_evicted_names_nothing() -> None:
    cache, space = one_space(2)
    store(cache, space, "a", "b")
    big = open_space(cache, "big", shards=(2,))
    store(cache, big, "x")
    assert space.blocks.readable_hashes(0, 100) == b""
    assert split(big.blocks.readable_hashes(0, 100)) == set(keys("x"))
